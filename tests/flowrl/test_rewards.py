"""Ready rewards: what each is worth, and that what cannot be judged is no 0."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses, rewards, sandbox
from flowrl.check import check
from flowrl.errors import PackageError, SandboxError, UnknownColumn, UnknownName, WrongType

ROWS = [{"prompt": f"{a}", "answer": f"{a}", "tests": "assert f(1) == 1"} for a in range(8)]


# --- by rule ---------------------------------------------------------------------------------------------------------


def test_exact_match_compares_what_a_pattern_captures_last() -> None:
    assert rewards.exact_match(" 72\n", "72") == 1.0
    assert rewards.exact_match("72", "72\n") == 1.0  # as a line of a file ends
    assert rewards.exact_match("72.0", "72") == 0.0
    tag = r"<answer>(.*?)</answer>"
    assert rewards.exact_match("<answer>1</answer> no, <answer>\n72 </answer>", "72", pattern=tag) == 1.0
    assert rewards.exact_match("<answer>72</answer> no, <answer>1</answer>", "72", pattern=tag) == 0.0
    assert rewards.exact_match("72", "72", pattern=tag) == 0.0
    assert rewards.exact_match("the answer is 72", "72", pattern=r"\d+") == 1.0


@pytest.mark.parametrize("answer", [72, 72.0, None])
def test_exact_match_refuses_an_answer_that_no_text_can_equal(answer: Any) -> None:
    with pytest.raises(TypeError, match=f"exact_match compares text, and the answer is {answer!r}: rewards.numeric_"):
        rewards.exact_match("72", answer)


@pytest.mark.parametrize(
    ("response", "answer", "tolerance", "score"),
    [
        ("it is 1,234.50.", 1234.5, 0, 1),
        ("about 3.14", "3.14159", 0, 0),
        ("about 3.14", "3.14159", 0.01, 1),
        ("1.1", 1.0, 0.1, 1),  # in decimals, where 1.1 - 1.0 is 0.1
        ("6.02e23 molecules", "#### 6.02e23", 0, 1),
        ("0.00001", 1e-5, 0, 1),
        ("1e-5", 0.00001, 0, 1),
        ("none", 0, 10, 0),
    ],
)
def test_numbers_are_equal_within_a_tolerance(response: str, answer: Any, tolerance: float, score: float) -> None:
    assert rewards.numeric_match(response, answer, tolerance=tolerance) == score


@pytest.mark.parametrize("answer", ["unknown", float("nan"), float("inf"), True, None, [72]])
def test_an_answer_without_a_number_is_no_wrong_response(answer: Any) -> None:
    with pytest.raises(ValueError, match="the answer holds no number"):
        rewards.numeric_match("72", answer)


def test_a_pattern_is_searched_and_a_format_is_matched_whole() -> None:
    assert rewards.regex_match("so\nx = 3\n", pattern=r"x = \d") == 1.0
    assert rewards.regex_match("so\ny = 3\n", pattern=r"x = \d") == 0.0
    assert rewards.format_match("so\nx = 3\n", pattern=r".*x = \d\n") == 1.0
    assert rewards.format_match("so\nx = 3\nhm", pattern=r".*x = \d\n") == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>72</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think> so <answer>72</answer>", 0),
        ("<think>a</think><answer>72</answer> and more", 0),
        ("<think>a<think>b</think></think><answer>72</answer>", 0),
        ("<think>a</think><answer>1</answer><answer>72</answer>", 0),
        ("<answer>72</answer><think>a</think>", 0),
        ("<think>a</think><answer>72", 0),
        ("", 0),
    ],
)
def test_the_usual_format_thinks_once_and_answers_once(response: str, score: float) -> None:
    assert rewards.format_match(response) == score


# --- length ----------------------------------------------------------------------------------------------------------


def test_overlong_falls_as_in_the_paper() -> None:
    """Eq. 13 of DAPO (arXiv:2503.14476), whose lengths are 16384 and a cache of 4096 up to 20480."""

    def paper(length: int, longest: int, cache: int) -> float:
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    for length in (0, 1, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 30000):
        assert rewards.overlong(range(length), max_tokens=20480, cache=4096) == paper(length, 20480, 4096)
    assert rewards.overlong(range(18432), max_tokens=20480, cache=4096) == -0.5
    assert rewards.overlong(range(5), max_tokens=4, cache=4) == -1.0


def test_length_error_counts_tokens_on_both_sides() -> None:
    found = [rewards.length_error(range(length), target=10, scale=0.5) for length in (0, 8, 10, 13)]
    assert found == [-5.0, -1.0, 0.0, -1.5]


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("so:\n```python\nx = 1\n```\nand better:\n```py\nx = 2\n```\ndone", "x = 2\n"),
        ("so:\n```python\nx = 1\n```\nit prints\n```text\n1\n```\n", "x = 1\n"),
        ("1. so:\n   ```\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ("```python\ns = '```'\n```\n", "s = '```'\n"),
        ("cut:\n```python\nx = 1\n", "x = 1\n"),
        ("```bash\nls\n```", None),
    ],
)
def test_a_program_is_the_last_block_of_python(response: str, program: str | None) -> None:
    assert rewards.extract_code(response) == program


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
ECHO = "```python\nimport sys\nfor line in sys.stdin: print(line.strip(), ' ')\n```"


@pytest.mark.parametrize(
    "tests",
    [
        "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'",
        ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"],
        json.dumps(["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]),
        "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)",
    ],
)
def test_a_program_passes_the_tests_of_its_functions(tests: Any) -> None:
    assert rewards.runs_code(ADD, tests) == 1.0
    assert rewards.runs_code(ADD.replace("+", "-"), tests) == 0.0
    assert rewards.runs_code("import sys; sys.exit(0)", tests) == 0.0
    assert rewards.runs_code("```bash\ntrue\n```", tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "a\nb\n", "output": "a\nb\n\n"}, {"stdin": "", "stdout": ""}],
        {"inputs": ["a\nb", []], "outputs": [["a", "b"], ""]},
        json.dumps({"inputs": ["a\nb", ""], "outputs": ["a\nb", ""]}),
    ],
)
def test_a_program_prints_what_its_tests_want(tests: Any) -> None:
    assert rewards.runs_code(ECHO, tests) == 1.0
    assert rewards.runs_code(ECHO.replace("line.strip()", "'a'"), tests) == 0.0
    assert rewards.runs_code("print('a\\nb')\nraise ValueError", tests) == 0.0


def test_the_share_of_tests_passed_is_asked_for() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(1, 2) == 3", "assert nothing"]
    assert rewards.runs_code(ADD, tests) == 0.0
    assert rewards.runs_code(ADD, tests, partial=True) == 0.5


def test_a_program_without_end_is_worth_nothing() -> None:
    assert rewards.runs_code("while True: pass", ["assert 1"], cpu_s=0.5) == 0.0


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        (None, "neither Python source nor inputs and outputs: None"),
        ([], "neither Python source nor inputs and outputs"),
        ([1], "neither Python source nor inputs and outputs"),
        ("assert f(", "tests are no Python source"),
        ("", "tests call nothing"),
        (
            "def check(candidate):\n    assert candidate(1) == 2\n",
            "tests call nothing, so that every program would pass",
        ),
        ({"inputs": ["1"], "outputs": []}, "no inputs and as many outputs"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, "tests call function 'f'"),
        ([{"input": "1"}], "neither 'stdout' nor 'output'"),
        ([{"input": 1, "output": "1"}], "no text: 1"),
    ],
)
def test_tests_that_cannot_be_read_are_no_wrong_program(tests: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rewards.runs_code("```bash\nls\n```", tests)


def test_a_sandbox_that_cannot_run_is_no_wrong_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CHILD", "/nowhere.py")
    with pytest.raises(SandboxError, match="a program could not be run"):
        rewards.runs_code(ADD, "assert add(1, 2) == 3")


# --- expressions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so $x = \frac{2}{4}$, hence \boxed{\frac{1}{2}}", "0.5", 1),
        (r"it is \boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"it is \boxed{(x+1)^2}", "x^2+2x+1", 1),
        (r"it is \boxed{3}", r"3\sqrt{2}", 0),
        ("it is 4", "$4$", 1),
        ("no idea", "4", 0),
        ("", "4", 0),
    ],
)
def test_expressions_are_equal_by_value(response: str, answer: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert rewards.math_equal(response, answer) == score
    with pytest.raises(ValueError, match="the answer holds no expression: ''"):
        rewards.math_equal(response, "")


def test_a_missing_package_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "math_verify" else find(name))
    with pytest.raises(PackageError, match=r"pip install 'flowrl\[math\]'"):
        rewards.math_equal("1", "1")
    problems = check(_graph(rewards.math_equal))
    assert [type(problem) for problem in problems] == [PackageError]
    assert problems[0].problem == "node 'math_equal': math_equal needs the package math-verify"
    assert "test_rewards.py" in str(problems[0].at)


# --- in a graph ------------------------------------------------------------------------------------------------------


def _graph(*functions: Any, settings: Sequence[dict[str, Any]] = ({},), weights: Any = None) -> fl.Graph:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("builtin:count_up", optimizer=fl.AdamW(lr=1e-3))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=2, max_new_tokens=4)
        handles = [f(samples, **given) for f, given in zip(functions, [*settings, *[{}] * 9], strict=False)]
        total = rewards.weighted_sum(samples, *handles, weights=weights)
        fl.update(policy, samples, advantages.grpo(samples, total), loss=losses.ppo_clip())

    return graph()


def test_every_reward_is_a_node_and_several_are_one() -> None:
    settings = [{}, {"pattern": "x"}, {"max_tokens": 4, "cache": 2}, {}]
    functions = (rewards.exact_match, rewards.regex_match, rewards.overlong, rewards.runs_code)
    graph = _graph(*functions, settings=settings, weights=(1.0, 0.5, 0.1, 1.0))
    assert check(graph) == []
    names = [function.__name__ for function in functions]
    assert [binding.source for binding in graph["weighted_sum"].bindings] == names
    assert [binding.parameter for binding in graph["runs_code"].bindings] == ["response", "tests"]


def test_weights_are_as_many_as_rewards() -> None:
    assert rewards.weighted_sum(1.0, 0.5, weights=(1.0, -2.0)) == 0.0
    assert rewards.weighted_sum(1.0, 0.5) == 1.5
    with pytest.raises(ValueError, match="zip"):
        rewards.weighted_sum(1.0, 0.5, weights=(1.0,))
    with pytest.raises(WrongType, match="node 'weighted_sum': each reward has a weight"):
        _graph(rewards.exact_match, rewards.share_correct, weights=(1.0,))


@pytest.mark.parametrize(
    ("function", "given", "error", "says"),
    [
        (rewards.regex_match, {"pattern": "("}, WrongType, "pattern is no regular expression"),
        (rewards.regex_match, {}, UnknownName, "needs a value for its setting 'pattern'"),
        (rewards.overlong, {"max_tokens": 4, "cache": 5}, WrongType, "no room to rise in"),
        (rewards.length_error, {"target": 0}, WrongType, "no length is aimed at"),
        (rewards.numeric_match, {"tolerance": -0.1}, WrongType, "no number is near enough, or each is"),
        (rewards.numeric_match, {"tolerance": float("nan")}, WrongType, "no number is near enough, or each is"),
    ],
)
def test_settings_that_mean_nothing_are_refused_while_the_graph_is_traced(
    function: Any, given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        _graph(function, settings=[given])


@pytest.mark.parametrize("limit", [{"cpu_s": 0}, {"memory_bytes": "1 GB"}])
def test_limits_that_leave_no_room_are_refused_while_the_graph_is_traced(limit: dict[str, Any]) -> None:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("builtin:count_up", optimizer=fl.AdamW(lr=1e-3))
        rows = [{"prompt": "1", "tests": "assert True"}] * 4
        rewards.runs_code(fl.rollout(policy, fl.prompts(rows, batch=4)), **limit)

    with pytest.raises(WrongType, match="a limit of the sandbox leaves no room"):
        graph()


def test_a_reward_of_tests_needs_data_with_tests() -> None:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("builtin:count_up", optimizer=fl.AdamW(lr=1e-3))
        rows = [{"prompt": "1", "answer": "2"}] * 4
        rewards.runs_code(fl.rollout(policy, fl.prompts(rows, batch=4)))

    with pytest.raises(UnknownColumn, match="node 'runs_code' reads column 'tests'") as caught:
        graph()
    assert "answer" in str(caught.value.found)


def test_a_kernel_without_sandbox_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CHILD", "/nowhere.py")
    problems = check(_graph(rewards.runs_code))
    assert [type(problem) for problem in problems] == [SandboxError]
    assert problems[0].problem == "node 'runs_code': a program could not be run in a sandbox"

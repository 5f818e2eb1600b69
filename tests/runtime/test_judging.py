"""A language model as a judge: what it is asked, what it answers, and what becomes of answers without a score."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import ModelFacts, Prompt, Sampling
from flowrl.check import check
from flowrl.errors import RunError, WrongType
from flowrl.rows import Key
from flowrl.runtime import run
from flowrl.runtime.cli import main
from flowrl.runtime.ranks import Rank
from flowrl.runtime.registry import describe, load_backend
from flowrl.seeds import mix
from flowrl.visualize.settings import settings_lines

from . import graph_with_judge
from .hands import ROWS, Hands, policy

PPO = losses.ppo_clip(clip_low=0.2, clip_high=0.2)
TINY, HF = ("judge", "tiny"), ("builtin:reverse_digits", "hf")


def ask(prompt: str, response: str, answer: int) -> str:
    """A question of few characters: the shipped model knows digits alone."""
    return f"{len(prompt)}{len(response)}{answer}>"


def digits(text: str) -> float:
    return float(sum(map(str.isdigit, text)))


def judged(by: tuple[str, str] = TINY, **settings: Any) -> fl.Graph:
    @fl.graph
    def graph() -> None:
        judge, model = fl.Model(by[0], backend=by[1], name="judge"), policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=3, max_new_tokens=5)
        given = {"prompt": ask, "parse": digits, "max_new_tokens": 6} | settings
        scores = fl.judge(judge, samples, **given)
        fl.update(model, samples, advantages.grpo(samples, scores), loss=PPO)

    return graph()


def sampled(graph: fl.Graph) -> tuple[Hands, list[Key]]:
    hands = Hands(graph)
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    return hands, sorted(hands.rows("rollout").keys)


@pytest.mark.parametrize("model", [TINY, HF])
def test_each_row_has_the_score_of_the_answer_that_its_question_gets_alone(model: tuple[str, str]) -> None:
    hands, keys = sampled(judged(model))
    done = hands.fire("judge", keys)
    rows, samples = hands.rows("judge"), hands.rows("rollout").select(keys)
    assert rows.keys == keys
    backend = load_backend(model[1])(fl.Model(model[0], backend=model[1]), Rank(), "cpu")
    for key, response, said, score in zip(
        keys, samples["response"], rows["judgement"], rows["scores"].tolist(), strict=True
    ):
        row = ROWS[key.prompt]
        question = backend.tokenizer.encode(ask(str(row["prompt"]), response, int(row["answer"])))
        alone = backend.generate([Prompt(key=Key(9, 9), ids=question)], Sampling(max_new_tokens=6, temperature=0.0), 0)
        assert said == backend.tokenizer.decode(next(each for step in alone for each in step).ids)
        assert score == digits(said)
    assert done.metrics["reward"] == (sum(rows["scores"].tolist()), 6)
    assert done.metrics["judge/truncated"].weight == 6


def test_answers_are_a_function_of_row_and_seed_alone() -> None:
    same = {"prompt": lambda response: "same", "temperature": 1.0, "max_new_tokens": 8}
    hands, keys = sampled(judged(**same))
    hands.fire("judge", keys)
    together = dict(zip(keys, hands.rows("judge")["judgement"], strict=True))
    assert len(set(together.values())) == len(keys)  # one question, and random numbers for every row
    hands.blocks.pop("judge")
    hands.fire("judge", [keys[4], keys[1]])
    assert dict(zip(hands.rows("judge").keys, hands.rows("judge")["judgement"], strict=True)) == {
        key: together[key] for key in (keys[4], keys[1])
    }
    other, keys = sampled(judged(name="second", **same))
    other.fire("second", keys)
    assert set(other.rows("second")["judgement"]).isdisjoint(together.values())


def test_a_judge_draws_no_random_number_of_the_sample_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, keys = sampled(judged(temperature=1.0))
    worker = hands.workers["mesh_2.0"]
    seen = []
    generate = worker.models["judge"].generate
    monkeypatch.setattr(
        worker.models["judge"], "generate", lambda *given: seen.append(given) or generate(*given), raising=True
    )
    hands.fire("judge", keys)
    [(prompts, sampling, seed)] = seen
    assert seed == mix(worker.seed, *b"judge")
    assert seed != worker.seed
    assert sampling == Sampling(max_new_tokens=6, temperature=1.0)
    assert [prompt.key for prompt in prompts] == [Key(0, number) for number in range(6)]


def test_chat_messages_go_through_the_judges_own_template() -> None:
    def talk(response: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Grade."}, {"role": "user", "content": "x"}]

    hands, keys = sampled(judged(prompt=talk))
    hands.fire("judge", keys[:1])
    backend = load_backend("tiny")(fl.Model("judge", backend="tiny"), Rank(), "cpu")
    question = [256, *b"system: Grade.\nuser: x\nassistant: "]
    alone = backend.generate([Prompt(key=Key(0, 0), ids=question)], Sampling(max_new_tokens=6, temperature=0.0), 0)
    assert hands.rows("judge")["judgement"] == [
        backend.tokenizer.decode(next(each for step in alone for each in step).ids)
    ]


# --- failures --------------------------------------------------------------------------------------------------------


def only_odd(text: str) -> float | None:
    return None if len(text) % 2 == 0 else 1.0


LAMBDA = "judge failed: function '<lambda>' of node 'judge'"


def fails_for_one(response: str, answer: int) -> str:
    return f"{1 / (answer - 1)}"


def test_an_answer_without_a_score_ends_the_run_and_is_shown() -> None:
    hands, keys = sampled(judged(HF, parse=lambda text: None, max_new_tokens=2))
    hands.try_to_fire("judge", keys)
    failure = hands.failure()
    assert failure["type"] == "ResultError"
    assert failure["problem"].endswith("of node 'judge' reads no score in an answer")
    assert "test_judging.py" in failure["at"]
    assert ", cut at max_new_tokens" in failure["found"]


def test_a_row_without_a_score_is_dropped_with_the_reason_and_is_no_0() -> None:
    hands, keys = sampled(judged(parse=only_odd, on_error="drop", temperature=1.0))
    done = hands.fire("judge", keys)
    kept, dropped = hands.rows("judge"), hands.dropped()
    assert set(kept.keys) | set(dropped) == set(keys)
    assert set(kept["scores"].tolist()) == {1.0}
    assert len(dropped) > 0
    assert set(dropped.values()) == {
        "judge failed: function 'only_odd' of node 'judge' reads no score in an answer"
    }  # fmt: skip
    assert done.metrics["reward"] == (len(kept), len(kept))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": fails_for_one}, "judge failed: ZeroDivisionError: division by zero"),
        ({"prompt": lambda answer: answer if answer else "?"}, f"{LAMBDA} gave no question"),
        ({"prompt": lambda answer: ["a"] if answer else "?"}, f"{LAMBDA} gave no question"),
        ({"prompt": lambda answer: [{"role": "user"}] if answer else "?"}, f"{LAMBDA} gave no question"),
        (
            {"prompt": lambda answer: "?" * (1 + 9 * answer), "max_prompt_tokens": 8},
            f"{LAMBDA} gave a question that is too long",
        ),
    ],
)
@pytest.mark.parametrize("on_error", ["fail", "drop"])
def test_a_question_that_cannot_be_asked_fails_for_its_rows_alone(
    settings: dict[str, Any], reason: str, on_error: str
) -> None:
    hands, keys = sampled(judged(on_error=on_error, **settings))
    if on_error == "fail":
        hands.try_to_fire("judge", keys)
        assert "of node 'judge' " in hands.failure()["problem"]
        return
    hands.fire("judge", keys)
    assert [key.prompt for key in hands.rows("judge").keys] == [0, 0, 0]
    assert [key.prompt for key in hands.dropped()] == [1, 1, 1]
    assert all(found.startswith(reason) for found in hands.dropped().values())


def test_a_question_leaves_room_for_the_answer() -> None:
    longest = describe("hf", "builtin:reverse_digits").max_length
    assert longest is not None
    for length, fits in ((longest - 6, True), (longest - 5, False)):
        # the tokenizer puts one token before a text
        hands, keys = sampled(judged(HF, prompt=lambda answer, n=length: "1" * (n - 1), max_new_tokens=6))
        hands.try_to_fire("judge", keys)
        if not fits:
            assert hands.failure()["type"] == "LengthError"
            assert hands.failure()["wanted"] == f"at most {longest - 6}, so that max_new_tokens=6 follow"


def test_a_question_without_a_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, keys = sampled(judged())
    monkeypatch.setattr(hands.workers["mesh_2.0"].models["judge"].tokenizer, "encode", lambda question: [])
    hands.try_to_fire("judge", keys)
    assert hands.failure()["problem"] == "function 'ask' of node 'judge' gave an empty question"


# --- whole runs ------------------------------------------------------------------------------------------------------

GRAPH = str(Path(__file__).parent / "graph_with_judge.py")
FLOWRL = [sys.executable, "-P", "-c", "import sys; from flowrl.runtime.cli import main; sys.exit(main())"]


def _samples(folder: Path) -> dict[tuple[int, ...], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {(row["step"], row["prompt_index"], row["sample_index"]): row for row in rows}


def test_two_ranks_of_judges_in_their_own_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    root = str(Path(fl.__file__).parent.parent)
    words = ["run", GRAPH, "--steps", "2", "--run-dir"]
    command = [*FLOWRL, *words, str(tmp_path / "local"), "--box.dp", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert main([*words, str(tmp_path / "inline"), "--launcher", "inline"]) == 0
    rows = _samples(tmp_path / "inline")
    assert rows == _samples(tmp_path / "local")
    assert len(rows) == 24
    assert all(row["reward"] == graph_with_judge.small_bytes(row["judge_said"]) for row in rows.values())
    assert len({row["judge_said"] for row in rows.values()}) > 20


def test_a_run_ends_when_too_many_answers_have_no_score() -> None:
    with pytest.raises(RunError, match="node 'judge' failed for 12 of 12 rows of step 1") as caught:
        run(graph_with_judge.training(parse="nothing", on_error="drop"), steps=2)
    assert "reads no score in an answer" in str(caught.value)


def test_dropped_answers_stand_in_the_record_without_a_score(tmp_path: Path) -> None:
    graph = graph_with_judge.training(parse="only_odd", on_error="drop", max_failure_rate=0.9)
    assert run(graph, steps=1, run_dir=tmp_path).steps == 1
    rows = list(_samples(tmp_path).values())
    dropped = [row for row in rows if row["reward"] is None]
    assert 0 < len(dropped) < 12
    assert all(str(row["dropped"]).startswith("judge failed: function 'only_odd'") for row in dropped)


# --- checks and pictures ---------------------------------------------------------------------------------------------


def _problems(**settings: Any) -> list[str]:
    facts = ModelFacts(max_length=100, num_heads=None, num_layers=None, vocab_size=258)
    problems = check(judged(**settings), describe=lambda model: facts, gpus=0)
    return [f"{problem.problem}; {problem.fix}" for problem in problems]


def test_the_longest_question_and_answer_fit_into_the_judge() -> None:
    assert _problems(max_new_tokens=50, max_prompt_tokens=50) == []
    assert _problems(max_new_tokens=51, max_prompt_tokens=50) == [
        "node 'judge' may get 50 + 51 = 101 tokens, more than model 'judge' takes; max_new_tokens=50 or less"
    ]
    assert len(_problems(max_new_tokens=100)) == 1  # not one token of a question has room


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt": "text"}, "node 'judge': prompt is no function that can be called"),
        ({"parse": None}, "node 'judge': parse is no function that can be called"),
        ({"parse": lambda text, answer: 1.0}, "node 'judge': parse takes the text of an answer, and nothing else"),
        ({"parse": lambda: 1.0}, "node 'judge': parse takes the text of an answer, and nothing else"),
        ({"max_new_tokens": 0}, "node 'judge': max_new_tokens is no count"),
        ({"temperature": -1.0}, "node 'judge': temperature is no temperature"),
        ({"on_error": "ignore"}, "node 'judge': on_error has an unknown policy"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(WrongType, match=says):
        judged(**settings)


def test_an_async_question_is_refused() -> None:
    async def later(response: str) -> str:
        return response

    with pytest.raises(WrongType, match="prompt is no function that can be called"):
        judged(prompt=later)


def test_a_picture_names_the_judge_and_its_functions() -> None:
    assert settings_lines(judged(max_prompt_tokens=9)["judge"]) == [
        "model=judge",
        "asks ask(), reads digits()",
        "max_new_tokens=6",
        "  max_prompt_tokens=9",
    ]

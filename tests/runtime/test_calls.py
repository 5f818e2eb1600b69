"""Calling a user's function: each way that it may answer, fail, or be written."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl import advantages, correction
from flowrl.errors import DeadlineError, NodeError, ResultError, WrongType
from flowrl.graph import FunctionSpec
from flowrl.rows import Key, Ragged
from flowrl.runtime import calls
from flowrl.runtime.calls import call_function

from .call_cases import KEYS, call, declare, keep, scored

TEXT = ["1", "0", "1"]
DAMAGE = {
    "None": None,
    "nan": math.nan,
    "inf": math.inf,
    "a value of type str": "1.0",
    "a value of type dict": {"scores": 1.0},
    "a value of type list": [1.0],
    "a value of type ndarray": np.zeros((3, 1)),
    "a value of type generator": (x for x in [1.0]),
    "a value of type float": 1e39,
}


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(calls.time, "sleep", slept.append)
    return slept


# --- a row


@pytest.mark.parametrize("what", DAMAGE)
def test_a_reward_per_row_that_is_no_number_ends_the_run(what: str) -> None:
    @fl.reward
    def judge_it(response: str) -> Any:
        return DAMAGE[what]

    with pytest.raises(ResultError) as error:
        call(judge_it, response=TEXT)
    text = str(error.value)
    assert f"function 'judge_it' of node 'judge' gave {what}" in text
    assert "step 1 prompt 0 sample 0" in text
    assert "wanted: a finite number" in text
    assert "never scored 0" in text


@pytest.mark.parametrize("what", DAMAGE)
def test_a_reward_per_row_that_is_no_number_drops_only_its_row(what: str) -> None:
    @fl.reward(on_error="drop")
    def judge_it(response: str) -> Any:
        return DAMAGE[what] if response == "0" else 1

    called = call(judge_it, response=TEXT)
    assert scored(called) == {KEYS[0]: 1.0, KEYS[2]: 1.0}
    assert called.dropped == {KEYS[1]: f"judge failed: function 'judge_it' of node 'judge' gave {what}"}


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float64(1), np.int32(1), np.bool_(True), torch.tensor(1), np.ones(())]
)
def test_numbers_of_every_kind_become_float32_scores(value: Any) -> None:
    @fl.reward
    def one(response: str) -> Any:
        return value

    called = call(one, response=TEXT)
    assert called.rows is not None
    assert called.rows["scores"].dtype == np.float32
    assert called.rows["scores"].tolist() == [1.0, 1.0, 1.0]


def test_a_reward_that_raises_on_item_2_names_itself_its_row_and_its_own_traceback() -> None:
    @fl.reward
    def fragile(response: str) -> float:
        return 1 / int(response)

    with pytest.raises(NodeError) as error:
        call(fragile, response=TEXT)
    text = str(error.value)
    assert "function 'fragile' of node 'judge' raised ZeroDivisionError: division by zero" in text
    assert "found:  in the call for step 1 prompt 0 sample 1" in text
    assert "return 1 / int(response)" in error.value.traceback
    assert error.value.traceback.count("File ") == 1


def test_a_reward_that_raises_on_item_2_may_drop_it() -> None:
    @fl.reward(on_error="drop")
    def fragile(response: str) -> float:
        return 1 / int(response)

    called = call(fragile, response=TEXT)
    assert scored(called) == {KEYS[0]: 1.0, KEYS[2]: 1.0}
    assert called.dropped == {KEYS[1]: "judge failed: ZeroDivisionError: division by zero"}


def test_a_reward_that_calls_exit_has_failed_and_ends_no_worker() -> None:
    @fl.reward(on_error="drop")
    def quits(response: str) -> float:
        sys.exit(3)

    assert set(call(quits, response=TEXT).dropped.values()) == {"judge failed: SystemExit: 3"}


def test_a_reward_that_sleeps_for_ever_is_dropped_in_time() -> None:
    @fl.reward(on_error="drop", timeout=0.05)
    def slow(response: str) -> float:
        while response == "0":
            pass
        return 1.0

    called = call(slow, response=TEXT)
    assert scored(called) == {KEYS[0]: 1.0, KEYS[2]: 1.0}
    assert called.dropped == {KEYS[1]: "judge failed: function 'slow' of node 'judge' took longer than 0.05 s"}


def test_no_rows_are_no_call() -> None:
    @fl.reward(per="batch")
    def never(response: list[str]) -> float:
        raise AssertionError

    assert call(never, []).rows is None


# --- retries


def test_a_call_is_tried_again_after_growing_pauses(no_back_off: list[float]) -> None:
    tries: list[str] = []

    @fl.reward(retries=3)
    def third_time(response: str) -> float:
        tries.append(response)
        if len(tries) < 3:
            raise ConnectionError("busy")
        return 1.0

    assert scored(call(third_time, KEYS[:1], response=["a"])) == {KEYS[0]: 1.0}
    assert no_back_off == [0.1, 0.2]


def test_tries_are_bounded_and_so_are_pauses(no_back_off: list[float]) -> None:
    @fl.reward(retries=9)
    def never(response: str) -> float:
        raise ConnectionError("busy")

    with pytest.raises(NodeError, match=r"(?s)ConnectionError: busy.*sample 0, 10 times"):
        call(never, response=TEXT)
    assert len(no_back_off) == 9
    assert max(no_back_off) == 10.0


# --- a group, a batch


@pytest.mark.parametrize("per", ["group", "batch"])
@pytest.mark.parametrize(
    ("result", "what"),
    [
        ([1.0], "1 value for 3 rows"),
        ([1, 2], "2 values for 3 rows"),
        (np.ones((3, 1)), "an array of 2 dimensions"),
        (torch.ones(3, 1), "an array of 2 dimensions"),
        ({"scores": [1.0, 2.0, 3.0]}, "a value of type dict"),
        ("1.0", "a value of type str"),
        (1.0, "a value of type float"),
        (np.float32(1), "a value of type float32"),
        (torch.tensor(1.0), "a value of type Tensor"),
        (True, "a value of type bool"),
        (None, "None"),
        ({1.0, 2.0, 3.0}, "a value of type set"),
        ([1.0, math.nan, 1.0], "nan"),
        (torch.tensor([1.0, math.inf, 1.0]), "inf"),
        ([1.0, None, 1.0], "None"),
        ([1.0, "1.0", 1.0], "a value of type str"),
        ([1.0, [1.0], 1.0], "a value of type list"),
    ],
)
def test_wrong_results_of_several_rows_are_refused(per: Any, result: Any, what: str) -> None:
    @fl.reward(per=per)
    def judge_all(response: list[str]) -> Any:
        return result

    with pytest.raises(ResultError) as error:
        call(judge_all, response=TEXT)
    assert f"function 'judge_all' of node 'judge' gave {what}" in str(error.value)

    @fl.reward(per=per, on_error="drop")
    def judge_or_drop(response: list[str]) -> Any:
        return result

    called = call(judge_or_drop, response=TEXT)
    assert called.rows is None
    assert set(called.dropped) == set(KEYS)


def test_a_generator_is_no_list() -> None:
    @fl.reward(per="group")
    def lazy(response: list[str]) -> Any:
        return (1.0 for _ in response)

    with pytest.raises(ResultError, match="gave a value of type generator"):
        call(lazy, response=TEXT)


def test_a_wrong_count_says_how_many_were_wanted() -> None:
    @fl.reward(per="group")
    def one(response: list[str]) -> Any:
        return [1.0]

    with pytest.raises(
        ResultError, match=r"found:  1 value for 3 rows from step 1 prompt 0 sample 0 on\n  wanted: 3 val"
    ):
        call(one, response=TEXT)


@pytest.mark.parametrize(
    "result", [[1, True, 0.5], np.array([1, 1, 0.5]), torch.tensor([1, 1, 0.5], requires_grad=True)]
)
def test_lists_arrays_and_tensors_are_scores(result: Any) -> None:
    @fl.reward(per="group")
    def judge_all(response: list[str]) -> Any:
        return result

    assert list(scored(call(judge_all, response=TEXT)).values()) == [1.0, 1.0, 0.5]


def test_half_precision_is_a_score() -> None:
    @fl.reward(per="batch")
    def half(response: list[str]) -> Any:
        return torch.ones(len(response), dtype=torch.bfloat16)

    assert list(scored(call(half, response=TEXT)).values()) == [1.0, 1.0, 1.0]


def test_columns_become_tensors_and_lists() -> None:
    seen: list[Any] = []

    @fl.node(out="x", per="group")
    def look(response: list[str], mask: Tensor, answer: list[str], level: Tensor) -> Any:
        seen.append((response, mask, answer, level))
        return level

    mask = Ragged.pack([[1], [1, 1, 1], []], "bool")
    call(look, response=TEXT, mask=mask, answer=["a", 1, "b"], level=[1, 2, 3])
    response, padded, answer, level = seen[0]
    assert response == TEXT
    assert padded.tolist() == [[True, False, False], [True, True, True], [False, False, False]]
    assert answer == ["a", 1, "b"]
    assert level.tolist() == [1, 2, 3]


# --- groups

SIX = [Key(0, prompt, sample) for sample in range(3) for prompt in range(2)]
"""Rows of two prompts, in turns."""


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (advantages.token_rewards, {}),
        (correction.truncated_is, {}),
        (correction.icepop, {}),
        (correction.reject, {"by": "token", "high": 2.0}),
    ],
)
def test_estimators_in_which_no_row_depends_on_another_are_called_once(
    function: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @fl.reward
    def right(response: str) -> float:
        return 1.0

    def with_streams(samples: Any, name: str) -> None:
        before = fl.logprobs(fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-3), name="other"), samples)
        function(samples, right(samples), before, name=name, **settings)

    node = declare(with_streams)
    asked: list[int] = []
    whole = calls.TimeLimit.call
    monkeypatch.setattr(calls.TimeLimit, "call", lambda *given: asked.append(len(given[-1])) or whole(*given))
    lengths = [1, 2, 3, 1, 2, 2]
    per_token = {name: Ragged.pack([[0.5] * n for n in lengths], "float32") for name in ("logprobs", "old_logprobs")}
    known = {**per_token, "mask": Ragged.pack([[True] * n for n in lengths], "bool"), "scores": np.ones(6, np.float32)}
    columns = {binding.parameter: known[binding.column] for binding in node.bindings}
    assert isinstance(node.spec, FunctionSpec)
    called = call_function(node, node.spec, SIX, columns)
    assert called.rows is not None
    assert called.rows.keys == SIX
    assert asked == [6]


def test_a_function_of_groups_that_names_them_is_called_once() -> None:
    seen: list[list[int]] = []

    @fl.reward(per="group")
    def above_mean(level: Tensor, group: Tensor) -> Tensor:
        seen.append(group.tolist())
        sums = torch.zeros(2).index_add(0, group, level)
        return level - sums[group] / 3

    called = call(above_mean, SIX, level=np.array([1.0, 10.0, 2.0, 20.0, 3.0, 30.0], np.float32))
    assert seen == [[0, 1, 0, 1, 0, 1]]
    assert [round(x, 3) for x in scored(called).values()] == [-1.0, -10.0, 0.0, 0.0, 1.0, 10.0]


def test_a_group_that_fails_takes_no_other_with_it() -> None:
    @fl.reward(per="group", on_error="drop")
    def picky(level: Tensor, group: Tensor) -> Tensor:
        if (level == 30).any():
            raise ValueError("30")
        return level

    called = call(picky, SIX, level=[1, 10, 2, 20, 3, 30])
    assert {key.prompt for key in scored(called)} == {0}
    assert {key.prompt: reason for key, reason in called.dropped.items()} == {1: "judge failed: ValueError: 30"}


def test_the_error_of_a_shared_call_names_the_group_at_fault() -> None:
    @fl.reward(per="group")
    def picky(level: Tensor, group: Tensor) -> Tensor:
        return torch.where(level == 30, torch.nan, level)

    with pytest.raises(ResultError, match=r"gave nan\n  found:  nan for step 1 prompt 1 sample 2"):
        call(picky, SIX, level=[1.0, 10.0, 2.0, 20.0, 3.0, 30.0])


def test_a_function_of_one_group_is_called_for_each() -> None:
    @fl.reward(per="group")
    def centred(level: Tensor) -> Tensor:
        return level - level.mean()

    called = call(centred, SIX, level=[1.0, 10.0, 2.0, 20.0, 3.0, 30.0])
    assert scored(called) == {SIX[0]: -1, SIX[1]: -10, SIX[2]: 0, SIX[3]: 0, SIX[4]: 1, SIX[5]: 10}


def test_a_missing_row_is_absent_from_its_baseline() -> None:
    keys = [Key(0, 0, 0), Key(0, 0, 2), Key(0, 0, 3)]

    @fl.reward
    def judge_it(response: str) -> float:
        return 0.0

    called = call(advantages.grpo, keys, extra=(judge_it,), scores=np.array([1, 0, 1], np.float32))
    found = list(scored(called, "advantages").values())
    assert found == pytest.approx([0.57735, -1.154701, 0.57735], abs=1e-5)


@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.gpg])
def test_groups_that_drops_have_left_too_small_are_dropped(estimator: Any) -> None:
    keys = [Key(0, 0, 0), Key(0, 1, 0), Key(0, 1, 1)]

    @fl.reward
    def judge_it(response: str) -> float:
        return 0.0

    called = call(estimator, keys, extra=(judge_it,), scores=np.array([1, 0, 1], np.float32))
    assert called.dropped == {keys[0]: "judge needs 2 samples of a prompt; 1 left"}
    assert set(scored(called, "advantages")) == set(keys[1:])


@pytest.mark.parametrize("share", [1, 2, 4])
def test_advantages_do_not_depend_on_which_groups_share_a_call(share: int) -> None:
    values = np.random.default_rng(0).random(16).astype(np.float32)
    keys = [Key(0, i // 4, i % 4) for i in range(16)]

    @fl.reward
    def judge_it(response: str) -> float:
        return 0.0

    found: dict[Key, float] = {}
    for start in range(0, 16, 4 * share):
        rows = slice(start, start + 4 * share)
        found |= scored(call(advantages.grpo, keys[rows], extra=(judge_it,), scores=values[rows]), "advantages")
    group = torch.arange(16) // 4
    assert list(found.values()) == advantages.grpo.function(torch.from_numpy(values), group).tolist()


# --- tokens, several outputs, metrics

RAGGED = Ragged.pack([[1], [1, 1, 1], []], "bool")


def test_padded_results_are_cut_to_the_responses() -> None:
    @fl.node(out="rewards", per="batch")
    def spread(mask: Tensor) -> Tensor:
        return torch.arange(9.0).reshape(3, 3)

    rows = call(spread, mask=RAGGED).rows
    assert rows is not None
    assert [row.tolist() for row in rows["rewards"]] == [[0.0], [3.0, 4.0, 5.0], []]
    assert rows["rewards"].values.dtype == np.float32


@pytest.mark.parametrize("per", ["row", "group", "batch"])
def test_a_column_of_k_numbers_a_token_is_a_table_for_a_row_and_padded_for_several(per: Any) -> None:
    seen: list[Any] = []

    @fl.node(out="teacher_logprobs", per=per)
    def halved(logprobs: Any) -> Any:
        seen.append(logprobs)
        return logprobs / 2

    wide = Ragged.pack([[[-1, -2]], [[-3, -4], [-5, -6], [-7, -8]], []], "float32")
    rows = call(halved, logprobs=wide).rows
    assert rows is not None
    assert rows["teacher_logprobs"].values.tolist() == (wide.values / 2).tolist()
    assert rows["teacher_logprobs"].lengths.tolist() == [1, 3, 0]
    if per == "row":
        assert [table.shape for table in seen] == [(1, 2), (3, 2), (0, 2)]
        with pytest.raises(ValueError, match="read-only"):
            seen[0][0, 0] = 1
    else:
        assert seen[0].shape == (3, 3, 2)
        assert seen[0][0].tolist() == [[-1, -2], [0, 0], [0, 0]]


def test_padding_may_hold_anything_and_tokens_may_not() -> None:
    @fl.node(out="rewards", per="batch")
    def spread(mask: Tensor) -> Tensor:
        return torch.where(mask, 1.0, torch.nan)

    assert call(spread, mask=RAGGED).rows is not None

    @fl.node(out="rewards", per="batch")
    def broken(mask: Tensor) -> Tensor:
        return torch.where(mask, torch.nan, 1.0)

    with pytest.raises(ResultError, match="nan at token 0 of step 1 prompt 0 sample 0"):
        call(broken, mask=RAGGED)


@pytest.mark.parametrize("width", [2, 4])
def test_a_padded_result_of_another_width_fits_no_response(width: int) -> None:
    @fl.node(out="rewards", per="batch")
    def spread(mask: Tensor) -> Tensor:
        return torch.ones(3, width)

    with pytest.raises(ResultError, match=rf"(?s)gave 'rewards' that fits no response.*\[3, {width}\].*\[3, 3\]"):
        call(spread, mask=RAGGED)


def test_a_row_answers_with_one_number_a_token() -> None:
    @fl.node(out="rewards")
    def each(mask: Any) -> Any:
        return [1] * len(mask)

    rows = call(each, mask=RAGGED).rows
    assert rows is not None
    assert [row.tolist() for row in rows["rewards"]] == [[1.0], [1.0, 1.0, 1.0], []]

    @fl.node(out="rewards")
    def short(mask: Any) -> Any:
        return np.ones(1)

    with pytest.raises(ResultError, match=r"(?s)found:  1 values of 'rewards' for .* sample 1.*wanted: 3, one a resp"):
        call(short, mask=RAGGED)


def test_a_mask_is_made_of_truth_values() -> None:
    @fl.node(out="mask")
    def first_only(response_ids: Any) -> Any:
        return [i == 0 for i in range(len(response_ids))]

    ids = Ragged.pack([[5], [6, 7, 8], []], "int32")
    rows = call(first_only, response_ids=ids).rows
    assert rows is not None
    assert rows["mask"].values.dtype == np.bool_
    assert [row.tolist() for row in rows["mask"]] == [[True], [True, False, False], []]

    @fl.node(out="mask")
    def wrong(response_ids: Any) -> Any:
        return np.full(len(response_ids), 2)

    with pytest.raises(ResultError, match="wanted: truth values"):
        call(wrong, response_ids=ids)


def test_arrays_that_a_row_is_given_cannot_be_changed() -> None:
    @fl.node(out="x")
    def meddle(mask: Any) -> Any:
        mask[:] = False
        return 1

    with pytest.raises(NodeError, match="read-only"):
        call(meddle, mask=RAGGED)


@pytest.mark.parametrize("per", ["row", "batch"])
def test_several_outputs_are_a_tuple(per: Any) -> None:
    @fl.node(out=("scores", "note"), per=per)
    def two(response: Any) -> Any:
        return (len(response), response) if per == "row" else ([1.0] * len(response), response)

    rows = call(two, response=TEXT).rows
    assert rows is not None
    assert rows["scores"].tolist() == [1.0, 1.0, 1.0]
    assert rows["note"] == TEXT

    @fl.node(out=("scores", "note"), per=per)
    def one(response: Any) -> Any:
        return [1.0, 2.0, 3.0]

    with pytest.raises(ResultError, match=r"(?s)value of type list.*wanted: a tuple of 2: scores, note"):
        call(one, response=TEXT)


def test_metrics_are_numbers_of_the_batch() -> None:
    @fl.node(out=fl.Metrics)
    def spread(level: Tensor) -> dict[str, Any]:
        return {"low": level.min(), "high": int(level.max())}

    called = call(spread, level=[1, 2, 3])
    assert called.values == {"low": 1.0, "high": 3.0}
    assert called.rows is None

    @fl.node(out=fl.Metrics)
    def mean(level: Tensor) -> Any:
        return level.float().mean()

    assert call(mean, level=[1, 2, 3]).values == {"judge": 2.0}

    @fl.node(out=fl.Metrics)
    def broken(level: Tensor) -> Any:
        return {"high": "3"}

    with pytest.raises(ResultError, match="'3' for metric 'high'"):
        call(broken, level=[1, 2, 3])


def test_a_metric_is_of_a_batch_and_drops_nothing() -> None:
    for per in ("row", "group"):
        with pytest.raises(WrongType, match="a metric is a number of a whole batch") as error:
            fl.node(out=fl.Metrics, per=per)  # type: ignore[call-overload]
        assert error.value.found == f"per={per!r}"
    with pytest.raises(WrongType, match="a metric drops no row, and has no share of failures"):
        fl.node(out=fl.Metrics, max_failure_rate=0.2)
    assert fl.node(out=fl.Metrics, per="batch")(lambda level: 1.0).per == "batch"
    assert fl.node(out="level")(lambda level: 1.0).per == "row"


def test_a_metric_that_fails_drops_no_row(caplog: pytest.LogCaptureFixture) -> None:
    @fl.node(out=fl.Metrics, on_error="drop")
    def broken(level: Tensor) -> Any:
        raise ValueError("no")

    called = call(broken, level=[1, 2, 3])
    assert (called.values, called.dropped) == ({}, {})
    assert "judge failed: ValueError: no" in caplog.text


# --- ways to write a function


class Judge:
    def __init__(self, want: str) -> None:
        self.want = want

    def exact(self, response: str) -> float:
        return float(response == self.want)

    def __call__(self, response: str) -> float:
        return self.exact(response)


def _exact(response: str, want: str) -> float:
    return float(response == want)


def _closure(want: str) -> Any:
    def inner(response: str) -> float:
        return float(response == want)

    return inner


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


@pytest.mark.parametrize(
    "function",
    [
        lambda response: float(response == "1"),
        _closure("1"),
        functools.partial(_exact, want="1"),
        Judge("1").exact,
        Judge("1"),
        _wrapped(_closure("1")),
    ],
    ids=["lambda", "closure", "partial", "bound method", "object", "wrapped"],
)
def test_every_kind_of_callable_is_a_reward(function: Any) -> None:
    assert list(scored(call(fl.reward(function), response=TEXT)).values()) == [1.0, 0.0, 1.0]


def test_parameters_that_are_not_bound_keep_their_defaults() -> None:
    @fl.node(out="x")
    def late(response: str, hint: str = "none", answer: str = "") -> str:
        return f"{response}{hint}{answer}"

    assert list(scored(call(late, response=TEXT, answer=["a", "b", "c"]), "x").values()) == [
        "1nonea",
        "0noneb",
        "1nonec",
    ]


@pytest.mark.parametrize("per", ["row", "group"])
def test_parameters_by_position_only_are_filled_across_gaps(per: Any) -> None:
    seen: list[Any] = []

    @fl.node(out="x", per=per)
    def narrow(response: Any, hint: str = "none", answer: Any = "", /, level: Any = 0, *, scale: int = 2) -> Any:
        seen.append((response, hint, answer, scale))
        return level * scale

    node = declare(narrow, scale=3)
    assert isinstance(node.spec, FunctionSpec)
    called = call_function(node, node.spec, KEYS, {"response": TEXT, "answer": ["a", "b", "c"], "level": [1, 2, 3]})
    assert list(scored(called, "x").values()) == [3, 6, 9]
    assert seen[0] == (("1", "none", "a", 3) if per == "row" else (TEXT, "none", ["a", "b", "c"], 3))


@pytest.mark.parametrize("per", ["row", "group"])
def test_a_starred_parameter_gets_the_column_of_every_stream_in_order(per: Any) -> None:
    @fl.node(out=fl.Scores, per=per)
    def combine(response: Any, level: Any = 7, *scores: Any, base: float = 0.0) -> Any:
        assert level == 7
        return base + sum(10**place * score for place, score in enumerate(scores))

    node = declare(combine, extra=(one_reward, another_reward, one_reward), base=5.0)
    bound = {binding.parameter: binding.source for binding in node.bindings if binding.column == "scores"}
    assert bound == {"scores[0]": "one_reward", "scores[1]": "another_reward", "scores[2]": "one_reward_2"}
    scores = {f"scores[{i}]": np.array([1.0, 2.0, 3.0]) + i for i in range(3)}
    without_level = [b for b in node.bindings if b.parameter != "level"]
    called = call_function(replace(node, bindings=tuple(without_level)), node.spec, KEYS, {"response": TEXT, **scores})
    assert list(scored(called).values()) == [326.0, 437.0, 548.0]
    assert combine("1", 7, 1.0, 2.0) == 21.0


@fl.reward
def one_reward(response: str) -> float:
    return 1.0


@fl.reward
def another_reward(response: str) -> float:
    return 2.0


def test_a_function_per_row_may_ask_for_its_group() -> None:
    @fl.node(out="x")
    def of(response: str, group: int) -> int:
        return group

    assert list(scored(call(of, SIX, response=list("abcdef")), "x").values()) == [0, 1, 0, 1, 0, 1]


# --- filters


@pytest.mark.parametrize("per", ["row", "group"])
@pytest.mark.parametrize("verdict", [True, 1, np.bool_(True), np.array([True]), torch.tensor(True), torch.tensor([3])])
def test_a_filter_keeps_what_is_true(per: str, verdict: Any) -> None:
    called = keep(lambda response: verdict, per, response=TEXT)
    assert called.rows is not None
    assert called.rows.keys == KEYS
    assert not called.dropped


def test_a_filter_drops_with_its_reason() -> None:
    called = keep(lambda response: response == "1", "row", response=TEXT)
    assert called.dropped == {KEYS[1]: "judge"}
    called = keep(lambda level: level.float().std() > 1, "group", SIX, level=[1, 10, 2, 20, 1, 30])
    assert called.rows is not None
    assert {key.prompt for key in called.rows.keys} == {1}
    assert {key.prompt for key in called.dropped} == {0}


@pytest.mark.parametrize("per", ["row", "group"])
@pytest.mark.parametrize(
    "verdict", [None, "False", [True], np.array([True, False]), torch.ones(3), math.nan, np.zeros(0)]
)
def test_a_filter_that_gives_no_single_verdict_is_refused(per: str, verdict: Any) -> None:
    def unsure(response: Any) -> Any:
        return verdict

    with pytest.raises(
        ResultError, match=rf"function 'unsure' of filter 'judge' gave .*(?s:.*)one truth value a {per}"
    ):
        keep(unsure, per, response=TEXT)


def test_a_filter_that_raises_names_its_row() -> None:
    def broken(response: str) -> bool:
        return bool(1 / int(response))

    with pytest.raises(NodeError, match=r"(?s)filter 'judge' raised ZeroDivisionError.*step 1 prompt 0 sample 1"):
        keep(broken, "row", response=TEXT)


def test_a_late_answer_ends_the_run_by_name() -> None:
    @fl.reward(timeout=0.05)
    def slow(response: str) -> float:
        while True:
            pass

    with pytest.raises(DeadlineError, match=r"function 'slow' of node 'judge' took longer than 0.05 s"):
        call(slow, response=TEXT)

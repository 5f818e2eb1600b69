"""Conversations: a scripted model and a tool, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest

import flowrl as fl
from flowrl.backend import Prompt, Response, Sampling
from flowrl.errors import DeadlineError, FlowrlError, NodeError, ResultError
from flowrl.graph import Node, RolloutSpec
from flowrl.location import caller
from flowrl.rows import Key
from flowrl.runtime.conversation import Conversation
from flowrl.runtime.tool_calls import ToolCalls
from flowrl.runtime.turns import Turns
from flowrl.seeds import turn_seed
from flowrl.tool import Tool

EOS = 0


class Letters:
    """A tokenizer of one id a character, and 0 for the end."""

    eos_ids = frozenset({EOS})

    def encode_text(self, text: str) -> list[int]:
        if not text.isascii():
            raise KeyError(text)
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(chr(id) if id else "$" * special for id in ids)


class Scripted:
    """A model that says given turns, whatever it is asked; it notes what that was."""

    version = 3

    def __init__(self, *turns: str, stop: str = "=") -> None:
        self.tokenizer = Letters()
        self.turns = turns
        self.stop = stop
        self.asked: list[list[Prompt]] = []
        self.seeds: list[int] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[list[Response]]:
        ids = [EOS if c == "$" else ord(c) for c in self.turns[len(self.asked)]]
        self.asked.append(list(prompts))
        self.seeds.append(seed)
        for prompt in prompts:
            samples = range(sampling.n) if prompt.key.sample < 0 else [prompt.key.sample]
            limit = sampling.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens
            said = ids[:limit]
            reason = "eos" if said[-1] == EOS else "stop_string" if chr(said[-1]) == self.stop else "length"
            for sample in samples:
                key = Key(prompt.key.step, prompt.key.prompt, sample)
                logprobs = [-0.5] * len(said)
                yield [Response(key=key, ids=said, logprobs=logprobs, stop=reason, version=self.version)]  # type: ignore[arg-type]
                yield []


@fl.tool
def echo(response: str) -> str | None:
    return f"<{response}>" if response.endswith("=") else None


def converse(
    model: Any, tool: Tool[Any, Any] = echo, *, max_turns: int | None = None, num_prompts: int = 1, **settings: Any
) -> tuple[list[Conversation], ToolCalls]:
    """Every conversation with prompts ``p0:``, ``p1:``, ..., and what was counted."""
    sampling = Sampling(**{"max_new_tokens": 50, "stop": ("=",), **settings})
    at = caller()
    spec = tool.spec(max_turns=max_turns, node="rollout", at=at)
    rollout = RolloutSpec(sampling=sampling, staleness=0, tool=spec)
    node = Node(name="rollout", spec=rollout, per="row", bindings=(), gates=(), outputs=(), at=at)
    prompts = [Prompt(key=Key(0, i), ids=model.tokenizer.encode_text(f"p{i}:")) for i in range(num_prompts)]
    numbers = list(range(num_prompts))
    columns = {"answer": numbers, "extra[0]": numbers, "prompt_ids": [p.ids for p in prompts]}
    calls = ToolCalls(node, spec, model.tokenizer, [p.key for p in prompts], columns)
    return list(chain.from_iterable(Turns(model, calls, sampling, prompts, 7).run())), calls


def text(talk: Conversation) -> str:
    return Letters().decode(talk.ids, special=True)


# --- the record


def test_a_tool_answers_each_turn_until_it_is_silent() -> None:
    model = Scripted("1+1=", "2*2=", "4$")
    [talk], calls = converse(model)
    assert text(talk) == "1+1=<1+1=>2*2=<2*2=>4$"
    assert talk.mask == [c == "m" for c in "mmmmttttttmmmmttttttmm"]
    assert talk.logprobs == [-0.5 if sampled else 0.0 for sampled in talk.mask]
    assert (talk.stop, talk.version, talk.num_turns) == ("eos", 3, 3)
    assert [(m["role"], m["content"]) for m in talk.turns] == [
        ("assistant", "1+1="), ("tool", "<1+1=>"), ("assistant", "2*2="), ("tool", "<2*2=>"), ("assistant", "4"),
    ]  # fmt: skip
    assert (calls.calls, calls.failures, calls.cut) == (3, 0, 0)


def test_the_next_turn_goes_on_from_the_ids_of_prompt_response_and_answer() -> None:
    model = Scripted("1=", "2=", "3$")
    converse(model, num_prompts=2, n=2, max_new_tokens=20)
    keys = [[prompt.key for prompt in asked] for asked in model.asked]
    samples = [Key(0, prompt, sample) for prompt in range(2) for sample in range(2)]
    assert keys == [[Key(0, 0), Key(0, 1)], samples, samples]
    second, third = model.asked[1][3], model.asked[2][3]
    assert Letters().decode(second.ids) == "p1:1=<1=>"
    assert list(third.ids) == [*second.ids, *b"2=<2=>"]
    assert (second.max_new_tokens, third.max_new_tokens) == (14, 8)


def test_the_first_turn_is_that_of_a_rollout_without_a_tool_and_no_turn_repeats_a_seed() -> None:
    model = Scripted("1=", "2=", "3$")
    converse(model)
    assert model.seeds == [7, turn_seed(7, 1), turn_seed(7, 2)]
    assert len(set(model.seeds)) == 3


def test_special_tokens_within_a_turn_stay_ids_and_are_shown_to_the_tool() -> None:
    seen = []

    @fl.tool
    def look(response: str) -> str | None:
        seen.append(response)
        return "!" if len(seen) == 1 else None

    [talk], _ = converse(Scripted("a$b=", "c$"), look)
    assert seen == ["a$b=", "c"]  # the one that ended a turn is left out
    assert talk.ids == [ord("a"), EOS, *b"b=!c", EOS]


def test_a_tool_reads_columns_of_the_prompts_messages_and_settings() -> None:
    seen = []

    @fl.tool
    def look(turns: list[dict[str, str]], answer: int, response: str, *, width: int) -> str | None:
        seen.append(([message["content"] for message in turns], answer, response, width))
        turns.clear()  # its own copy
        return "ok" if response == "1=" else None

    talks, _ = converse(Scripted("1=", "2$"), look(width=4), num_prompts=2)
    assert seen == [
        (["1="], 0, "1=", 4),
        (["1="], 1, "1=", 4),
        (["1=", "ok", "2"], 0, "2", 4),
        (["1=", "ok", "2"], 1, "2", 4),
    ]
    assert [len(talk.turns) for talk in talks] == [3, 3]


def test_a_tool_may_have_defaults_and_a_starred_column() -> None:
    seen = []

    @fl.tool
    def look(response: str, answer: int, absent: str = "none", *extra: int) -> None:
        seen.append((response, answer, absent, extra))

    converse(Scripted("1$"), look, num_prompts=2)
    assert seen == [("1", 0, "none", (0,)), ("1", 1, "none", (1,))]


def test_a_decorated_tool_still_runs_on_values() -> None:
    assert echo("1=") == "<1=>"
    assert echo(response="1") is None

    @fl.tool(timeout=1)
    def power(response: str, *, exponent: int = 2) -> str:
        return str(int(response) ** exponent)

    assert power("3") == "9"
    assert power(exponent=3)("3") == "27"


def test_a_tool_may_answer_all_turns_of_a_round_in_one_call() -> None:
    seen = []

    @fl.tool(per="batch", timeout=5)
    def together(response: list[str], turns: list[list[dict[str, str]]], answer: Any) -> list[str | None]:
        seen.append((response, [len(each) for each in turns], answer.tolist()))
        return [f"<{said}>" if number or len(each) == 1 else None
                for said, each, number in zip(response, turns, answer.tolist(), strict=True)]  # fmt: skip

    talks, calls = converse(Scripted("1=", "2=", "3$"), together, num_prompts=2, n=2, max_turns=3)
    assert seen == [
        (["1="] * 4, [1] * 4, [0, 0, 1, 1]),
        (["2="] * 4, [3] * 4, [0, 0, 1, 1]),
        (["3"] * 2, [5] * 2, [1, 1]),
    ]
    assert [text(talk) for talk in talks] == ["1=<1=>2="] * 2 + ["1=<1=>2=<2=>3$"] * 2
    assert [talk.stop for talk in talks] == ["stop_string"] * 2 + ["length"] * 2
    assert calls.calls == 10
    rowwise, _ = converse(Scripted("1=", "2$"), max_turns=2, num_prompts=2)
    one_call, _ = converse(Scripted("1=", "2$"), fl.tool(per="batch")(batched_echo), max_turns=2, num_prompts=2)
    assert [(t.key, t.ids, t.mask, t.turns) for t in rowwise] == [(t.key, t.ids, t.mask, t.turns) for t in one_call]


def batched_echo(response: list[str]) -> list[str | None]:
    return [echo(each) for each in response]


@pytest.mark.parametrize(
    ("gives", "what"),
    [
        (lambda: ["a"], "1 value for 2 rows"),
        (lambda: "ab", "a value of type str"),
        (lambda: [1, 2], "a value of type int"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["too few", "text", "numbers", "raises"],
)
def test_a_call_for_a_round_that_fails_fails_for_all_of_it(gives: Callable[[], Any], what: str) -> None:
    def broken(response: list[str]) -> Any:
        return gives() if response[0].endswith("=") else [None] * len(response)

    with pytest.raises(FlowrlError) as caught:
        converse(Scripted("1=", "2$"), fl.tool(per="batch")(broken), num_prompts=2)
    assert what in caught.value.problem
    talks, calls = converse(Scripted("1=", "2$"), fl.tool(per="batch", on_error="drop")(broken), num_prompts=2)
    assert all(talk.dropped.startswith("broken failed: ") for talk in talks)
    assert (calls.calls, calls.failures) == (2, 2)


def test_conversations_leave_as_they_end() -> None:
    @fl.tool
    def first_only(response: str, answer: int) -> str | None:
        return "more" if answer else None

    model = Scripted("1=", "2$")
    talks, _ = converse(model, first_only, num_prompts=2, max_turns=2)
    assert [talk.key.prompt for talk in talks] == [0, 1]
    assert [talk.stop for talk in talks] == ["stop_string", "length"]
    assert [len(asked) for asked in model.asked] == [2, 1]


# --- turns and tokens are used up


def test_the_last_turn_of_all_is_cut_off_if_the_tool_still_has_an_answer() -> None:
    [talk], calls = converse(Scripted("1=", "2="), max_turns=2)
    assert (text(talk), talk.stop, calls.calls) == ("1=<1=>2=", "length", 2)
    [talk], _ = converse(Scripted("1=", "2$"), max_turns=2)
    assert (text(talk), talk.stop) == ("1=<1=>2$", "eos")
    [talk], _ = converse(Scripted("1="), max_turns=1)
    assert (text(talk), talk.stop) == ("1=", "length")


def test_an_answer_that_leaves_the_model_no_token_is_not_appended() -> None:
    for budget, wanted, turns in ((6, "1=", 1), (7, "1=<1=>2", 3), (8, "1=<1=>2=", 3), (20, "1=<1=>2=<2=>3$", 5)):
        [talk], _ = converse(Scripted("1=", "2=", "3$"), max_new_tokens=budget)
        assert text(talk) == wanted
        assert talk.stop == ("eos" if budget == 20 else "length")
        assert len(talk.turns) == turns
        assert len(talk.ids) == len(talk.mask) == len(talk.logprobs) <= budget


def test_a_turn_that_ends_with_the_last_token_is_still_read() -> None:
    [talk], calls = converse(Scripted("12$"), max_new_tokens=3)
    assert (talk.stop, calls.calls) == ("eos", 1)
    [talk], calls = converse(Scripted("12="), max_new_tokens=3)
    assert (talk.stop, calls.calls) == ("length", 1)
    [talk], calls = converse(Scripted("123="), max_new_tokens=3)
    assert (talk.stop, calls.calls) == ("length", 0)  # cut within a turn: there is nothing to answer


def test_an_empty_answer_is_an_answer() -> None:
    @fl.tool
    def quiet(response: str) -> str | None:
        return "" if response.endswith("=") else None

    [talk], _ = converse(Scripted("1=", "2$"), quiet)
    assert (text(talk), talk.mask) == ("1=2$", [True] * 4)


# --- answers that are too long


def long_answer(**options: Any) -> Tool[Any, Any]:
    @fl.tool(**options)
    def speak(response: str) -> str | None:
        return "abcdef" if response.endswith("=") else None

    return speak


@pytest.mark.parametrize(("side", "kept"), [("right", "abc"), ("left", "def")])
def test_a_long_answer_is_cut_on_the_declared_side_and_counted(side: str, kept: str) -> None:
    [talk], calls = converse(Scripted("1=", "2$"), long_answer(max_answer_tokens=3, on_too_long=side))
    assert (text(talk), calls.cut) == (f"1={kept}2$", 1)
    assert talk.turns[1]["content"] == kept
    [talk], calls = converse(Scripted("1=", "2$"), long_answer(max_answer_tokens=6, on_too_long=side))
    assert (text(talk), calls.cut) == ("1=abcdef2$", 0)


def test_a_long_answer_drops_its_row_or_ends_the_run_where_that_is_declared() -> None:
    [talk], _ = converse(Scripted("1="), long_answer(max_answer_tokens=3, on_too_long="drop"))
    assert talk.dropped == "speak failed: an answer of tool 'speak' of node 'rollout' is too long"
    with pytest.raises(ResultError, match=r"(?s)'speak' of node 'rollout' is too long.*6 tokens.*at most 3") as caught:
        converse(Scripted("1="), long_answer(max_answer_tokens=3, on_too_long="error"))
    assert caught.value.at is not None


# --- failures


def failing(error: Callable[[], Any], **options: Any) -> Tool[Any, Any]:
    @fl.tool(**options)
    def broken(response: str, answer: int) -> Any:
        if not response.endswith("="):
            return None
        return error() if answer == 1 else "ok"

    return broken


FAILURES: dict[str, tuple[Callable[[], Any], type[FlowrlError], str]] = {
    "raises": (lambda: 1 / 0, NodeError, "ZeroDivisionError: division by zero"),
    "exits": (lambda: exit(3), NodeError, "SystemExit: 3"),
    "hangs": (lambda: time.sleep(60), DeadlineError, "function 'broken' of node 'rollout' took longer than 0.05 s"),
    "number": (lambda: 3, ResultError, "function 'broken' of node 'rollout' gave a value of type int"),
    "bytes": (lambda: b"3", ResultError, "function 'broken' of node 'rollout' gave a value of type bytes"),
    "surrogate": (lambda: "\ud800", ResultError, "function 'broken' of node 'rollout' gave a value of type str"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_tool_that_fails_ends_the_run_drops_its_row_or_tells_the_model(what: str) -> None:
    error, kind, reason = FAILURES[what]
    with pytest.raises(kind) as caught:
        converse(Scripted("1=", "2$"), failing(error, timeout=0.05), num_prompts=3)
    assert reason in caught.value.problem
    assert "step 1 prompt 1 sample 0" in str(caught.value.found)
    talks, calls = converse(Scripted("1=", "2$"), failing(error, timeout=0.05, on_error="drop"), num_prompts=3)
    assert {talk.key.prompt: talk.dropped for talk in talks} == {0: "", 1: f"broken failed: {reason}", 2: ""}
    assert (calls.failures, calls.calls) == (1, 5)
    talks, calls = converse(Scripted("1=", "2$"), failing(error, timeout=0.05, on_error="tell"), num_prompts=3,
                            max_new_tokens=200)  # fmt: skip
    said = {talk.key.prompt: text(talk) for talk in talks}
    assert said == {0: "1=ok2$", 1: f"1={reason}2$", 2: "1=ok2$"}
    assert (calls.failures, calls.calls) == (1, 6)


def test_a_tool_is_tried_again_as_often_as_declared() -> None:
    tries = []

    @fl.tool(retries=2)
    def flaky(response: str) -> str | None:
        tries.append(response)
        if len(tries) < 3:
            raise OSError("busy")
        return None

    [talk], _ = converse(Scripted("1$"), flaky)
    assert (len(tries), talk.stop) == (3, "eos")


def test_an_answer_that_the_tokenizer_refuses_is_a_failure_that_cannot_be_told() -> None:
    for policy in ("fail", "tell"):
        with pytest.raises(ResultError, match=r"(?s)'broken' of node 'rollout' cannot be tokenized.*KeyError"):
            converse(Scripted("1=", "2$"), failing(lambda: "é", on_error=policy), num_prompts=2)
    talks, calls = converse(Scripted("1=", "2$"), failing(lambda: "é", on_error="drop"), num_prompts=2)
    assert [bool(talk.dropped) for talk in talks] == [True, False]
    assert calls.failures == 1

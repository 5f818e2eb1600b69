"""`fl.tool`: what it takes, and what a rollout makes of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.check import check
from flowrl.errors import BackendError, UnknownName, WrongType
from flowrl.graph import Binding, EvaluateSpec, RolloutSpec
from flowrl.tool import Tool


@fl.tool(timeout=3, on_error="tell", retries=1, max_answer_tokens=9, on_too_long="left", role="user")
def search(response: str, turns: list[dict[str, str]], table: str, *, limit: int = 3) -> str | None:
    return f"{limit} of {table}" if response else None


@fl.reward
def length(turns: list[dict[str, str]]) -> float:
    return float(len(turns))


def traced(tool: Tool[Any, Any], *, evaluated: bool = False) -> fl.Graph:
    @fl.graph
    def converse() -> None:
        policy = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-3))
        prompts = fl.prompts([{"prompt": "a", "table": "t"}] * 4, batch=4)
        samples = fl.rollout(policy, prompts, n=2, tool=tool, max_turns=5, stop="=")
        if evaluated:
            held_out = fl.prompts([{"prompt": "a", "table": "t"}] * 4, batch=4, name="held_out")
            fl.evaluate(policy, held_out, length, every=1, tool=tool, stop="=")
        fl.update(policy, samples, advantages.grpo(samples, length(samples)), loss=losses.ppo_clip())

    return converse()


def test_a_rollout_reads_what_its_tool_reads_and_writes_the_turns() -> None:
    graph = traced(search(limit=7))
    node = graph["rollout"]
    assert isinstance(node.spec, RolloutSpec)
    assert node.bindings == tuple(Binding(name, "prompts", name) for name in ("prompt_ids", "prompt_messages", "table"))
    assert "turns" in node.outputs
    assert graph["length"].bindings == (Binding("turns", "rollout", "turns"),)
    tool = node.spec.tool
    assert tool is not None
    assert (tool.role, tool.max_answer_tokens, tool.on_too_long, tool.max_turns) == ("user", 9, "left", 5)
    assert (tool.call.timeout_s, tool.call.on_error, tool.call.retries) == (3, "tell", 1)
    assert tool.call.settings == {"limit": 7}
    assert check(graph) == []


def test_an_evaluation_has_the_same_tool_and_scores_its_turns() -> None:
    node = traced(search, evaluated=True)["evaluate"]
    assert isinstance(node.spec, EvaluateSpec)
    assert node.spec.tool is not None
    assert node.spec.tool.max_turns is None
    assert node.spec.sampling.stop == ("=",)
    assert {b.column for b in node.bindings} == {"prompt_ids", "prompt_messages", "table"}


def test_settings_of_a_tool_add_up_and_it_still_runs() -> None:
    assert search(limit=2)("x", [], "t") == "2 of t"
    assert search(limit=2)(limit=4)("x", [], table="t") == "4 of t"
    assert search("x", turns=[], table="t", limit=5) == "5 of t"
    assert search.__name__ == "search"

    @fl.tool
    def needy(response: str, *, key: str) -> str:
        return key

    with pytest.raises(UnknownName, match="node 'rollout' needs a value for its setting 'key'"):
        traced(needy)
    assert traced(needy(key="k"))["rollout"].spec.tool.call.settings == {"key": "k"}


def test_a_callable_without_a_name_is_a_tool_under_the_name_of_what_it_wraps() -> None:
    def word(response: str, size: int = 1) -> str:
        return "x" * size

    tool = fl.tool(functools.partial(word, size=3))
    assert tool.function.__name__ == "word"
    assert tool("a") == "xxx"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "a timeout is no time"),
        ({"max_answer_tokens": 0}, "max_answer_tokens is no count"),
        ({"on_too_long": "cut"}, "on_too_long has an unknown policy"),
        ({"role": ""}, "role names no role"),
    ],
)
def test_an_option_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongType, match=message) as caught:
        fl.tool(**options)
    assert "test_tool.py" in str(caught.value.at)


def test_what_is_no_function_is_no_tool() -> None:
    with pytest.raises(WrongType, match=r"fl\.tool decorates what is no function"):
        fl.tool(3)  # type: ignore[call-overload]


def test_what_a_tool_needs_is_asked_before_the_run() -> None:
    def absent() -> None:
        raise BackendError("no sandbox can be made here")

    @fl.tool(needs=absent)
    def python(response: str) -> str:
        return response

    for evaluated in (False, True):
        [problem] = check(traced(python, evaluated=evaluated))
        assert problem.problem == "node 'rollout': no sandbox can be made here"

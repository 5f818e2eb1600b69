"""What a rollout and an evaluation with a tool share: its columns, and what cannot be meant."""

from __future__ import annotations

from typing import Any

from flowrl.backend import Sampling
from flowrl.columns import bind, positional
from flowrl.errors import Location
from flowrl.expect import expect_counts_or_none, unfit, wrong
from flowrl.graph import Binding, ToolSpec
from flowrl.stream import Prompts
from flowrl.tool import MESSAGES, TOOL_COLUMNS, Tool

TURN_COLUMNS = ("turns",)
"""What responses have besides when a tool answers: the model's turns and the answers, ``{"role", "content"}`` each."""


def declare_tool(
    tool: Tool[Any, Any] | None,
    prompts: Prompts,
    *,
    max_turns: int | None,
    sampling: Sampling,
    node: str,
    at: Location,
) -> tuple[ToolSpec | None, tuple[Binding, ...]]:
    """What a tool is to do, and the columns of the prompts that it reads; nothing without one.

    Raises:
        WrongType: no tool, a limit that is no count, or a tool that would never be asked.
        UnknownName, UnknownColumn: a setting or a column that is not there.
    """
    if tool is None:
        if max_turns is not None:
            fix = "tool=..., or leave max_turns= out: without a tool a response is one turn"
            raise unfit(node, at, "max_turns counts nothing", f"max_turns={max_turns}, no tool", "a tool", fix)
        return None, ()
    if not isinstance(tool, Tool):
        fix = "@fl.tool above the function; pass the function itself, not what calling it gives"
        raise wrong(node, at, "tool is no tool", tool, "a function under @fl.tool", fix)
    expect_counts_or_none(node, at, max_turns=max_turns)
    if sampling.ignore_eos and not sampling.stop:
        fix = "leave ignore_eos= out, or give stop= strings that end a turn"
        raise unfit(node, at, "its tool is never asked", "ignore_eos=True, stop=()", "turns that end", fix)
    spec = tool.spec(max_turns=max_turns, node=node, at=at)
    own = [parameter for parameter in positional(tool.function) if parameter.name not in TOOL_COLUMNS]
    messages = [Binding(MESSAGES, prompts.columns["prompt_ids"], MESSAGES)] if spec.role is not None else []
    return spec, tuple(dict.fromkeys([*messages, *bind(own, (prompts,), {}, node=node, at=at)]))

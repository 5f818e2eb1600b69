"""Filter: which rows, or groups, go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from flowrl.columns import bind, positional
from flowrl.expect import expect, wrong
from flowrl.functions import gates_of, with_rollout
from flowrl.graph import FilterSpec, Node
from flowrl.location import caller
from flowrl.stream import Samples, Stream
from flowrl.trace import tracer


def filter(
    samples: Samples,
    *streams: Stream,
    keep: Callable[..., Any],
    per: Literal["row", "group"] = "row",
    reason: str | None = None,
    name: str | None = None,
) -> Samples:
    """Let pass only rows, or whole groups, for which `keep` is true; the others are dropped, counted, with a reason.

    Args:
        samples: what is filtered.
        *streams: more columns for `keep`.
        keep: a function of columns by parameter name; with ``per="group"`` it sees tensors of the whole group.
        reason: what is written beside a dropped row; the node's name when left out.
    """
    at = caller()
    expect(samples, Samples, node=name or "filter", parameter="samples", at=at)
    for stream in streams:
        expect(stream, Stream, node=name or "filter", parameter="input", at=at)
    if per not in ("row", "group"):
        fix = "per='row' drops samples, per='group' drops prompts with all their samples"
        raise wrong(name or "filter", at, "per= has an unknown value", per, "'row' or 'group'", fix)

    def declare(final: str) -> Node:
        bindings = bind(positional(keep), (samples, *streams), {}, node=final, at=at)
        return Node(
            name=final,
            spec=FilterSpec(keep=keep, reason=reason or final),
            per=per,
            bindings=bindings,
            gates=with_rollout(gates_of([samples, *streams]), bindings, samples),
            outputs=(),
            at=at,
        )

    node = tracer().add(declare, name=name, default="filter")
    return Samples(node.name, samples.columns, (*samples.gates, node.name))

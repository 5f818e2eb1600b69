"""Filter: which rows, or groups, go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from flowrl.columns import bind, positional
from flowrl.expect import expect, expect_counts_or_none, unfit, wrong
from flowrl.functions import gates_of, with_rollout
from flowrl.graph import FilterSpec, Node
from flowrl.location import caller
from flowrl.stream import Samples, Stream
from flowrl.trace import tracer

MAX_WAVES = 1000
"""Of a step. The bounds of all queues grow with it, and with them the memory that a step may take and the time of their
proof."""


def filter(
    samples: Samples,
    *streams: Stream,
    keep: Callable[..., Any],
    per: Literal["row", "group"] = "row",
    reason: str | None = None,
    refill: int | None = None,
    name: str | None = None,
) -> Samples:
    """Let pass only rows, or whole groups, for which `keep` is true; the others are dropped, counted, with a reason.

    With `refill` it is the dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2): groups that do not
    pass are replaced by new prompts within the same step, until it has as many as its batch. Each such *wave* reads as
    many batches of `fl.prompts` as are missing at least, so that a batch there smaller than the update's (``batch=``)
    reads less beyond the need. Of the last wave the first groups in the order of their prompts are taken, never those
    that were sampled first, which would favour short responses. A step whose last wave leaves it short trains on what
    it has, with a warning. Metrics of a step: ``num_waves``, ``num_groups`` that went on, and ``useful_groups``, the
    share of all groups read that passed.

    Args:
        samples: what is filtered.
        *streams: more columns for `keep`.
        keep: a function of columns by parameter name; with ``per="group"`` it sees tensors of the whole group.
        reason: what is written beside a dropped row; the node's name when left out.
        refill: most waves of a step, the first included; 1000 at most, since every queue has room for them all. Needs
            ``per="group"``, and that whatever trains on these samples is behind the filter. None replaces nothing.
    """
    at = caller()
    expect(samples, Samples, node=name or "filter", parameter="samples", at=at)
    for stream in streams:
        expect(stream, Stream, node=name or "filter", parameter="input", at=at)
    if per not in ("row", "group"):
        fix = "per='row' drops samples, per='group' drops prompts with all their samples"
        raise wrong(name or "filter", at, "per= has an unknown value", per, "'row' or 'group'", fix)
    expect_counts_or_none(name or "filter", at, refill=refill)
    if refill is not None and refill > MAX_WAVES:
        fix = "refill=20, for one; where that fills no step, more samples a prompt or another keep="
        raise wrong(name or "filter", at, "refill= asks for too many waves", refill, f"at most {MAX_WAVES}", fix)
    if refill is not None and per != "group":
        fix = "per='group', with a keep= that decides on all samples of a prompt at once"
        raise unfit(name or "filter", at, "refill= replaces whole groups", f"per={per!r}", "per='group'", fix)

    def declare(final: str) -> Node:
        bindings = bind(positional(keep), (samples, *streams), {}, node=final, at=at)
        return Node(
            name=final,
            spec=FilterSpec(keep=keep, reason=reason or final, refill=refill),
            per=per,
            bindings=bindings,
            gates=with_rollout(gates_of([samples, *streams]), bindings, samples),
            outputs=(),
            at=at,
        )

    node = tracer().add(declare, name=name, default="filter")
    return Samples(node.name, samples.columns, (*samples.gates, node.name))

"""What a firing makes: rows as soon as they exist, and last its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.backend import Metrics, Sum
from flowrl.graph import Node, RolloutSpec
from flowrl.rows import Key, Rows

from .plan import Plan


@dataclass(slots=True)
class Emitted:
    """Something that a firing made."""

    content: Any
    """`Rows`, a dict of tensors, or None."""
    dropped: dict[Key, str] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None
    """Tokens of each row (prompt and response)."""


Made = Iterator[Emitted | Metrics]
Parts = Sequence[Any]


class Counts:
    """Sums over the responses of a firing."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.cut = 0
        self._turns: dict[str, int] = {}

    def add(self, lengths: Sequence[int], stops: Sequence[str]) -> None:
        """Count responses by their tokens and by why each ends."""
        self.samples += len(lengths)
        self.tokens += sum(lengths)
        self.cut += sum(stop == "length" for stop in stops)

    def add_turns(self, turns: Sequence[int], tool_tokens: Sequence[int]) -> None:
        """Count the turns of responses, and tokens in them that no model sampled."""
        for name, counts in (("turns", turns), ("tool_tokens", tool_tokens)):
            self._turns[name] = self._turns.get(name, 0) + sum(counts)

    def metrics(self) -> Metrics:
        """As a firing reports them; ``response_tokens`` are those that the model sampled."""
        return {
            "samples": Sum(self.samples, 1),
            "response_tokens": Sum(self.tokens - self._turns.get("tool_tokens", 0), 1),
            "response_length": Sum(self.tokens, self.samples),
            "truncated": Sum(self.cut, self.samples),
            **{name: Sum(count, self.samples) for name, count in self._turns.items()},
        }


def reward_metrics(plan: Plan, node: Node, rows: Rows | None) -> Metrics:
    """The scores that a node gave, as ``reward``, or ``reward/NODE`` where they are not the run's (`Plan.reward`)."""
    if "scores" not in node.outputs or rows is None:
        return {}
    sampled = rows.take([i for i, key in enumerate(rows.keys) if key.sample < _num_sampled(plan, node.name)])
    return {"reward" if node.name == plan.reward else f"reward/{node.name}": sum_of_scores(sampled)}


def _num_sampled(plan: Plan, node: str) -> float:
    """Samples of a prompt that are not greedy: those are baselines, and no samples of the policy."""
    spec = plan.graph[plan.stages[node].space].spec
    return spec.sampling.n if isinstance(spec, RolloutSpec) else math.inf


def sum_of_scores(scored: Rows | None) -> Sum:
    """All scores, under their number."""
    return Sum(0.0, 0) if scored is None else Sum(float(np.sum(scored["scores"], dtype=np.float64)), len(scored))

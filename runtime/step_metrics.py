"""Metrics of open steps: what firings report, added up until the step's line is written."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.backend import Sum

from .events import Firing

COUNTS = frozenset(
    {
        "tokens",
        "rows",
        "response_tokens",
        "samples",
        "num_dropped",
        "num_waves",
        "num_groups",
        "firings",
        "tool_calls",
        "tool_failures",
        "tool_cut",
    }
)
"""Metrics that are totals; all others are means."""


class StepMetrics:
    """Sums by step."""

    def __init__(self) -> None:
        self._metrics: dict[int, dict[str, Sum]] = {}
        self._times: dict[int, dict[tuple[str, str], float]] = {}

    def add(self, step: int, metrics: Mapping[str, Sum]) -> None:
        """Add to metrics of a step."""
        sums = self._metrics.setdefault(step, {}) if metrics else {}
        for name, (total, weight) in metrics.items():
            before = sums.get(name)
            sums[name] = Sum(before[0] + total, before[1] + weight) if before else Sum(total, weight)

    def time(self, firing: Firing, worker: str, seconds: float) -> None:
        """A worker has spent this long on a firing."""
        self.add(firing.step, {"firings": Sum(1, 1)})
        label = "optimizer" if firing.action == "step" else firing.node
        times = self._times.setdefault(firing.step, {})
        times[label, worker] = times.get((label, worker), 0.0) + seconds

    def close(self, step: int) -> dict[str, float]:
        """All metrics of a step, as numbers; ``time/NODE`` is the busiest worker's seconds in that node."""
        metrics = {n: s.total if n in COUNTS else s.mean for n, s in self._metrics.pop(step, {}).items()}
        times: dict[str, float] = {}
        for (node, _), seconds in self._times.pop(step, {}).items():
            times[f"time/{node}"] = max(times.get(f"time/{node}", 0.0), seconds)
        return {**metrics, **times}

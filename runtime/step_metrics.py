"""Metrics of open steps: what firings report, added up until the step's line is written."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.backend import Metric, Metrics, Sum

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
        self._metrics: dict[int, Metrics] = {}
        self._counts = set(COUNTS)
        """Names of totals, with every prefix that they came under."""
        self._times: dict[int, dict[tuple[str, str], float]] = {}

    def add(self, step: int, metrics: Mapping[str, Metric], prefix: str = "") -> None:
        """Add to metrics of a step, whose names begin with `prefix` there."""
        sums = self._metrics.setdefault(step, {}) if metrics else {}
        for own, metric in metrics.items():
            name = prefix + own
            sums[name] = sums[name] + metric if name in sums else metric
            if prefix and own in COUNTS:
                self._counts.add(name)

    def time(self, firing: Firing, worker: str, seconds: float) -> None:
        """A worker has spent this long on a firing."""
        self.add(firing.step, {"firings": Sum(1, 1)})
        label = "optimizer" if firing.action == "step" else firing.node
        times = self._times.setdefault(firing.step, {})
        times[label, worker] = times.get((label, worker), 0.0) + seconds

    def close(self, step: int) -> dict[str, float]:
        """All metrics of a step, as numbers; ``time/NODE`` is the busiest worker's seconds in that node.

        A mean of nothing is no number, and is left out: the loss and ``grad_norm`` of a step that trained nothing.
        """
        sums = self._metrics.pop(step, {})
        found = {name: each[0] if name in self._counts else each.value for name, each in sums.items()}
        metrics = {name: value for name, value in found.items() if value is not None}
        times: dict[str, float] = {}
        for (node, _), seconds in self._times.pop(step, {}).items():
            times[f"time/{node}"] = max(times.get(f"time/{node}", 0.0), seconds)
        return {**metrics, **times}

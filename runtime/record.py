"""Writing down every sample: what was asked, answered and scored, and why it was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flowrl.graph import PromptsSpec, SamplesSpec
from flowrl.rows import Column, Key, Ragged, Rows

from .events import Firing
from .plan import Plan
from .rundir import sample_row


class Lines(Protocol):
    """Where lines of JSON go."""

    def write_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append objects."""
        ...


class Recorder:
    """Turns the blocks of a step into lines; a row that was dropped early lacks columns and is written all the same.

    Args:
        plan: which node wrote which column.
        lines: where the lines go; None throws them away.
    """

    def __init__(self, plan: Plan, lines: Lines | None) -> None:
        self.plan = plan
        self.lines = lines

    def write(self, firing: Firing, parts: Sequence[Rows]) -> None:
        """Write the rows of one step, all at once: this runs on the host while others train."""
        if self.lines is None or not firing.keys:
            return
        tables = _Tables(firing, parts)
        nodes = self.plan.graph.nodes
        sources = [source for source, _ in self.plan.stages[firing.node].reads]
        [prompts] = [source for source in sources if isinstance(nodes[source].spec, PromptsSpec)]
        [rollout] = [source for source in sources if isinstance(nodes[source].spec, SamplesSpec)]
        asked = tables.values(prompts, "prompt")
        answered = tables.values(rollout, "response")
        stops = tables.values(rollout, "stop")
        lengths = tables.lengths(rollout, "response_ids")
        versions = tables.first(rollout, "versions")
        scores = {name: tables.values(name, "scores") for name in sources if name not in (prompts, rollout)}
        judged = {name: tables.values(name, "judgement") for name in scores if "judgement" in nodes[name].outputs}
        dropped: Mapping[str, str] = firing.settings.get("dropped", {})
        self.lines.write_all(
            sample_row(
                key,
                prompt=asked.get(key.group, ""),
                response=answered.get(key, ""),
                rewards={name: found.get(key) for name, found in scores.items()},
                version=versions.get(key),
                stop=stops.get(key),
                num_tokens=lengths.get(key),
                dropped=dropped.get(str(row)),
                **{f"{name}_said": found[key] for name, found in judged.items() if key in found},
            )
            for row, key in enumerate(firing.keys)
        )


class _Tables:
    """Values by key, gathered column by column from blocks; what was never made is not there."""

    def __init__(self, firing: Firing, parts: Sequence[Rows]) -> None:
        self._parts: dict[str, list[Rows]] = {}
        for each, part in zip(firing.inputs, parts, strict=True):
            self._parts.setdefault(each.source, []).append(part)

    def values(self, source: str, column: str) -> dict[Key, Any]:
        """A column's values."""
        return self._gather(source, column, lambda found: found.tolist() if isinstance(found, np.ndarray) else found)

    def lengths(self, source: str, column: str) -> dict[Key, int]:
        """How many values each row of a ragged column has."""
        return self._gather(source, column, lambda found: found.lengths.tolist())

    def first(self, source: str, column: str) -> dict[Key, int | None]:
        """The first value of each row of a ragged column; None for a row without any."""
        return self._gather(source, column, _first)

    def _gather(self, source: str, column: str, values: Any) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for part in self._parts.get(source, ()):
            if column in part.columns:
                found.update(zip(part.keys, values(part[column]), strict=True))
        return found


def _first(column: Column) -> list[int | None]:
    assert isinstance(column, Ragged)
    starts = column.offsets[:-1].tolist()
    values = column.values
    return [int(values[at]) if length else None for at, length in zip(starts, column.lengths.tolist(), strict=True)]

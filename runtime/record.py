"""Writing down every sample: what was asked, answered and scored, and why it was dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flowrl.graph import PromptsSpec, RolloutSpec
from flowrl.rows import Column, Key, Rows

from .events import Firing
from .plan import Plan
from .rundir import sample_row


class Lines(Protocol):
    """Where lines of JSON go."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
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
        """Write the rows of one step."""
        if self.lines is None:
            return
        values = _values(firing, parts)
        nodes = self.plan.graph.nodes
        [prompts] = {each.source for each in firing.inputs if isinstance(nodes[each.source].spec, PromptsSpec)} or {""}
        [rollout] = {each.source for each in firing.inputs if isinstance(nodes[each.source].spec, RolloutSpec)} or {""}
        scorers = [source for source, _ in self.plan.stages[firing.node].reads if source not in (prompts, rollout)]
        dropped: dict[str, str] = firing.settings.get("dropped", {})
        for row, key in enumerate(firing.keys):
            sample = values.get((rollout, key), {})
            versions = sample.get("versions", ())
            self.lines.write(
                sample_row(
                    key,
                    prompt=values.get((prompts, key.group), {}).get("prompt", ""),
                    response=sample.get("response", ""),
                    rewards={name: values.get((name, key), {}).get("scores") for name in scorers},
                    version=int(versions[0]) if len(versions) else None,
                    stop=sample.get("stop"),
                    num_tokens=len(sample["response_ids"]) if "response_ids" in sample else None,
                    dropped=dropped.get(str(row)),
                )
            )


def _values(firing: Firing, parts: Sequence[Rows]) -> dict[tuple[str, Key], dict[str, Column]]:
    """Each row's values by source and key; what was never made is not there."""
    found: dict[tuple[str, Key], dict[str, Any]] = {}
    for each, part in zip(firing.inputs, parts, strict=True):
        columns = {name: column.tolist() if hasattr(column, "tolist") else column for name, column in part.columns.items()}
        for row, key in enumerate(part.keys):
            found.setdefault((each.source, key), {}).update({name: column[row] for name, column in columns.items()})
    return found

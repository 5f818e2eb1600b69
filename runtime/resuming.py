"""Going on with a run: from which checkpoint, and what a person is told first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.errors import CheckpointError
from flowrl.graph import Graph

from .checkpoint import MAY_CHANGE, Checkpoint, latest
from .graph_record import graph_record
from .report import Console, Summary
from .rundir import RunDir

Settings = Mapping[str, Any]
_LISTED = ("source", "backend", "head", "dtype", "optimizer")
"""Of a model, what may differ between two parts of a run and is told; where it lies changes nothing."""


def find_checkpoint(folder: RunDir, graph: Graph, seed: int, console: Console) -> Checkpoint | None:
    """Where a resumed run goes on; None: at its start, for it has ended before its first step.

    Raises:
        CheckpointError: it has trained, and has left no checkpoint to go on from: starting over would erase its record.
    """
    found = latest(folder.path, graph, seed, console.warn)
    if found is None and folder.metrics.path.stat().st_size:
        raise CheckpointError(
            f"run folder '{folder.path}' holds steps, and no complete checkpoint to go on from",
            found=f"'{folder.metrics.path.name}' without a checkpoint",
            wanted="a complete folder under 'checkpoints'",
            fix="start again in another --run-dir, with --save-every to have a checkpoint before the last step",
        )
    return found


def tell_nothing_is_left(folder: RunDir, graph: Graph, steps: int, done: int, console: Console) -> Summary:
    """Say that a run has all its steps: no worker is started for that."""
    console.start(graph, steps, folder.path, first_step=done)
    console.warn(f"run folder '{folder.path}' holds {done} steps already, of {steps}: a larger --steps goes on with it")
    summary = Summary(outcome="done", steps=0, wall_s=0.0, written=folder.written())
    console.stop(summary)
    return summary


def tell_changes(before: Settings, graph: Graph, console: Console) -> None:
    """Say in one line which settings differ from the part of the run before.

    Args:
        before: `graph_record` of it.
    """
    after = json.loads(json.dumps(graph_record(graph)))
    changes = [*_changes(_settings(before), _settings(after))]
    if changes:
        console.warn(f"resumed with other settings than before: {', '.join(changes)}")


def _settings(record: Settings) -> dict[str, Any]:
    """What may differ, by a name of two or more parts."""
    found: dict[str, Any] = {}
    for model, settings in record.get("models", {}).items():
        found |= _flat(model, {name: settings.get(name) for name in _LISTED})
    for node, described in record.get("nodes", {}).items():
        settings = described.get("settings", {})
        found |= _flat(node, {name: settings[name] for name in MAY_CHANGE & settings.keys()})
    return found


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: item for part in value for key, item in _flat(f"{name}.{part}", value[part]).items()}


def _changes(before: Settings, after: Settings) -> Iterator[str]:
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"{name}={after[name]} (was {before[name]})"

"""Checkpoints: written aside, verified, made durable, and published by one rename.

``checkpoints/step-000100/`` holds one folder a trained model and ``run.json``. A version is written to ``….partial`` by the
ranks; only `publish` gives it its name, so a folder without that suffix is complete. The prompt cursor needs no file: the
prompts of a step are a function of its number.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrl.errors import CheckpointError
from flowrl.graph import Graph

FOLDER = "checkpoints"
RECORD = "run.json"
PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint says of its run."""

    version: int
    """Steps that were trained."""
    fingerprint: str
    """Of the graph."""
    path: str = ""


def publish(run_dir: Path, checkpoint: Checkpoint) -> Path:
    """Give a version that all ranks have written its name.

    Raises:
        CheckpointError: a model's folder is missing or empty.
    """
    final = run_dir / FOLDER / f"step-{checkpoint.version:06d}"
    partial = final.with_name(final.name + PARTIAL)
    if not partial.is_dir() or not all(any(model.iterdir()) for model in partial.iterdir()):
        raise CheckpointError(f"checkpoint '{partial}' is incomplete", fix="look for an error of a rank above")
    (partial / RECORD).write_text(json.dumps(asdict(checkpoint), indent=2))
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync(final.parent)
    return final


def latest(run_dir: Path, graph: Graph) -> Checkpoint | None:
    """The newest complete checkpoint of a run folder; None when it has none.

    Raises:
        CheckpointError: it is of another graph.
    """
    for path in sorted((run_dir / FOLDER).glob("step-*"), reverse=True):
        if path.suffix == PARTIAL or not (path / RECORD).is_file():
            continue
        found = json.loads((path / RECORD).read_text())
        if found["fingerprint"] != graph.fingerprint:
            raise CheckpointError(
                f"checkpoint '{path}' is of another graph",
                found=found["fingerprint"],
                wanted=graph.fingerprint,
                fix="resume with the graph and parameters of that run, or start in a new --run-dir",
            )
        return Checkpoint(version=found["version"], fingerprint=found["fingerprint"], path=str(path))
    return None


def sweep(run_dir: Path) -> None:
    """Remove what an interrupted write has left."""
    for path in (run_dir / FOLDER).glob(f"*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints: written aside, verified, made durable, and published by one rename.

``checkpoints/step-000100/`` holds one folder a trained model and ``run.json``, which lists every file with its size. A
version is written to ``….partial`` by the ranks; only `publish` gives it its name. The prompts of a step are a function
of its number; where a filter refills steps, ``run.json`` holds the cursor of their source (cursor.py) too, and where a
function has adaptive settings their values (adaptive.py).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.adaptive import adaptive_settings
from flowrl.describe import describe
from flowrl.errors import CheckpointError
from flowrl.graph import EvaluateSpec, Graph, UpdateSpec
from flowrl.refill import refills

FOLDER = "checkpoints"
RECORD = "run.json"
PARTIAL = ".partial"
SHOWN = 4
"""Differing settings that an error shows."""
MAY_CHANGE = frozenset({"staleness", "max_tokens", "timeout_s", "retries", "model", "max_mismatch"})
"""Settings that change how a run goes on, not what it learns from."""
_NAME = re.compile(r"step-(\d{6,})(\.partial)?")

log = logging.getLogger("flowrl.checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint says of its run."""

    version: int
    """Steps that were trained."""
    recipe: Mapping[str, Any]
    """See `recipe`."""
    path: str = ""
    cursors: Mapping[str, Any] = field(default_factory=dict)
    """By prompts node whose batches are no function of the step."""
    coefficients: Mapping[str, Any] = field(default_factory=dict)
    """By adaptive setting of a function."""


def recipe(graph: Graph, seed: int) -> dict[str, Any]:
    """All that decides which rows a step has and what is learned from them, by ``node.setting``.

    A resumed run must agree on it. Left out is what may change between two parts of a run: meshes, optimizers,
    staleness and evaluations.
    """
    found: dict[str, Any] = {"seed": seed}
    for name, node in graph.nodes.items():
        if isinstance(node.spec, EvaluateSpec):
            continue
        for setting in dataclasses.fields(node.spec):
            if setting.name not in MAY_CHANGE:
                found[f"{name}.{setting.name}"] = describe(getattr(node.spec, setting.name))
    return found


def partial_folder(checkpoints: Path, version: int) -> Path:
    """Where the ranks write a version."""
    return checkpoints / f"step-{version:06d}{PARTIAL}"


def publish(run_dir: Path, checkpoint: Checkpoint) -> Path:
    """Give a version that all ranks have written its name.

    Raises:
        CheckpointError: there is no model's folder, or one is empty.
    """
    partial = partial_folder(run_dir / FOLDER, checkpoint.version)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    models = [path for path in partial.iterdir() if path.is_dir()] if partial.is_dir() else []
    empty = [path.name for path in models if not any(_files(path))]
    if not models or empty:
        raise CheckpointError(
            f"checkpoint '{partial}' is incomplete",
            found=f"nothing in {', '.join(map(repr, empty))}" if empty else "no model's folder",
            wanted="files of every trained model",
            fix="look for an error of a rank above; the newest complete checkpoint stays",
        )
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial) if path.name != RECORD}
    record = {"version": checkpoint.version, "recipe": checkpoint.recipe, "files": sizes}
    record |= {"cursors": checkpoint.cursors} if checkpoint.cursors else {}
    record |= {"coefficients": checkpoint.coefficients} if checkpoint.coefficients else {}
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():  # `latest` has found it incomplete, or the run would have started behind it
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync(final.parent)
    return final


def latest(
    run_dir: Path, graph: Graph, seed: int = 0, warn: Callable[[str], None] = lambda text: None
) -> Checkpoint | None:
    """The newest complete checkpoint of a run folder; None when it has none.

    Args:
        graph, seed: what is to go on; they must have the checkpoint's `recipe`.
        warn: told of each newer one that is not complete, as the log is.

    Raises:
        CheckpointError: it is of another graph, or of other settings.
    """
    found = [(int(match[1]), path) for path, match in _ours(run_dir)]
    for version, path in sorted(found, key=lambda each: (each[0], not each[1].name.endswith(PARTIAL)), reverse=True):
        record = _record(path)
        if missing := _missing(path, record, version, graph):
            text = f"checkpoint '{path}' is incomplete and is passed over: it lacks {', '.join(missing)}"
            log.warning(text)
            warn(text)
            continue
        _agree(path, record["recipe"], recipe(graph, seed))
        kept = {name: _kept(record, name) for name in ("cursors", "coefficients")}
        return Checkpoint(version=version, recipe=record["recipe"], path=str(path), **kept)
    return None


def sweep(run_dir: Path) -> None:
    """Remove what an interrupted write has left, and nothing that is not ours."""
    for path, match in list(_ours(run_dir)):
        if match[2]:
            shutil.rmtree(path, ignore_errors=True)


def _agree(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of other settings."""
    ours = json.loads(json.dumps(ours))
    differing = [name for name in dict.fromkeys([*theirs, *ours]) if theirs.get(name) != ours.get(name)]
    if differing:
        raise CheckpointError(
            f"checkpoint '{path}' is of a run with other settings",
            found=", ".join(f"{name}={ours.get(name)!r}" for name in differing[:SHOWN]),
            wanted=", ".join(f"{name}={theirs.get(name)!r}" for name in differing[:SHOWN]),
            fix="resume with the graph and parameters of that run, or start in a new --run-dir",
        )


def _ours(run_dir: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Folders under a checkpoint's name, complete or not."""
    for path in (run_dir / FOLDER).glob("step-*"):
        if path.is_dir() and (match := _NAME.fullmatch(path.name)):
            yield path, match


def _record(path: Path) -> dict[str, Any]:
    """What a checkpoint's record says; nothing when there is none, or only part of one."""
    try:
        record = json.loads((path / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _missing(path: Path, record: dict[str, Any], version: int, graph: Graph) -> list[str]:
    """What a checkpoint lacks; nothing when it is complete."""
    sizes = record.get("files")
    if record.get("version") != version or not isinstance(sizes, dict) or not isinstance(record.get("recipe"), dict):
        trained = {n.model.name for n in graph.nodes.values() if n.model and isinstance(n.spec, UpdateSpec)}
        return [repr(RECORD), *(f"model {name!r}" for name in sorted(trained) if not any(_files(path / name)))]
    cursors, coefficients = _kept(record, "cursors"), _kept(record, "coefficients")
    absent = [f"the prompt cursor of {r.prompts!r}" for r in refills(graph).values() if r.prompts not in cursors]
    absent += [f"the coefficient {c.name!r}" for c in adaptive_settings(graph) if c.name not in coefficients]
    if absent:
        return absent
    lost = [name for name, size in sizes.items() if not (path / name).is_file() or (path / name).stat().st_size != size]
    if path.name.endswith(PARTIAL) and not lost:
        return ["its name: it was not published"]
    return [f"{name!r} of {sizes[name]} bytes" for name in lost]


def _kept(record: dict[str, Any], part: str) -> dict[str, Any]:
    """What the scheduler has left for the run that goes on; nothing when there is no such part."""
    found = record.get(part)
    return found if isinstance(found, dict) else {}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

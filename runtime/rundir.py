"""The run folder: everything that a run writes, and nothing outside it.

=================  ==================================================================================
file               holds
=================  ==================================================================================
metrics.jsonl      one object a step, written when the step ends
samples.jsonl      one object a sample: `sample_row`
graph.json         the graph that ran: nodes, bindings, settings, parameters
graph.svg          its picture
versions.json      python, packages, commit, command line, parameters, seed; written first
run.log            what was logged, by time
run.lock           held by the process that runs here, so that no second one writes between its lines
=================  ==================================================================================

A folder that holds a run is never started over: it is resumed, or another one is named.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from flowrl.describe import describe
from flowrl.errors import ConfigError
from flowrl.graph import Graph
from flowrl.rows import Key

from .graph_record import graph_record
from .json_lines import JsonLines, dump, rewind, write_whole
from .versions import versions_record

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
GRAPH = "graph.json"
PICTURE = "graph.svg"
VERSIONS = "versions.json"
LOG = "run.log"
LOCK = "run.lock"
OURS = (METRICS, SAMPLES, GRAPH, VERSIONS)
"""A folder in which one of these is not empty holds a run."""


class RunDir:
    """A run folder that this process holds. Use `open_run_dir`; a context manager that lets go of it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self.metrics = JsonLines(path / METRICS)
        self.samples = JsonLines(path / SAMPLES)
        self._log = _log_to(path / LOG)

    def describe_run(self, graph: Graph, *, command: list[str], seed: int, bounds: Bounds | None = None) -> None:
        """Write ``versions.json``, ``graph.json`` and ``graph.svg``. A resumed run keeps those of each earlier start.

        Args:
            graph: what runs.
            command: the command line as given.
            seed: of the run.
            bounds: the bound of each queue, by its two nodes, for the picture.
        """
        from flowrl.visualize import render

        parameters = {name: describe(value) for name, value in graph.parameters.items()}
        graph_file = Path(graph.at.file) if graph.at else None
        record = versions_record(graph_file=graph_file, command=command, parameters=parameters, seed=seed)
        _keep_earlier(self.path / VERSIONS)
        write_whole(self.path / VERSIONS, dump(record, indent=2) + b"\n")
        write_whole(self.path / GRAPH, dump(graph_record(graph), indent=2) + b"\n")
        render(graph, self.path / PICTURE, bounds=bounds)

    def earlier_graph(self) -> dict[str, Any]:
        """The record of the graph that ran here before; empty when there is none."""
        try:
            record = json.loads((self.path / GRAPH).read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def rewind(self, step: int) -> None:
        """Drop metrics and samples of `step` and later, which a resumed run writes again. Steps count from 1."""
        self.metrics.close()
        self.samples.close()
        for name in (METRICS, SAMPLES):
            rewind(self.path / name, step)
        self.metrics, self.samples = JsonLines(self.path / METRICS), JsonLines(self.path / SAMPLES)

    def written(self) -> dict[str, Path]:
        """What lies in the folder, for the end report."""
        names = {"metrics": METRICS, "samples": SAMPLES, "graph": PICTURE, "log": LOG}
        return {what: self.path / name for what, name in names.items() if _filled(self.path / name)}

    def close(self) -> None:
        """Close the files and let go of the folder; a second call does nothing."""
        self.metrics.close()
        self.samples.close()
        logging.getLogger("flowrl").removeHandler(self._log)
        self._log.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


Bounds = Mapping[tuple[str, str], str]
"""The bound of a queue, as text, by its writer and reader."""


def open_run_dir(path: Path, *, resume: bool = False) -> RunDir:
    """Create a run folder, or open that of an earlier run.

    Args:
        path: the folder; its parents are made too.
        resume: the folder must hold a run, and the new lines follow the old ones.

    Raises:
        ConfigError: the folder holds a run and `resume` is false, holds none and it is true, is a file, cannot be
            written, or another process runs in it.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run folder '{path}' is a file", found=path, wanted="a folder, or a name that is free")
    held = [name for name in OURS if _filled(path / name)]
    if held and not resume:
        raise ConfigError(
            f"run folder '{path}' holds a run already",
            found=", ".join(held),
            wanted="an empty or new folder",
            fix="--resume to go on with that run, or --run-dir with another name",
        )
    if resume and not held:
        raise ConfigError(f"run folder '{path}' holds no run to resume", wanted=VERSIONS, fix="leave --resume out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        return RunDir(path, _hold(path))
    except OSError as error:
        problem = f"run folder '{path}' cannot be written"
        raise ConfigError(problem, found=error.strerror, fix="--run-dir FOLDER") from error


def sample_row(
    key: Key,
    *,
    prompt: str,
    response: str,
    rewards: Mapping[str, float | None],
    version: int | None,
    stop: str | None,
    num_tokens: int | None,
    dropped: str | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """One line of ``samples.jsonl``; ``pandas.read_json(path, lines=True)`` reads the file.

    Args:
        key: of the row; ``step`` counts from 1, as in ``metrics.jsonl``.
        prompt: text, special tokens included.
        response: text.
        rewards: by the name of the node that gave them; none for a row that was dropped before.
        version: of the weights that sampled its first token.
        stop: why it ended.
        num_tokens: of the response.
        dropped: why it was not trained on; None if it was.
        **columns: more values, such as columns of the data set.
    """
    row: dict[str, Any] = {
        "step": key.step + 1,
        "prompt_index": key.prompt,
        "sample_index": key.sample,
        "prompt": prompt,
        "response": response,
        "reward": next(iter(rewards.values()), None),
        "dropped": dropped,
        "version": version,
        "stop": stop,
        "num_tokens": num_tokens,
    }
    if len(rewards) > 1:
        row["rewards"] = dict(rewards)
    return row | {name: value for name, value in columns.items() if name not in row}


def _hold(path: Path) -> int:
    """Lock the folder until the process ends, however it ends. Gives the lock's file descriptor."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 100).decode().strip()
        os.close(lock)
        raise ConfigError(
            f"another process runs in '{path}'", found=f"process {holder}", fix="--run-dir with another name"
        ) from None
    except OSError:  # a file system without locks
        return lock
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _keep_earlier(path: Path) -> None:
    if path.exists():
        starts = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}.{starts + 1}{path.suffix}"))


def _filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _log_to(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("flowrl")
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return handler

"""Execution: a pure scheduler, workers that fire nodes, queues between them, and the command line.

`run` is what ``flowrl run`` does, for a notebook or a script::

    from flowrl.runtime import run
    run(quickstart(lr=1e-3), steps=20)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flowrl.graph import Graph

    from .report import Console, Summary


def run(
    graph: Graph,
    *,
    steps: int,
    launcher: Literal["inline", "local"] = "inline",
    run_dir: Path | str | None = None,
    resume: bool = False,
    save_every: int | None = None,
    console: Console | None = None,
) -> Summary:
    """Check a graph, then run it.

    Args:
        graph: what calling an ``@fl.graph`` function gives.
        steps: of the whole run.
        launcher: ``"inline"`` runs in this process, so that breakpoints work, also inside an event loop. ``"local"``
            needs a graph from a file: use ``flowrl run``.
        run_dir: where metrics, samples and checkpoints go; None writes nothing.
        resume: go on from the newest checkpoint in `run_dir`.
        save_every: steps between two checkpoints.
        console: where progress is shown; None prints a line a step, or a live view on a terminal.

    Raises:
        GraphError, DataError, BackendError: the first thing that is wrong with the graph; the others are its notes.
        RunError: the run failed.
    """
    from flowrl.check import check

    from .console import open_console
    from .driver import RunOptions
    from .driver import run as run_checked
    from .registry import describe

    problems = check(graph, describe=lambda model: describe(model.backend, model.source))
    if problems:
        for other in problems[1:]:
            problems[0].add_note(str(other))
        raise problems[0]
    options = RunOptions(
        num_steps=steps,
        launcher=launcher,
        run_dir=Path(run_dir) if run_dir is not None else None,
        resume=resume,
        save_every=save_every,
    )
    return run_checked(graph, options, console or open_console())

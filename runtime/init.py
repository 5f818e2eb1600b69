"""``flowrl init``: a graph of one's own to start from, that runs as it is.

The three files are in `runtime/starter/`, where the tests check and run them as any other graph.
"""

from __future__ import annotations

import json
import shlex
from importlib import resources
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.tasks import ReverseDigits

GRAPH, DATA, SETTINGS = "graph.py", "train.jsonl", "settings.yaml"
ROWS = 256
"""Lines of the data file: eight steps of 32 prompts before a prompt comes again."""


def init(folder: Path) -> list[Path]:
    """Write the starter files.

    Args:
        folder: made if it is not there.

    Returns:
        The files, the graph first.

    Raises:
        ConfigError: one of them exists already, or the folder cannot be written. Nothing was written then.
    """
    contents = {GRAPH: _starter("graph.py.txt"), DATA: _rows(), SETTINGS: _starter("settings.yaml")}
    taken = [name for name in contents if (folder / name).exists()]
    if taken:
        raise ConfigError(
            f"'{folder / taken[0]}' exists already, and would be overwritten",
            found=", ".join(taken),
            wanted="a folder without these files",
            fix="flowrl init OTHER_FOLDER",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            # "x": a file that another program made meanwhile is not overwritten either.
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"the starter files cannot be written to '{folder}'", found=error.strerror) from error
    return [folder / name for name in contents]


def next_steps(folder: Path) -> str:
    """The three commands that come next, to be printed."""
    inside = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    commands = [
        (f"{inside}flowrl check {GRAPH}", "is it right? no GPU is touched"),
        (f"{inside}flowrl visualize {GRAPH}", "what does it look like?"),
        (f"{inside}flowrl run {GRAPH} --config {SETTINGS} --run-dir runs/first", "train"),
    ]
    width = max(len(command) for command, _ in commands)
    return "\n".join(["Next:", *(f"  {command:<{width}}  # {why}" for command, why in commands)])


def _starter(name: str) -> str:
    return resources.files("flowrl.runtime").joinpath("starter", name).read_text(encoding="utf-8")


def _rows() -> str:
    task = ReverseDigits(digits=5)
    return "".join(json.dumps(task[row]) + "\n" for row in range(ROWS))

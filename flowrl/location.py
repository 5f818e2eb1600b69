"""Where in the user's file something was written: the line that an error has to name."""

from __future__ import annotations

import os
import sys
import traceback

from .errors import FlowrlError, Location


def caller() -> Location:
    """The nearest line of the user's file on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return location(frame.f_code.co_filename, frame.f_lineno)


def locate(error: FlowrlError) -> None:
    """Give an error without a line (of a `Mesh`, of a loss) the last line of the user's file that it came through."""
    frames = traceback.walk_tb(error.__traceback__)
    named = [(frame, line, frame.f_globals.get("__name__", "")) for frame, line in frames]
    own = [(frame, line) for frame, line, module in named if not (_is_ours(module) or _is_stdlib(module))]
    if error.at is None and own:
        frame, line = own[-1]
        error.at = location(frame.f_code.co_filename, line)


def location(file: str, line: int) -> Location:
    """A location whose file is relative to the working directory when it lies below it."""
    inside = os.path.isabs(file) and file.startswith(os.getcwd() + os.sep)
    return Location(os.path.relpath(file) if inside else file, line)


def _is_ours(module: str) -> bool:
    if module in ("functools", "dataclasses"):
        return True
    return module.split(".")[0] == "flowrl" and not module.startswith("flowrl.graphs.")


def _is_stdlib(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names

"""Which of the two consoles shows a run."""

from __future__ import annotations

import os
import sys
from typing import IO

from .report import Console, PlainLines


def open_console(out: IO[str] | None = None, err: IO[str] | None = None) -> Console:
    """A live view when `out` is a terminal that can move its cursor, else plain lines."""
    out, err = out or sys.stdout, err or sys.stderr
    if out.isatty() and os.environ.get("TERM") not in ("dumb", ""):
        from .live import LiveView  # and with it rich, which a log file does not need

        return LiveView(out, err)
    return PlainLines(out, err)

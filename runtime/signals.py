"""SIGTERM as an exception, so that a run ends by one path whatever ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, as Python raises KeyboardInterrupt on Ctrl-C; in the main thread only."""

    def raise_it(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, raise_it)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

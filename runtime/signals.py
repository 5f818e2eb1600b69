"""Signals as exceptions, so that a run ends by one path whatever ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""What a scheduler sends to preempt, and what a terminal sends when it goes away."""

Handler = Callable[[int, FrameType | None], None]


class Terminated(BaseException):
    """SIGTERM, or SIGHUP, has come."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP, as Python raises KeyboardInterrupt on Ctrl-C; in the main thread only.

    A signal that is ignored, as SIGHUP is under ``nohup``, stays so. Once one has ended what is inside, the process is
    about to end: further ones, of somebody who cannot wait, are ignored from then on.
    """

    def raise_it(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handled({number: raise_it for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN}) as before:
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            for number in (signal.SIGINT, *ENDS) if before else ():
                signal.signal(number, signal.SIG_IGN)
            before.clear()
            raise


@contextmanager
def signals_wait() -> Iterator[None]:
    """Let no signal that ends a run interrupt what is inside; one that comes meanwhile changes nothing."""

    def wait(signum: int, frame: FrameType | None) -> None:
        return

    with _handled(dict.fromkeys((signal.SIGINT, *ENDS), wait)):
        yield


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[dict[signal.Signals, Any]]:
    """Handlers for a while, and those that are put back; outside of the main thread, which alone may set them, none."""
    try:
        before: dict[signal.Signals, Any] = {number: signal.signal(number, each) for number, each in handlers.items()}
    except ValueError:
        before = {}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

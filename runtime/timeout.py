"""A limit in time on calls of a user's function."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from flowrl.errors import DeadlineError
from flowrl.graph import Node
from flowrl.rows import Key

AGAIN_S = 0.1
"""Between two alarms once the first has rung: a function may swallow one (a bare ``except:``), and one that rings for a
call that has ended must not be the last."""
QUICK_S = 1e-6
"""A call that ends sooner has not touched the timer, so that the next one need not set it again."""


class _Alarm(BaseException):
    """The time is over. No Exception: a function that catches those around what it does must not go on for ever."""


class TimeLimit:
    """Interrupts calls that take too long.

    An alarm interrupts Python code, also in ``time.sleep`` and in a read; it needs the main thread, which is where
    workers fire nodes. In another thread a call ends before it is judged, and so does one that sets its own alarm.
    Handler and timer are set once for many quick calls. What rang before is put back at the end.

    Use::

        with TimeLimit(node, seconds) as limit:
            limit.call(key, function, argument)  # raises DeadlineError when it takes too long
    """

    def __init__(self, node: Node, seconds: float | None) -> None:
        self.node = node
        self.seconds = seconds
        self._alarm = False
        self._deadline = math.inf
        """Of the call that runs."""
        self._set = False
        """Whether the timer is known to run."""
        self._before: Any = None
        self._timer_before = (0.0, 0.0)
        self._entered = 0.0

    def __enter__(self) -> TimeLimit:
        main = threading.current_thread() is threading.main_thread()
        self._before = signal.getsignal(signal.SIGALRM) if main else None
        # None: a handler that Python has not set, and cannot put back
        self._alarm = self.seconds is not None and self._before is not None
        if self._alarm:
            self._entered = time.monotonic()
            self._timer_before = signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._ring)
        return self

    def call(self, key: Key, function: Callable[[Any], Any], argument: Any) -> Any:
        """What ``function(argument)`` gives.

        Args:
            key: of the (first) row that the call is for.

        Raises:
            DeadlineError: it took too long.
        """
        if self.seconds is None:
            return function(argument)
        if self._alarm and not self._set:
            signal.setitimer(signal.ITIMER_REAL, self.seconds, AGAIN_S)
        begun = time.monotonic()
        try:
            try:
                self._deadline = begun + self.seconds
                return function(argument)
            finally:
                self._deadline = math.inf
                took = time.monotonic() - begun
                self._set = took < QUICK_S
                if took > self.seconds:
                    raise _Alarm
        except _Alarm:
            raise self._error(key) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._alarm:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        delay, interval = self._timer_before
        if delay:  # somebody else's: it rings when it would have, or at once
            signal.setitimer(signal.ITIMER_REAL, max(delay - (time.monotonic() - self._entered), 1e-3), interval)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._deadline:
            raise _Alarm

    def _error(self, key: Key) -> DeadlineError:
        return DeadlineError(
            f"function '{function_name(self.node)}' of node '{self.node.name}' took longer than {self.seconds:g} s",
            at=self.node.at,
            node=self.node.name,
            found=f"no answer after {self.seconds:g} s for {key}",
            wanted="an answer in time",
            fix="make it faster, raise timeout=, or drop such rows with on_error='drop'",
        )


def function_name(node: Node) -> str:
    """What the user calls the function of a node."""
    function = getattr(node.spec, "function", None) or getattr(node.spec, "keep", None)
    return getattr(function, "__name__", None) or node.name

"""A limit in time on calls of a user's function."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

from flowrl.errors import DeadlineError
from flowrl.graph import Node
from flowrl.rows import Key


class TimeLimit:
    """Interrupts calls that take too long.

    An alarm interrupts Python code, also in ``time.sleep`` and in a read; it needs the main thread, which is where workers
    fire nodes. In another thread a call ends before it is judged. The handler is set once for many calls: a call costs
    two system calls.

    Use::

        with TimeLimit(node, seconds) as limit:
            limit.begin(key)
            ...
            limit.end()  # raises DeadlineError when it took too long, if the alarm has not
    """

    def __init__(self, node: Node, seconds: float | None) -> None:
        self.node = node
        self.seconds = seconds
        self._alarm = seconds is not None and threading.current_thread() is threading.main_thread()
        self._key: Key | None = None
        self._begun = 0.0

    def __enter__(self) -> TimeLimit:
        if self._alarm:
            self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def begin(self, key: Key) -> None:
        """A call begins; `key` is its (first) row."""
        self._key = key
        if self._alarm and self.seconds:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        elif self.seconds:
            self._begun = time.monotonic()

    def end(self) -> None:
        """The call has ended.

        Raises:
            DeadlineError: it took too long.
        """
        if self._alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif self.seconds and time.monotonic() - self._begun > self.seconds:
            raise self._error()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        raise self._error()

    def _error(self) -> DeadlineError:
        return DeadlineError(
            f"node '{self.node.name}' took longer than {self.seconds:g} s for {self._key}",
            at=self.node.at,
            node=self.node.name,
            found=f"no answer after {self.seconds:g} s",
            wanted="an answer in time",
            fix="make it faster, raise timeout=, or drop such rows with on_error='drop'",
        )

"""The I/O thread: one poll loop that owns every socket of a process.

Two threads on one ZeroMQ socket mix the parts of their messages, so other threads hand work over (`Loop.call`) and
never touch a socket. A hand-over costs a deque append, and a write to a pipe only when the loop sleeps.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

OnReadable = Callable[[], None]

BATCH = 64
"""Messages that a handler reads from its socket before others get their turn."""


class Loop:
    """Runs handlers of readable sockets, calls from other threads, and timers, all in one thread.

    Args:
        name: of the thread.
        before_sleep: run before each poll: what was gathered meanwhile is sent at once.
        on_failure: given the exception that ended the loop, in the loop's thread.
    """

    def __init__(
        self, name: str, *, before_sleep: Callable[[], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._before_sleep = before_sleep
        self._on_failure = on_failure
        self._pid = os.getpid()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = count()
        self._poller = zmq.Poller()
        self._handlers: dict[object, OnReadable] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._sleeping = self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Sockets made before this moment belong to it from now on."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the calls already made; False if it did not end in time."""
        if self._thread.is_alive():
            self.call(self._stop)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
        return True

    @property
    def inside(self) -> bool:
        """Whether the caller runs in the loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def running(self) -> bool:
        """Whether calls are still taken."""
        return self._thread.is_alive()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run `function` in the loop's thread soon; at once when that is the caller's. Any thread may call this."""
        assert os.getpid() == self._pid, "a forked process must make its own endpoint"
        if self.inside:
            function(*args)
            return
        self._calls.append((function, args))
        if self._sleeping:
            self.wake()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run `function` after a while; from the loop's thread only."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), function))

    def wake(self) -> None:
        """End the current poll, or the next one if none runs."""
        # Full pipe: the loop has not yet seen earlier wake-ups, and will. Closed: it has ended.
        try:
            os.write(self._wake_write, b"\0")
        except (BlockingIOError, OSError):
            return

    def watch(self, socket: zmq.Socket[bytes], on_readable: OnReadable) -> None:
        """Call `on_readable` while `socket` has messages; it reads some, without blocking."""
        self._handlers[socket] = on_readable
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Forget a socket; before it is closed."""
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_calls()
                self._before_sleep()
                self._poll()
            self._before_sleep()
        except BaseException as error:  # whatever it is, the main thread has to hear of it
            self._on_failure(error)

    def _run_calls(self) -> None:
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _poll(self) -> None:
        # `_sleeping` is set before the last look at the calls, so that a call made later finds it set.
        self._sleeping = True
        timeout_ms = 0 if self._calls or self._stopping else self._until_timer_ms()
        ready = self._poller.poll(timeout_ms)
        self._sleeping = False
        for source, _ in ready:
            if source == self._wake_read:
                os.read(self._wake_read, 4096)
            elif handler := self._handlers.get(source):  # an earlier handler may have closed it
                handler()

    def _until_timer_ms(self) -> int | None:
        if not self._timers:
            return None
        return int(max(0.0, self._timers[0][0] - time.monotonic()) * 1000) + 1


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be read without blocking; cheaper than an attempt that fails."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

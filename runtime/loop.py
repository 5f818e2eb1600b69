"""The poll loop that owns every socket of a process, run by the thread that waits for it or else by an I/O thread.

Two threads on one ZeroMQ socket mix the parts of their messages, so a lock goes with the sockets: who holds it has *the
turn*, and nobody else touches them. (ZeroMQ allows a socket to move between threads across a full memory barrier, which
a lock is.)

Handing each message from an I/O thread to the main thread and back costs two thread switches, on a virtual machine 100
us each. So the main thread takes the turn itself whenever it waits (`Loop.run_until`) and sends by itself
(`Loop.call`). The I/O thread takes the turn when the main thread has been away for `_GRACE_S`, in a training step say,
and gives it back when asked: then messages are served, acknowledged and sent as promptly as before.

==========================  =========================  =================================
main thread                 turn                       I/O thread
==========================  =========================  =================================
waits in `run_until`        main thread's              asleep, looks now and then
away for less than grace    nobody's; `call` takes it  asleep until the grace is over
away for longer             I/O thread's               polls
==========================  =========================  =================================
"""

from __future__ import annotations

import heapq
import math
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

# Plain ints: pyzmq takes 6 us to look up an enum member.
NOBLOCK = int(zmq.NOBLOCK)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_GRACE_S = 0.005
"""How long sockets may go unserved before the I/O thread takes over. Shorter firings pay for no thread switch."""

_LONGEST_SLEEP_S = 0.08
"""Between two looks of the I/O thread while the main thread waits."""


class Loop:
    """Runs handlers of readable sockets, calls from other threads, and timers; one thread at a time.

    Args:
        name: of the I/O thread.
        before_sleep: run before each poll: what was gathered meanwhile is sent at once.
        on_failure: given the exception that ended the I/O thread, in that thread. A failure in another thread's turn is
            raised there.
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
        self._turn = _Turn()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the I/O thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Run the calls already made and end the I/O thread; False if it did not end in time."""
        self._stopping = True
        self._turn.rouse()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._run_calls()
        self._before_sleep()
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
        return True

    @property
    def inside(self) -> bool:
        """Whether the caller runs in a handler or a call of this loop."""
        return self._turn.holder == threading.get_ident()

    @property
    def running(self) -> bool:
        """Whether calls are still taken."""
        return self._thread.is_alive()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run `function` with the turn: at once if it is free or the caller's, else soon. Any thread may call this."""
        assert os.getpid() == self._pid, "a forked process must make its own endpoint"
        if self.inside:
            function(*args)
            return
        self._calls.append((function, args))
        # Whoever has the turn looks at the calls after giving it back, so a call made meanwhile is not forgotten.
        if not self._serve_calls():
            self.wake()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run `function` after a while; to be called with the turn."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), function))

    def run_until(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Take the turn and run the loop until `done()`; False when the time is over first. It looks at least once."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._turn.take(self.wake)
        try:
            left: float | None = None
            while not done():
                if self._stopping or left == 0:
                    return False
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._step(left)
            return True
        finally:
            self._turn.give_back()
            if self._calls:
                self._serve_calls()

    def wake(self) -> None:
        """End the current poll, or the next one if none runs."""
        # Full pipe: earlier wake-ups are still to be seen, and will be. Closed: the loop has ended.
        try:
            os.write(self._wake_write, b"\0")
        except OSError:
            return

    def watch(self, socket: zmq.Socket[bytes], on_readable: OnReadable) -> None:
        """Call `on_readable` while `socket` has messages; it reads some, without blocking."""
        self._handlers[socket] = on_readable
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Forget a socket; before it is closed."""
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._turn.sleep_while_others_serve():
                    continue
                with self._turn:
                    while not (self._stopping or self._turn.wanted):
                        self._step(None)
        except BaseException as error:  # whatever it is, the main thread has to hear of it
            self._on_failure(error)

    def _serve_calls(self) -> bool:
        """Run the waiting calls if the turn is free; whether none is left over."""
        while self._calls:
            if not self._turn.try_take():
                return False
            try:
                self._run_calls()
            finally:
                self._turn.release()
        return True

    def _run_calls(self) -> None:
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)

    def _step(self, longest_s: float | None) -> None:
        """Run what is due, then poll once and handle what has come."""
        self._run_calls()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        self._before_sleep()
        for source, _ in self._poller.poll(self._timeout_ms(longest_s)):
            if source == self._wake_read:
                os.read(self._wake_read, 4096)
            elif handler := self._handlers.get(source):  # an earlier handler may have closed it
                handler()

    def _timeout_ms(self, longest_s: float | None) -> int | None:
        if self._timers:
            due_s = max(0.0, self._timers[0][0] - time.monotonic())
            longest_s = due_s if longest_s is None else min(due_s, longest_s)
        if not longest_s:
            return None if longest_s is None else 0
        return int(longest_s * 1000) + 1  # rounded up, lest it spins at the end


class _Turn:
    """Whose turn it is to touch the sockets."""

    def __init__(self) -> None:
        self.holder = 0
        """Identity of the thread that has the turn."""
        self.wanted = False
        """A thread waits for the I/O thread to give the turn back."""
        self._lock = threading.Lock()
        self._visitors = 0
        self._left_at = time.monotonic()
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._looks_at = 0.0
        self._sleep_s = _GRACE_S

    def __enter__(self) -> None:
        self._lock.acquire()
        self.holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.release()

    def try_take(self) -> bool:
        """Take the turn if it is free, for a moment."""
        if not self._lock.acquire(blocking=False):
            return False
        self.holder = threading.get_ident()
        return True

    def release(self) -> None:
        """Give back what `try_take` took."""
        self.holder = 0
        self._lock.release()

    def take(self, wake: Callable[[], None]) -> None:
        """Take the turn to wait with it; the I/O thread is asked to give it back."""
        assert not self._visitors, "two threads wait at one endpoint"
        self._visitors += 1
        while not self._lock.acquire(blocking=False):
            self.wanted = True
            wake()
            if self._lock.acquire(timeout=1.0):
                break
        self.wanted = False
        self.holder = threading.get_ident()

    def give_back(self) -> None:
        """The waiting is over; the I/O thread may have the turn after the grace."""
        now = self._left_at = time.monotonic()
        self._visitors -= 1
        self.release()
        if self._looks_at - now > 2 * _GRACE_S:
            self.rouse()

    def rouse(self) -> None:
        """End the I/O thread's sleep."""
        self._looks_at = 0.0
        if self._asleep.locked():
            self._asleep.release()

    def sleep_while_others_serve(self) -> bool:
        """For the I/O thread: False if nobody has served the sockets for the grace, else sleep a while."""
        self._looks_at = math.inf  # before the look at the visitors: one who leaves after it sees this, and rouses
        now = time.monotonic()
        if self._visitors:
            self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
        else:
            self._sleep_s = self._left_at + _GRACE_S - now
            if self._sleep_s <= 0:
                self._sleep_s = _GRACE_S
                return False
        self._looks_at = now + self._sleep_s
        self._asleep.acquire(timeout=self._sleep_s)
        return True


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be read without blocking; cheaper than an attempt that fails."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)

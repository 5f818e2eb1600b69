"""The scheduler's line to its workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from flowrl.errors import WireError

from . import sockets, wire
from .loop import BATCH, NOBLOCK, has_message
from .wire import Header, Hello, Kind

_SNDMORE = int(zmq.SNDMORE) | NOBLOCK
_PING_S = 1.0
_PING = wire.encode(Kind.PING)
_MAX_HELLO_BYTES = 1024


class Polled(NamedTuple):
    """What a poll found."""

    messages: list[tuple[str, dict[str, Any]]]
    """(worker, message) in order of arrival."""
    fds: list[int]
    """The file descriptors that are ready: process sentinels, mostly."""


class ControlServer:
    """A ROUTER in the scheduler's own thread: it has no other, so that a message costs no hand-over.

    A worker's I/O thread answers PING, so `last_seen` says that its process lives. Whether its work progresses is for
    leases to say.

    Args:
        folder: of mode 0700, for a Unix socket; None: loopback TCP.
        address: listen here instead; it must be local.
        secret: what the incarnation of every worker begins with; others are strangers.

    Raises:
        WireError: an address that other machines reach, or that is in use.
    """

    def __init__(self, folder: Path | None = None, *, address: str | None = None, secret: str = "") -> None:
        self._secret = secret
        self._context: sockets.Context = zmq.Context()
        self._socket = sockets.socket(self._context, zmq.ROUTER)
        try:
            self.address = sockets.bind(self._socket, folder, address=address)
        except WireError:
            self._context.destroy(0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._fds: Sequence[int] = ()
        self._names: dict[bytes, str] = {}
        self._identities: dict[str, bytes] = {}
        self._last_seen: dict[str, float] = {}
        self._ping_at = time.monotonic() + _PING_S
        self.rejected = 0
        """Garbage, and messages from strangers."""

    @property
    def workers(self) -> list[str]:
        """The names that have said HELLO."""
        return list(self._identities)

    def last_seen(self, worker: str) -> float | None:
        """The `time.monotonic()` of the worker's last message or PONG; None if it never said HELLO."""
        return self._last_seen.get(worker)

    def send(self, worker: str, message: Mapping[str, Any]) -> bool:
        """Send a plain map; False if the worker has not said HELLO, or its process is gone.

        Raises:
            WireError: the map holds what msgpack does not carry.
        """
        identity = self._identities.get(worker)
        return identity is not None and self._send(identity, wire.encode(Kind.CONTROL, {Header.META.value: message}))

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> Polled:
        """Wait for a message, or until one of `fds` is readable; all that has come is returned, nothing after
        `timeout_s`.

        Args:
            timeout_s: None waits for ever.
            fds: file descriptors. Give the same object each time while they stay the same.
        """
        self._watch(fds)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if now >= self._ping_at:
                self._ping(now)
            ready = dict(self._poller.poll(self._wait_ms(now, deadline)))
            messages = self._read() if ready.pop(self._socket, 0) else []
            if messages or ready or (deadline is not None and time.monotonic() >= deadline):
                return Polled(messages, [fd for fd in ready if isinstance(fd, int)])

    def forget(self, worker: str) -> None:
        """The worker is gone for good."""
        self._names.pop(self._identities.pop(worker, b""), None)
        self._last_seen.pop(worker, None)

    def close(self) -> None:
        """Close the socket and remove its file; further calls do nothing."""
        self._context.destroy(0)
        sockets.unlink(self.address)

    def _watch(self, fds: Sequence[int]) -> None:
        if fds is self._fds or list(fds) == list(self._fds):
            return
        for fd in self._fds:
            self._poller.unregister(fd)
        for fd in fds:
            self._poller.register(fd, zmq.POLLIN)
        self._fds = list(fds)

    def _wait_ms(self, now: float, deadline: float | None) -> int:
        until = self._ping_at if deadline is None else min(deadline, self._ping_at)
        # Rounded up, lest the last millisecond is spent in many polls of zero; an expired deadline does not wait.
        return int((until - now) * 1000) + 1 if until > now else 0

    def _ping(self, now: float) -> None:
        self._ping_at = now + _PING_S
        for identity in self._identities.values():
            self._send(identity, _PING)

    def _send(self, identity: bytes, frame: bytes) -> bool:
        try:
            self._socket.send(identity, _SNDMORE)
            self._socket.send(frame, NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _read(self) -> list[tuple[str, dict[str, Any]]]:
        messages: list[tuple[str, dict[str, Any]]] = []
        for _ in range(BATCH):
            identity, *frames = self._socket.recv_multipart(NOBLOCK)
            try:
                self._on_message(identity, frames[-1], messages)
            except (WireError, LookupError, TypeError, ValueError):
                self.rejected += 1
            if not has_message(self._socket):
                break
        return messages

    def _on_message(self, identity: bytes, frame: bytes, messages: list[tuple[str, dict[str, Any]]]) -> None:
        name = self._names.get(identity)
        if name is None:
            self._welcome(identity, wire.decode(frame, max_header=_MAX_HELLO_BYTES))
            return
        message = wire.decode(frame)
        self._last_seen[name] = time.monotonic()
        if message.kind != Kind.PONG:
            messages.append((name, wire.meta_of(message)))

    def _welcome(self, identity: bytes, message: wire.Message) -> None:
        name, incarnation = message.header[Hello.PEER]
        if message.kind != Kind.HELLO or type(name) is not str or type(incarnation) is not str:
            raise WireError("a message from a stranger")
        if not incarnation.startswith(self._secret):
            raise WireError("a HELLO of another run")
        self._names.pop(self._identities.get(name, b""), None)
        self._names[identity], self._identities[name] = name, identity
        self._last_seen[name] = time.monotonic()

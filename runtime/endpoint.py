"""A worker's line to the rest of the run: control to the scheduler, blocks to and from other workers.

`Endpoint` owns one I/O thread. The main thread hands messages over and takes them from one queue in order of arrival;
while it sits in a training step of minutes, the I/O thread goes on to answer PING, to acknowledge, to send what waits
for credit, and to serve what `on_control` takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import zmq

from flowrl.errors import DeadlineError, RunError, WireError
from flowrl.rows import Rows

from . import sockets, wire
from .blocks import decode_rows, encode_rows
from .credit import Item, Window
from .loop import BATCH, NOBLOCK, Loop, has_message
from .queue import Block, Inbox, Outbox, ReceiveStatistics, SendStatistics
from .tensors import decode_tensors, encode_tensors
from .wire import Header, Kind

if TYPE_CHECKING:
    from .tensors import Tensors

_STOP_S = 2.0
"""The loop ends within a poll; a handler that takes longer than this hangs."""

_LAST_WORDS_S = 0.2
"""For the last control message and acknowledgements to leave at `close`. They take a millisecond if the peer lives."""

_ACKNOWLEDGE_AFTER_S = 0.005
"""A commit waits for others this long, unless they are a quarter of the window: each ACK wakes the producer."""

_PONG = wire.encode(Kind.PONG)
_DEFAULT = Window()


class Control(NamedTuple):
    """A message of the scheduler."""

    message: dict[str, Any]


class Data(NamedTuple):
    """A block of another worker."""

    header: dict[str, Any]
    content: Rows | Tensors
    from_peer: str
    block: Block
    """What `Endpoint.commit` needs."""


class Ended(NamedTuple):
    """A producer has finished its stream: all its blocks came before this."""

    from_peer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointStatistics:
    """Counts since the start."""

    peers: dict[str, SendStatistics]
    """What was sent, by consumer."""
    inbox: ReceiveStatistics
    undelivered: int
    """Blocks that no consumer has acknowledged, those of dropped peers included."""
    rejected: int
    """Messages that could not be read, or came from strangers."""


class Endpoint:
    """The sockets of one worker process.

    Args:
        name: of the worker, unique in the run.
        scheduler: address of its `ControlServer`; None for an endpoint that only exchanges blocks.
        run_dir_socket: a folder of mode 0700 for Unix sockets; None: loopback TCP.
        window_items, window_bytes: what each producer may have here uncommitted (see `credit.Window`).
        on_control: called in the I/O thread with each control message; True says that it is dealt with and is not to be
            queued. It must be quick and must not raise; it may send.
        secret: of the run: nobody is listened to who does not know it.
    """

    def __init__(
        self,
        name: str,
        *,
        scheduler: str | None,
        run_dir_socket: Path | None = None,
        window_items: int = _DEFAULT.items,
        window_bytes: int = _DEFAULT.num_bytes,
        on_control: Callable[[dict[str, Any]], bool] | None = None,
        secret: str = "",
    ) -> None:
        self.name = name
        self.incarnation = secret + uuid4().hex
        self.on_control = on_control
        self.scheduler_seen = time.monotonic()
        """When the scheduler last said something; it pings each second."""
        self._scheduler, self._folder = scheduler, run_dir_socket
        self._secret = secret
        self._window = Window(items=window_items, num_bytes=window_bytes)
        self._arrivals: deque[Control | Data | Ended | BaseException] = deque()
        self._loop = Loop(f"io {name}", before_sleep=self._flush, on_failure=self._arrivals.append)
        self._context: sockets.Context | None = None
        self._control: zmq.Socket[bytes] | None = None
        self._rejected = 0
        self._owed_items = self._owed_bytes = 0
        self._acknowledges = self._closed = False

    @property
    def data_endpoint(self) -> str:
        """The address of the inbox, for other workers' `send_rows`; known once started."""
        assert self._context is not None, f"endpoint {self.name!r} has not started"
        return self._address

    def start(self) -> None:
        """Bind, connect, and start the I/O thread.

        Raises:
            WireError: an address that is not local, or a folder that others can enter.
        """
        assert self._context is None, f"endpoint {self.name!r} has started already"
        context = zmq.Context()
        router = sockets.socket(context, zmq.ROUTER)
        try:
            self._address = sockets.bind(router, self._folder)
            if self._scheduler:
                sockets.check_local(self._scheduler)
        except WireError:
            context.destroy(0)
            raise
        self._context, self._router = context, router
        self._inbox = Inbox(
            router, self._loop, window=self._window, decode=_decode, deliver=self._deliver, secret=self._secret
        )
        self._outbox = Outbox(self.name, self.incarnation, context, self._loop, on_error=self._arrivals.append)
        if self._scheduler:
            self._connect(context, self._scheduler)
        self._loop.start()

    def close(self, drain_s: float = 0.0) -> None:
        """End the thread and close all sockets, in bounded time; further calls do nothing.

        Args:
            drain_s: how long to wait for acknowledgements of what was sent. `statistics` says what was not delivered.
                Control messages get this time to leave as well, and no less than 0.2 s.
        """
        if self._context is None or self._closed:
            return
        if self._loop.running:
            self._loop.call(self._inbox.flush)
        if drain_s and self._loop.running:
            self._loop.run_until(lambda: not self.statistics().undelivered, drain_s)
        self._closed = True
        if self._loop.stop(_STOP_S):
            self._outbox.close()
            for last in (self._control, self._router):
                if last is not None:
                    last.linger = int(max(drain_s, _LAST_WORDS_S) * 1000)
            self._context.destroy()
        sockets.unlink(self._address)

    def send_control(self, message: Mapping[str, Any]) -> None:
        """Hand a plain map over to the scheduler; returns at once.

        Raises:
            WireError: the map holds what msgpack does not carry.
        """
        frame = wire.encode(Kind.CONTROL, {Header.META.value: message})
        self._call(self._send_control, frame)

    def send_rows(
        self, peer_name: str, peer_address: str, header: dict[str, Any], rows: Rows, *, context: str | None = None
    ) -> None:
        """Hand rows over to be sent when the peer's credits allow; returns at once.

        What waits here is bounded by the scheduler alone. `rows` must not change until acknowledged.

        Args:
            peer_address: the peer's `data_endpoint`. Another one than before says that the peer was replaced.
            header: a plain map that travels along.
            context: names node and edge in an error.

        Raises:
            WireError: a value that would not arrive equal.
        """
        self._send(peer_name, peer_address, encode_rows(rows, header, context=context or f"rows for {peer_name!r}"))

    def send_tensors(self, peer_name: str, peer_address: str, header: dict[str, Any], tensors: Tensors) -> None:
        """Hand named tensors over, as `send_rows` does; they are not copied and must not change until acknowledged."""
        self._send(peer_name, peer_address, encode_tensors(tensors, header, context=f"tensors for {peer_name!r}"))

    def put(self, peer_name: str, peer_address: str, header: dict[str, Any], rows: Rows, *, timeout_s: float) -> None:
        """Like `send_rows`, but wait until the peer's credits have let the block go. Not for the I/O thread.

        Raises:
            DeadlineError: no credit came in time; the block is taken back and was not sent.
        """
        assert not self._loop.inside, "put() would block the thread that it waits for"
        payload = encode_rows(rows, header, context=f"rows for {peer_name!r}")
        item = Item(0, payload, payload.num_bytes)
        self._call(self._outbox.send, peer_name, peer_address, item)
        if not self._loop.run_until(lambda: item.left, timeout_s):
            self._call(self._outbox.withdraw, peer_name, item)
            self._loop.run_until(lambda: item.left, _STOP_S)
        if item.withdrawn:
            raise self._no_credit(peer_name, peer_address, item, timeout_s)

    def redirect(self, peer_name: str, peer_address: str) -> None:
        """The peer was replaced: deliver what is not acknowledged to its new address."""
        self._call(self._outbox.redirect, peer_name, peer_address)

    def drop(self, peer_name: str) -> None:
        """The peer is gone for good: forget what was not delivered to it."""
        self._call(self._outbox.drop, peer_name)

    def finish(self, peer_name: str) -> None:
        """End the stream to a peer: it gets `Ended` after the last block."""
        self._call(self._outbox.finish, peer_name)

    def drain(self) -> None:
        """Ask every producer to finish its stream to this endpoint."""
        self._call(self._inbox.drain)

    def receive(self, timeout_s: float | None) -> Control | Data | Ended | None:
        """The next arrival, or None after `timeout_s` (None: wait for ever). For one thread, the main one.

        A `Data` keeps its share of the producer's credit until `commit`.

        Raises:
            WireError: a peer refused a block.
            Exception: whatever ended the I/O thread.
        """
        if not self._arrivals:
            self._loop.run_until(self._has_arrived, timeout_s)
            if not self._arrivals:
                return None
        arrival = self._arrivals.popleft()
        if isinstance(arrival, BaseException):
            raise arrival
        return arrival

    def commit(self, data: Data) -> None:
        """Give the block's credit back: call this when it lies where a loss of this process is noticed.

        Committing is not part of `receive`, for an acknowledged block is never sent again: a process that dies between
        taking a block and storing it would lose it. A consumer commits each block as it stores it, not when it has a
        firing's worth, so a window smaller than a firing's inputs cannot block. Acknowledgements go in batches: a
        quarter of the window, or what has come together in 5 ms.
        """
        self._inbox.commit(data.block)
        self._owed_items += 1
        self._owed_bytes += data.block.num_bytes
        if 4 * self._owed_items >= self._window.items or 4 * self._owed_bytes >= self._window.num_bytes:
            self._owed_items = self._owed_bytes = 0
            self._loop.call(self._inbox.flush)

    def statistics(self) -> EndpointStatistics:
        """A snapshot; also after `close`."""
        peers = self._outbox.statistics()
        inbox = self._inbox.statistics()
        return EndpointStatistics(
            peers=peers,
            inbox=inbox,
            undelivered=self._outbox.dropped + sum(peer.undelivered for peer in peers.values()),
            rejected=self._rejected + self._outbox.rejected + inbox.rejected,
        )

    def _connect(self, context: sockets.Context, address: str) -> None:
        self._control = sockets.socket(context, zmq.DEALER)
        self._control.setsockopt_string(zmq.IDENTITY, self.incarnation)
        self._control.connect(address)
        self._control.send(wire.encode(Kind.HELLO, wire.hello(self.name, self.incarnation)))
        self._loop.watch(self._control, self._on_control_readable)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._closed or not self._loop.running:
            raise RunError(f"endpoint {self.name!r} is closed")
        self._loop.call(function, *args)

    def _send(self, peer_name: str, peer_address: str, payload: wire.Payload) -> None:
        sockets.check_local(peer_address)
        self._call(self._outbox.send, peer_name, peer_address, Item(0, payload, payload.num_bytes))

    def _send_control(self, frame: bytes) -> None:
        assert self._control is not None, f"endpoint {self.name!r} has no scheduler"
        self._control.send(frame, NOBLOCK)

    def _has_arrived(self) -> bool:
        return bool(self._arrivals)

    def _flush(self) -> None:
        if self._inbox.has_commits and not self._acknowledges:
            self._acknowledges = True
            self._loop.call_later(_ACKNOWLEDGE_AFTER_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledges = False
        self._inbox.flush()

    def _deliver(self, block: Block) -> None:
        if block.content is None:
            self._arrivals.append(Ended(block.producer))
        else:
            header, content = block.content
            self._arrivals.append(Data(header, content, block.producer, block))

    def _on_control_readable(self) -> None:
        assert self._control is not None
        for _ in range(BATCH):
            try:
                self._on_control_message(wire.decode(self._control.recv(NOBLOCK)))
            except WireError:
                self._rejected += 1
            if not has_message(self._control):
                return

    def _on_control_message(self, message: wire.Message) -> None:
        self.scheduler_seen = time.monotonic()
        if message.kind == Kind.PING:
            self._send_control(_PONG)
            return
        content = wire.meta_of(message)
        if self.on_control is None or not self.on_control(content):
            self._arrivals.append(Control(content))

    def _no_credit(self, peer_name: str, address: str, item: Item, timeout_s: float) -> DeadlineError:
        state = self._outbox.statistics().get(peer_name)
        if state is None:
            return DeadlineError(f"peer {peer_name!r} was given up while a block waited for its credit")
        if state.in_flight_items == state.credit_items == 0:
            found = f"no answer from {address}"
        else:
            found = f"{state.in_flight_items} blocks of {state.in_flight_bytes} bytes that it has not committed"
        return DeadlineError(
            f"peer {peer_name!r} gave no credit for a block of {item.num_bytes} bytes within {timeout_s:g} s",
            found=found,
            fix=f"see what {peer_name!r} is doing, or allow more time",
        )


def _decode(message: wire.Message, frames: list[memoryview]) -> tuple[dict[str, Any], Rows | Tensors]:
    header = wire.meta_of(message) if Header.META in message.header else {}
    if Header.KEYS in message.header:
        return header, decode_rows(message, frames)
    return header, decode_tensors(message, frames)

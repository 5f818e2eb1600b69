"""The producer's end of streams; queue.py draws the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from flowrl.errors import WireError

from . import sockets, wire
from .credit import Item, SendStatistics, SendWindow, Window
from .loop import BATCH, NOBLOCK, Loop, has_message
from .wire import Ack, Flag, Kind, Nack, Welcome

_REOPEN_AFTER_S = 0.05
"""Between two openings of one connection: a listener that hangs up at once must not make the loop spin."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A consumer, as its producer sees it."""

    name: str
    address: str
    credit: SendWindow = field(default_factory=SendWindow)
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    opened_at: float = 0.0
    finishing: bool = False
    """LAST is due once nothing waits."""
    told: bool = False
    """LAST was sent on this connection."""


class Outbox:
    """The producer's end of all its streams.

    Args:
        name: of this process.
        incarnation: unique to this life of the process.
        on_error: given what a consumer says that cannot be mended here.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        context: sockets.Context,
        loop: Loop,
        *,
        on_error: Callable[[WireError], None],
    ) -> None:
        self._name, self._incarnation = name, incarnation
        self._context, self._loop, self._on_error = context, loop, on_error
        self._peers: dict[str, _Peer] = {}
        self._num_opened = 0
        self._last_seq = 0
        self.rejected = 0
        """Messages from consumers that could not be read."""
        self.dropped = 0
        """Blocks not delivered to peers that `drop` forgot."""

    def send(self, peer_name: str, address: str, item: Item) -> None:
        """Send `item` when credit allows, after all that was given for this peer before.

        Args:
            address: of the peer's inbox. When it is not the one known, the peer was replaced: whatever the old one has
                not acknowledged goes to the new one.
        """
        peer = self._peers.get(peer_name)
        if peer is None:
            peer = self._peers[peer_name] = _Peer(peer_name, address)
        if peer.address != address:
            self.redirect(peer_name, address)
        if peer.socket is None:
            self._open(peer)
        self._last_seq += 1
        item.seq = self._last_seq
        peer.credit.offer(item)
        self._pump(peer)

    def redirect(self, peer_name: str, address: str) -> None:
        """Deliver to the peer's replacement from now on, what is not acknowledged first; no-op for an unknown peer."""
        if peer := self._peers.get(peer_name):
            peer.address = address
            self._reopen(peer)

    def withdraw(self, peer_name: str, item: Item) -> None:
        """Take back an item that no credit was there for."""
        if peer := self._peers.get(peer_name):
            peer.credit.withdraw(item)

    def drop(self, peer_name: str) -> None:
        """Forget a peer with all that is not delivered to it: the scheduler issues those rows again."""
        if peer := self._peers.pop(peer_name, None):
            self._close(peer)
            self.dropped += peer.credit.statistics().undelivered
            for item in tuple(peer.credit.waiting):
                peer.credit.withdraw(item)

    def finish(self, peer_name: str) -> None:
        """End the stream: after the last item the consumer gets LAST, and its BYE closes the connection."""
        if peer := self._peers.get(peer_name):
            peer.finishing, peer.told = True, False
            self._pump(peer)

    def statistics(self) -> dict[str, SendStatistics]:
        """A snapshot by peer; from any thread."""
        return {name: peer.credit.statistics() for name, peer in tuple(self._peers.items())}

    def close(self) -> None:
        """Close all connections. What is not delivered stays in `statistics`."""
        for peer in self._peers.values():
            self._close(peer)

    def _open(self, peer: _Peer) -> None:
        self._num_opened += 1
        peer.opened_at = time.monotonic()
        peer.told = False
        made = sockets.socket(self._context, zmq.DEALER, heartbeat=True)
        # A ROUTER ignores a second peer with an identity that it knows, so each connection has its own.
        made.setsockopt_string(zmq.IDENTITY, f"{self._incarnation}.{self._num_opened}")
        peer.socket = made
        peer.monitor = made.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.watch(made, lambda: self._on_readable(peer))
        self._loop.watch(peer.monitor, lambda: self._on_monitor(peer))
        made.connect(peer.address)
        made.send(wire.encode(Kind.HELLO, wire.hello(self._name, self._incarnation)), NOBLOCK)

    def _close(self, peer: _Peer) -> None:
        if peer.socket is None or peer.monitor is None:
            return
        self._loop.unwatch(peer.monitor)
        self._loop.unwatch(peer.socket)
        peer.socket.disable_monitor()  # an open monitor would hold up the end of the context
        peer.monitor.close(0)
        peer.socket.close(0)
        peer.socket = peer.monitor = None

    def _reopen(self, peer: _Peer) -> None:
        self._close(peer)
        peer.credit.disconnect()
        wait_s = peer.opened_at + _REOPEN_AFTER_S - time.monotonic()
        if wait_s <= 0:
            self._open(peer)
        else:
            self._loop.call_later(wait_s, lambda: self._open_again(peer))

    def _open_again(self, peer: _Peer) -> None:
        if peer.socket is None and self._peers.get(peer.name) is peer:
            self._open(peer)

    def _pump(self, peer: _Peer) -> None:
        """Send what the credits allow."""
        if peer.socket is None:
            return
        while item := peer.credit.next():
            flags = Flag.REDELIVERED.value if item.attempts > 1 else 0
            first = item.payload.first_frame(Kind.DATA, seq=item.seq, flags=flags)
            if item.payload.body:
                peer.socket.send_multipart([first, *item.payload.body], NOBLOCK, copy=False)
            else:
                peer.socket.send(first, NOBLOCK)
        if peer.finishing and not peer.told and peer.credit.window and not peer.credit.waiting:
            peer.socket.send(wire.encode(Kind.DATA, flags=Flag.LAST, seq=self._last_seq), NOBLOCK)
            peer.told = True

    def _on_monitor(self, peer: _Peer) -> None:
        if peer.monitor is None:
            return
        recv_monitor_message(peer.monitor, NOBLOCK)
        self._reopen(peer)

    def _on_readable(self, peer: _Peer) -> None:
        for _ in range(BATCH):
            if peer.socket is None or not has_message(peer.socket):
                break
            frames = peer.socket.recv_multipart(NOBLOCK)
            try:
                self._on_message(peer, wire.decode(frames[0]))
            except (WireError, KeyError, TypeError, ValueError):
                self.rejected += 1
        self._pump(peer)

    def _on_message(self, peer: _Peer, message: wire.Message) -> None:
        header = message.header
        if message.kind == Kind.ACK:
            peer.credit.acknowledge(wire.integers(header[Ack.SEQS]))
        elif message.kind == Kind.WELCOME:
            num_items, num_bytes = wire.integers(header[Welcome.WINDOW])
            peer.credit.window = Window(items=num_items, num_bytes=num_bytes)
        elif message.kind == Kind.NACK:
            peer.credit.acknowledge([seq for seq in wire.integers([header[Nack.SEQ]]) if seq], refused=True)
            self._on_error(WireError(f"peer {peer.name!r} refuses what it was sent: {header[Nack.TEXT]}"))
        elif message.kind == Kind.DRAIN:
            peer.finishing, peer.told = True, False
        elif message.kind == Kind.BYE:
            peer.finishing = False
            if not peer.credit.statistics().undelivered:  # else a new stream has begun meanwhile
                self._close(peer)
                peer.credit.disconnect()
        else:
            raise WireError(f"a consumer says {message.kind.name}")

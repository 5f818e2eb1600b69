"""The consumer's end of streams; queue.py draws the protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from flowrl.errors import WireError

from . import wire
from .credit import Arrival, ReceiveWindow, Window
from .loop import BATCH, NOBLOCK, Loop, has_message
from .wire import Ack, Flag, Hello, Kind, Nack, Welcome

_MAX_HELLO_BYTES = 1024
"""A stranger's header; so little that not even a hostile one costs a millisecond."""


class Block(NamedTuple):
    """A block as it came in, not yet committed."""

    producer: str
    incarnation: str
    seq: int
    num_bytes: int
    content: Any
    """What the inbox's `decode` made of it; None at the end of a stream."""


@dataclass(slots=True, eq=False)
class _Producer:
    """A producer, as its consumer sees it."""

    name: str
    identity: bytes
    window: ReceiveWindow
    acks: list[int] = field(default_factory=list)
    ended_at: int = -1
    """The sequence number under which LAST came."""
    owes_bye: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveStatistics:
    """A consumer's view of all its producers together."""

    received: int
    """Different blocks."""
    committed: int
    held_items: int
    """Received but not committed."""
    held_bytes: int
    duplicates: int
    rejected: int
    """Garbage, and messages from strangers."""


class Inbox:
    """The consumer's end of all its streams: a ROUTER that grants each producer one window.

    Args:
        made: a bound ROUTER.
        decode: makes the content of a block from its message and its further frames, or raises `WireError`.
        deliver: given each new block, in order of arrival.
        secret: what the incarnation of every producer begins with.
    """

    def __init__(
        self,
        made: zmq.Socket[bytes],
        loop: Loop,
        *,
        window: Window,
        decode: Callable[[wire.Message, list[memoryview]], Any],
        deliver: Callable[[Block], None],
        secret: str = "",
    ) -> None:
        self._socket, self._window, self._secret = made, window, secret
        self._decode, self._deliver = decode, deliver
        self._by_identity: dict[bytes, _Producer] = {}
        self._by_name: dict[str, _Producer] = {}
        self._commits: deque[Block] = deque()
        self._rejected = 0
        loop.watch(made, self._on_readable)

    def commit(self, block: Block) -> None:
        """Hand back the block's credit at the next `flush`; from any thread."""
        self._commits.append(block)

    @property
    def has_commits(self) -> bool:
        """Whether commits wait for `flush`."""
        return bool(self._commits)

    def flush(self) -> None:
        """Acknowledge all commits, one message a producer."""
        touched: dict[str, _Producer] = {}
        while self._commits:
            block = self._commits.popleft()
            producer = self._by_name.get(block.producer)
            if producer is None or producer.window.incarnation != block.incarnation:
                continue  # that producer's life is over, and its credits with it
            if producer.window.commit(block.seq):
                producer.acks.append(block.seq)
                touched[producer.name] = producer
        for producer in touched.values():
            self._acknowledge(producer)

    def drain(self) -> None:
        """Ask every producer to finish its stream."""
        for producer in self._by_name.values():
            self._reply(producer.identity, wire.encode(Kind.DRAIN))

    def statistics(self) -> ReceiveStatistics:
        """A snapshot; from any thread."""
        windows = [producer.window for producer in tuple(self._by_name.values())]
        return ReceiveStatistics(
            received=sum(window.received for window in windows),
            committed=sum(window.committed for window in windows),
            held_items=sum(len(window.held) for window in windows),
            held_bytes=sum(sum(tuple(window.held.values())) for window in windows),
            duplicates=sum(window.duplicates for window in windows),
            rejected=self._rejected,
        )

    def _on_readable(self) -> None:
        for _ in range(BATCH):
            if not has_message(self._socket):
                return
            identity = self._socket.recv(NOBLOCK)
            first, rest = _receive_rest(self._socket)
            try:
                self._on_message(identity, first, rest)
            except (WireError, KeyError, TypeError, ValueError):
                self._rejected += 1

    def _on_message(self, identity: bytes, first: bytes, rest: list[memoryview]) -> None:
        producer = self._by_identity.get(identity)
        if producer is None:
            message = wire.decode(first, max_header=_MAX_HELLO_BYTES)
            if message.kind != Kind.HELLO:
                raise WireError("a message from a stranger")
            self._welcome(identity, message.header)
            return
        message = wire.decode(first)
        if message.kind != Kind.DATA:
            raise WireError(f"a producer says {message.kind.name}")
        if message.flags & Flag.LAST.value:
            self._end(producer, message.seq)
            return
        self._on_data(producer, message, rest, len(first) + sum(frame.nbytes for frame in rest))

    def _welcome(self, identity: bytes, header: dict[int, Any]) -> None:
        lowest, highest = wire.integers(header[Hello.VERSIONS])
        name, incarnation = header[Hello.PEER]
        if type(name) is not str or type(incarnation) is not str:
            raise WireError("a HELLO without a name")
        if not incarnation.startswith(self._secret):
            raise WireError("a HELLO of another run")
        if not lowest <= wire.VERSION <= highest:
            text = f"it speaks wire versions {lowest} to {highest}, this is {wire.VERSION}"
            self._reply(identity, wire.encode(Kind.NACK, {Nack.SEQ.value: 0, Nack.TEXT.value: text}))
            return
        producer = self._by_name.get(name)
        if producer is None or producer.window.incarnation != incarnation:
            self._forget(producer)
            producer = self._by_name[name] = _Producer(name, identity, ReceiveWindow(incarnation))
        producer.identity = identity
        self._by_identity[identity] = producer
        welcome = {
            Welcome.VERSION.value: wire.VERSION,
            Welcome.WINDOW.value: [self._window.items, self._window.num_bytes],
            Welcome.RESUME.value: producer.window.highest,
        }
        self._reply(identity, wire.encode(Kind.WELCOME, welcome, aux=self._window.items))

    def _forget(self, producer: _Producer | None) -> None:
        if producer is not None:
            self._by_identity = {key: value for key, value in self._by_identity.items() if value is not producer}

    def _on_data(self, producer: _Producer, message: wire.Message, rest: list[memoryview], num_bytes: int) -> None:
        try:
            content = self._decode(message, rest)
        except WireError as error:
            self._reply(
                producer.identity, wire.encode(Kind.NACK, {Nack.SEQ.value: message.seq, Nack.TEXT.value: str(error)})
            )
            raise
        arrival = producer.window.arrive(message.seq, num_bytes)
        if arrival is Arrival.NEW:
            self._deliver(Block(producer.name, producer.window.incarnation, message.seq, num_bytes, content))
        elif arrival is Arrival.COMMITTED:
            producer.acks.append(message.seq)
            self._acknowledge(producer)

    def _end(self, producer: _Producer, seq: int) -> None:
        if seq > producer.ended_at:  # else it is said again, on a new connection
            producer.ended_at = seq
            self._deliver(Block(producer.name, producer.window.incarnation, 0, 0, None))
        producer.owes_bye = True
        self._acknowledge(producer)

    def _acknowledge(self, producer: _Producer) -> None:
        if producer.acks:
            self._reply(
                producer.identity, wire.encode(Kind.ACK, {Ack.SEQS.value: producer.acks}, aux=len(producer.acks))
            )
            producer.acks = []
        if producer.owes_bye and not producer.window.held:
            self._reply(producer.identity, wire.encode(Kind.BYE))
            producer.owes_bye = False

    def _reply(self, identity: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([identity, frame], NOBLOCK)
        except zmq.ZMQError as error:
            # The producer is gone, or connects anew and will be told then: an ACK is repeated for a duplicate.
            if error.errno != zmq.EHOSTUNREACH:
                raise


def _receive_rest(made: zmq.Socket[bytes]) -> tuple[bytes, list[memoryview]]:
    """Frame 0 as a copy, for libzmq may place a small frame at an odd address; the body's frames as they lie."""
    frame = made.recv(NOBLOCK, copy=False)
    first, rest = frame.bytes, []
    while frame.more:
        frame = made.recv(NOBLOCK, copy=False)
        rest.append(frame.buffer)
    return first, rest

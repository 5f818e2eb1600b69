"""Credits, sequence numbers, acknowledgements and duplicates of one edge: state machines without sockets.

An *item* is one block: what one `send` hands over. The consumer grants each producer a `Window` of items and of bytes.
A producer's credit is never counted up and down on its own: it *is* the window minus what is sent and not acknowledged.
So a duplicate, a redelivery or a lost acknowledgement cannot leak credit, and a consumer that reads nothing gets
exactly the window.

    item                 produces              waits for                        unblocked by
    -------------------  --------------------  -------------------------------  -----------------------
    in `waiting`         memory of producer    HELLO/WELCOME, then credit       WELCOME, ACK
    in `unacknowledged`  one window's share    the consumer's commit            ACK (or NACK: refused)
    held at consumer     one window's share    the main thread's commit         `ReceiveWindow.commit`

Delivery is at least once, and the receiver makes it exactly once. Sequence numbers of one producer rise; a connection
is first-in first-out and can only lose its end; after a reconnect the producer sends all that is not acknowledged, in
order. So what a receiver has seen is a prefix, and a number not above the highest seen is a duplicate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from . import wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """How much of one producer's data a consumer is willing to hold uncommitted."""

    items: int = 64
    """Blocks."""
    num_bytes: int = 64 * 1024 * 1024
    """Bytes of these blocks, header included. A larger block may pass alone, when nothing else is in flight."""

    def __post_init__(self) -> None:
        if self.items < 1 or self.num_bytes < 1:
            raise ValueError(f"a window holds at least one item and one byte, not {self.items} and {self.num_bytes}")


@dataclass(slots=True, eq=False)
class Item:
    """A block on its way."""

    seq: int
    payload: wire.Payload
    num_bytes: int
    attempts: int = 0
    """How often it was sent."""
    withdrawn: bool = False

    @property
    def left(self) -> bool:
        """Whether it no longer waits to be sent for the first time."""
        return self.attempts > 0 or self.withdrawn


@dataclass(frozen=True, kw_only=True, slots=True)
class SendStatistics:
    """A producer's view of one edge."""

    waiting_items: int
    """Handed over but not sent, for want of credit or of a consumer."""
    waiting_bytes: int
    in_flight_items: int
    """Sent but not acknowledged."""
    in_flight_bytes: int
    credit_items: int
    """What may be sent now; 0 before the consumer's WELCOME."""
    credit_bytes: int
    sent: int
    """Different blocks."""
    redelivered: int
    acknowledged: int
    refused: int

    @property
    def undelivered(self) -> int:
        """Blocks that no consumer has acknowledged."""
        return self.waiting_items + self.in_flight_items


class SendWindow:
    """The producer's side of one edge."""

    def __init__(self) -> None:
        self.window: Window | None = None
        """What the consumer grants; None until it has answered."""
        self.waiting: deque[Item] = deque()
        self.unacknowledged: dict[int, Item] = {}
        self.in_flight_bytes = 0
        self.sent = self.redelivered = self.acknowledged = self.refused = 0

    def offer(self, item: Item) -> None:
        """Queue an item behind those that wait."""
        self.waiting.append(item)

    def next(self) -> Item | None:
        """The next item that the credits allow, now counted as in flight; None when there is none."""
        if self.window is None or not self.waiting or not self._allows(self.waiting[0], self.window):
            return None
        item = self.waiting.popleft()
        self.unacknowledged[item.seq] = item
        self.in_flight_bytes += item.num_bytes
        if item.attempts:
            self.redelivered += 1
        else:
            self.sent += 1
        item.attempts += 1
        return item

    def acknowledge(self, seqs: list[int], *, refused: bool = False) -> None:
        """Take items as committed (or as refused for good). Numbers that are not known are old news."""
        for seq in seqs:
            item = self.unacknowledged.pop(seq, None)
            if item is not None:
                self.in_flight_bytes -= item.num_bytes
            elif not self._forget_waiting(seq):
                continue
            self.acknowledged += not refused
            self.refused += refused

    def withdraw(self, item: Item) -> None:
        """Take back an item that was never sent; one that was stays."""
        if item.attempts == 0:
            self.waiting.remove(item)
            item.withdrawn = True

    def disconnect(self) -> None:
        """The consumer is gone, or another one takes its place: what it has not acknowledged waits again, in order."""
        self.window = None
        self.waiting.extendleft(reversed(self.unacknowledged.values()))
        self.unacknowledged.clear()
        self.in_flight_bytes = 0

    def statistics(self) -> SendStatistics:
        """A snapshot."""
        window = self.window
        return SendStatistics(
            waiting_items=len(self.waiting),
            waiting_bytes=sum(item.num_bytes for item in tuple(self.waiting)),
            in_flight_items=len(self.unacknowledged),
            in_flight_bytes=self.in_flight_bytes,
            credit_items=window.items - len(self.unacknowledged) if window else 0,
            credit_bytes=max(0, window.num_bytes - self.in_flight_bytes) if window else 0,
            sent=self.sent,
            redelivered=self.redelivered,
            acknowledged=self.acknowledged,
            refused=self.refused,
        )

    def _allows(self, item: Item, window: Window) -> bool:
        in_flight = len(self.unacknowledged)
        if in_flight >= window.items:
            return False
        return not in_flight or self.in_flight_bytes + item.num_bytes <= window.num_bytes

    def _forget_waiting(self, seq: int) -> bool:
        """An item can be acknowledged while it waits to be sent again: the consumer had it already."""
        for item in self.waiting:
            if item.seq == seq and item.attempts:
                self.waiting.remove(item)
                return True
        return False


class Arrival(Enum):
    """What a receiver makes of a sequence number."""

    NEW = "new"
    HELD = "held"
    """A duplicate of an item that waits for its commit; the commit will acknowledge it."""
    COMMITTED = "committed"
    """A duplicate of an item whose acknowledgement was lost; acknowledge it again."""


class ReceiveWindow:
    """The consumer's side of one edge from one producer process (one *incarnation* of its name)."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.highest = 0
        """The highest sequence number seen."""
        self.held: dict[int, int] = {}
        """Bytes of each item that is not committed, by sequence number."""
        self.received = self.committed = self.duplicates = 0

    def arrive(self, seq: int, num_bytes: int) -> Arrival:
        """Take note of an item."""
        if seq > self.highest:
            self.highest = seq
            self.held[seq] = num_bytes
            self.received += 1
            return Arrival.NEW
        self.duplicates += 1
        return Arrival.HELD if seq in self.held else Arrival.COMMITTED

    def commit(self, seq: int) -> bool:
        """Whether this frees credit: the first commit of an item does."""
        if self.held.pop(seq, None) is None:
            return False
        self.committed += 1
        return True

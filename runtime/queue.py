"""Streams of blocks between processes: a producer's `Outbox` sends straight to the `Inbox` of each consumer.

::

    producer, DEALER                                consumer, ROUTER
    HELLO   {versions, name, incarnation}   ->
                                            <-      WELCOME {version, window, highest seq seen}
    DATA    seq 1, 2, 3 … within the window ->
                                            <-      ACK     {seqs}   committed: their credit is free again
                                            <-      NACK    {seq, text}   refused for good, or no common version
                                            <-      DRAIN   finish your stream
    DATA    with Flag.LAST, no body         ->
                                            <-      BYE     all committed

Each `Outbox` opens one DEALER a consumer, so that a dead one holds up nobody else. A connection that breaks is opened
anew and what was not acknowledged goes again with Flag.REDELIVERED (credit.py says why the receiver sees each block
once). Messages from strangers, who have not said HELLO, and garbage are dropped and counted.

Nothing in these classes blocks or locks: both live in the thread of a `Loop`.
"""

from __future__ import annotations

from .credit import ReceiveWindow, SendStatistics, SendWindow, Window
from .inbox import Block, Inbox, ReceiveStatistics
from .outbox import Outbox

__all__ = [
    "Block",
    "Inbox",
    "Outbox",
    "ReceiveStatistics",
    "ReceiveWindow",
    "SendStatistics",
    "SendWindow",
    "Window",
]

"""Message frames: a fixed prelude, a msgpack header, and a body that lies in one of several places.

::

    frame 0:  prelude, 32 bytes, little-endian  <4s B B H I I Q Q>
              "FLW1" | version | kind | flags | edge | header bytes | seq | aux
              header: a msgpack map with small integer keys; keys that are not known are skipped
              with Flag.INLINE: zeros up to a multiple of 64, then the body
    frame 1…: with Flag.OOB, the body (see body.py for how frames and fields relate)

This file knows frames, not sockets. Whatever arrives is checked before memory is taken for it: garbage raises
`WireError` and nothing else. There is no pickle and no msgpack extension type, so nothing in a message can run code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from flowrl.errors import WireError

from . import plain

MAGIC = b"FLW1"
VERSION = 1
ALIGNMENT = 64
"""Bodies and fields begin at multiples of this: a cache line, and the widest vector load."""

INLINE_LIMIT = 32 * 1024
"""Bodies up to here ride in frame 0: copying them costs less than a frame of their own."""

MAX_HEADER = 16 * 1024 * 1024
"""Bytes of one header. A control message that lists a million keys still fits."""

_PRELUDE = struct.Struct("<4sBBHIIQQ")
PRELUDE_BYTES = _PRELUDE.size

Frame = bytes | bytearray | memoryview
"""Contiguous bytes, sent or received."""


class Kind(IntEnum):
    """What a message is. A number never changes its meaning; 9 to 16 are kept for managed edges and chunks."""

    HELLO = 1
    WELCOME = 2
    DATA = 3
    ACK = 4
    NACK = 5
    PING = 6
    PONG = 7
    BYE = 8
    DRAIN = 17
    CONTROL = 18
    """Between a worker and the scheduler: the plain map under `Header.META`."""


class Flag(IntFlag):
    """Where the body lies and how the message is to be taken.

    2, 16 and 32 are kept for shared memory, for blocks that go on in the next message, and for checksums.
    """

    INLINE = 1
    OOB = 4
    REDELIVERED = 8
    LAST = 64


class Header(IntEnum):
    """The integer keys of a header map."""

    NUM_ITEMS = 0
    FIELDS = 1
    KEYS = 2
    """Which field holds the rows' keys; absent for named tensors."""
    META = 8


class Hello(IntEnum):
    """Keys of the header of HELLO."""

    VERSIONS = 0
    """[lowest, highest] wire version that the producer speaks."""
    PEER = 1
    """[name, incarnation]"""


class Welcome(IntEnum):
    """Keys of the header of WELCOME."""

    VERSION = 0
    WINDOW = 1
    """[items, bytes]"""
    RESUME = 4
    """The highest sequence number seen."""


class Ack(IntEnum):
    """Keys of the header of ACK."""

    SEQS = 0


class Nack(IntEnum):
    """Keys of the header of NACK."""

    SEQ = 0
    """The block that is refused; 0: the HELLO."""
    TEXT = 1


# Plain ints: arithmetic on an IntFlag costs more than the rest of the decoding.
_INLINE = int(Flag.INLINE)
_SPOKEN = int(Flag.INLINE | Flag.OOB | Flag.REDELIVERED | Flag.LAST)
_KINDS = {int(kind): kind for kind in Kind}


class Message(NamedTuple):
    """One decoded frame 0. `body` is the inline body, or None."""

    kind: Kind
    flags: int
    edge: int
    seq: int
    aux: int
    header: dict[int, Any]
    body: memoryview | None = None


@dataclass(slots=True, eq=False)
class Payload:
    """A message body made ready once, sent as often as needed: a redelivery changes the prelude alone."""

    tail: bytes
    """What follows the prelude in frame 0: header, padding and the inline body."""
    header_bytes: int
    flags: int
    body: list[Frame] = field(default_factory=list)
    """The frames after frame 0. They are views of the sender's arrays, which must not change until acknowledged."""

    @property
    def num_bytes(self) -> int:
        """What the message costs in credits of bytes."""
        return PRELUDE_BYTES + len(self.tail) + sum(memoryview(frame).nbytes for frame in self.body)

    def first_frame(self, kind: Kind, *, seq: int, flags: int = 0, edge: int = 0, aux: int = 0) -> bytes:
        """Frame 0 under the given sequence number."""
        prelude = _PRELUDE.pack(MAGIC, VERSION, kind, self.flags | flags, edge, self.header_bytes, seq, aux)
        return prelude + self.tail


def encode(
    kind: Kind, header: Mapping[int, Any] | None = None, *, flags: int = 0, edge: int = 0, seq: int = 0, aux: int = 0
) -> bytes:
    """A message without a body, in one frame.

    Raises:
        WireError: the header holds what msgpack does not carry, or is longer than `MAX_HEADER`.
    """
    packed = pack_header(header, what=f"the {kind.name} message") if header else b""
    return _PRELUDE.pack(MAGIC, VERSION, kind, flags, edge, len(packed), seq, aux) + packed


def pack_header(header: Mapping[int, Any], *, what: str) -> bytes:
    """The msgpack bytes of a header.

    Raises:
        WireError: the header holds what msgpack does not carry, or is longer than `MAX_HEADER`.
    """
    packed = plain.pack(header, what=what, blame=header.get(Header.META))
    if len(packed) > MAX_HEADER:
        raise WireError(f"the header of {what} is too long", found=f"{len(packed)} bytes", wanted=f"<= {MAX_HEADER}")
    return packed


def decode(frame: Frame, *, max_header: int = MAX_HEADER) -> Message:
    """Take a frame 0 apart.

    Args:
        frame: as received. An inline body in the answer is a view of it.
        max_header: the most header bytes to accept; small for senders that have not said who they are.

    Raises:
        WireError: this is no message of this version.
    """
    view = memoryview(frame)
    kind, flags, edge, num_header, seq, aux = _decode_prelude(view, max_header)
    end = PRELUDE_BYTES + num_header
    header: dict[int, Any] = {}
    if num_header:
        try:
            header = plain.unpack(view[PRELUDE_BYTES:end])
        except ValueError as error:
            raise WireError(f"a {kind.name} message has a header that cannot be read: {error}") from None
        if type(header) is not dict:
            raise WireError(f"a {kind.name} message has no map as its header", found=type(header).__name__)
    if not flags & _INLINE:
        if len(view) != end:
            raise WireError(f"a {kind.name} message has {len(view) - end} bytes behind its header but no body")
        return Message(kind, flags, edge, seq, aux, header)
    return Message(kind, flags, edge, seq, aux, header, view[aligned(end) :])


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return (num_bytes + ALIGNMENT - 1) & -ALIGNMENT


def meta_of(message: Message) -> dict[str, Any]:
    """The plain map that a message carries under `Header.META`.

    Raises:
        WireError: there is none.
    """
    meta = message.header.get(Header.META)
    if type(meta) is not dict:
        raise WireError(f"a {message.kind.name} message carries no map", found=type(meta).__name__)
    return meta


def hello(name: str, incarnation: str) -> dict[int, Any]:
    """The header of a HELLO."""
    return {Hello.VERSIONS.value: [VERSION, VERSION], Hello.PEER.value: [name, incarnation]}


def integers(values: object) -> list[int]:
    """A header's value that has to be a list of ints."""
    if type(values) is not list or not all(type(value) is int for value in values):
        raise WireError("a header without its numbers", found=repr(values)[:80])
    return values


def _decode_prelude(view: memoryview, max_header: int) -> tuple[Kind, int, int, int, int, int]:
    if len(view) < PRELUDE_BYTES:
        raise WireError("a frame is too short for a message", found=f"{len(view)} bytes", wanted=f">= {PRELUDE_BYTES}")
    magic, version, number, flags, edge, num_header, seq, aux = _PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise WireError("a frame does not begin as a message of flowrl", found=magic, wanted=MAGIC)
    if version != VERSION:
        raise WireError("a message of another wire version", found=version, wanted=VERSION, fix="run one flowrl")
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError("a message of an unknown kind", found=number)
    if flags & ~_SPOKEN:
        raise WireError(f"a {kind.name} message has flags that this version does not speak", found=repr(Flag(flags)))
    if num_header > max_header or PRELUDE_BYTES + num_header > len(view):
        raise WireError(f"a {kind.name} message says a header of {num_header} bytes", found=f"{len(view)} bytes in all")
    return kind, flags, edge, num_header, seq, aux

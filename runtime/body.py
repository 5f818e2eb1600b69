"""Bodies: named fields of numbers at 64-byte aligned offsets, written without a copy where a copy would cost.

All fields of a block lie in one *body*, an address space that its frames cover one after the other, each frame
beginning at the next multiple of 64. So a field's offset says where it lies however the body is cut into frames. The
writer cuts so:

* a body up to `wire.INLINE_LIMIT` is one copy into frame 0;
* else its small fields are copied into one frame together, and each large field is a frame of its own that *is* the
  sender's array: no copy is made, and the sender keeps the array unchanged until the message is acknowledged.

The reader accepts any cut between fields and gives views of the frames, read-only or not as the frames are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from flowrl.errors import WireError

from . import wire

OWN_FRAME = 64 * 1024
"""Fields from here on get a frame of their own; below, libzmq would copy a frame anyhow and each frame costs 3 us."""

MAX_FIELDS = 1 << 16
MAX_DIMS = 16
_FARTHEST = 1 << 48


class Dtype(IntEnum):
    """Codes of element types. The table is append-only."""

    BOOL = 0
    U8 = 1
    I8 = 2
    I16 = 3
    I32 = 4
    I64 = 5
    F16 = 6
    BF16 = 7
    F32 = 8
    F64 = 9
    F8E4M3 = 10
    F8E5M2 = 11
    U16 = 12
    U32 = 13
    U64 = 14


ITEM_BYTES = (1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 2, 4, 8)
"""Bytes of one element, by code."""


class FieldKind(IntEnum):
    """How a field is to be read. A PACKED or TEXT field is followed by its offsets, a DENSE field of the same name."""

    DENSE = 0
    PACKED = 1
    TEXT = 2
    MSGPACK = 3


class Field(NamedTuple):
    """One row of the field table."""

    name: str
    dtype: int
    kind: int
    shape: list[int]
    offset: int
    num_bytes: int


class BodyWriter:
    """Collects fields, then lays them out once."""

    def __init__(self) -> None:
        self._fields: list[tuple[str, int, int, list[int], memoryview]] = []

    def add(self, name: str, dtype: int, kind: int, shape: Sequence[int], data: memoryview) -> None:
        """Add a field. `data` is C-contiguous; its bytes are not copied yet."""
        flat = data.cast("B") if data.nbytes else memoryview(b"")
        self._fields.append((name, int(dtype), int(kind), list(shape), flat))  # msgpack refuses an IntEnum

    def __len__(self) -> int:
        return len(self._fields)

    def payload(self, header: Mapping[int, Any], *, what: str) -> wire.Payload:
        """The message body with its field table added to `header`."""
        small, large = self._split()
        table: list[list[Any]] = [[]] * len(self._fields)
        copied: list[bytes | memoryview] = []
        frames: list[wire.Frame] = []
        offset = 0
        for position in small:
            *description, data = self._fields[position]
            table[position] = [*description, offset, len(data)]
            copied += (data, bytes(-len(data) % wire.ALIGNMENT))
            offset = wire.aligned(offset + len(data))
        for position in large:
            *description, data = self._fields[position]
            table[position] = [*description, offset, len(data)]
            frames.append(data)
            offset = wire.aligned(offset + len(data))
        packed = wire.pack_header({**header, wire.Header.FIELDS.value: table}, what=what)
        if not large:
            padding = bytes(-(wire.PRELUDE_BYTES + len(packed)) % wire.ALIGNMENT)
            return wire.Payload(b"".join((packed, padding, *copied)), len(packed), wire.Flag.INLINE)
        if small:
            frames.insert(0, b"".join(copied))
        return wire.Payload(packed, len(packed), wire.Flag.OOB, frames)

    def _split(self) -> tuple[list[int], list[int]]:
        """Positions of the fields that are copied together, and of those that are frames."""
        sizes = [len(data) for *_, data in self._fields]
        if sum(map(wire.aligned, sizes)) <= wire.INLINE_LIMIT:
            return list(range(len(sizes))), []
        limit = min(OWN_FRAME, max(sizes))
        small = [position for position, size in enumerate(sizes) if size < limit]
        return small, [position for position, size in enumerate(sizes) if size >= limit]


class Body:
    """The received frames of a body, and the table of what lies in them."""

    def __init__(self, message: wire.Message, frames: Sequence[memoryview]) -> None:
        self._frames = _place(message, frames)
        self._starts: list[int] = []
        end = 0
        for view in self._frames:
            self._starts.append(end)
            end = wire.aligned(end + view.nbytes)
        table = message.header.get(wire.Header.FIELDS)
        if type(table) is not list or len(table) > MAX_FIELDS:
            raise WireError("a block without a field table, or with one that is too long")
        self.fields = [_checked_field(row) for row in table]

    def bytes_of(self, field: Field) -> memoryview:
        """The bytes of a field, as a view of its frame.

        Raises:
            WireError: the field does not lie inside one frame.
        """
        if field.num_bytes == 0:
            return memoryview(b"")
        frame = bisect_right(self._starts, field.offset) - 1
        start = field.offset - self._starts[frame]
        view = self._frames[frame]
        if start + field.num_bytes > view.nbytes:
            raise WireError(
                f"field {field.name!r} lies outside of its frame",
                found=f"bytes {start} to {start + field.num_bytes}",
                wanted=f"<= {view.nbytes}",
            )
        return view[start : start + field.num_bytes]


_PLACES = int(wire.Flag.INLINE | wire.Flag.OOB)


def _place(message: wire.Message, frames: Sequence[memoryview]) -> Sequence[memoryview]:
    """Where the body lies: in frame 0, or in the frames after it."""
    place = message.flags & _PLACES
    if place == wire.Flag.INLINE and message.body is not None and not frames:
        return (message.body,)
    if place == wire.Flag.OOB and frames:
        return frames
    raise WireError("a block has no body, or more than one", found=f"{wire.Flag(place)!r} and {len(frames)} frames")


def _checked_field(row: object) -> Field:
    if type(row) is not list or len(row) < len(Field._fields):
        raise WireError("a field table has a row that is no field", found=repr(row)[:80])
    name, dtype, kind, shape, offset, num_bytes = row[: len(Field._fields)]
    if type(name) is not str or not _is_count(dtype, len(ITEM_BYTES)) or not _is_count(kind, len(FieldKind)):
        raise WireError("a field of unknown type", found=repr(row)[:80])
    if type(shape) is not list or len(shape) > MAX_DIMS:
        raise WireError(f"field {name!r} has no shape", found=repr(shape)[:80])
    wanted = ITEM_BYTES[dtype]
    for size in shape:
        if type(size) is not int or size < 0:
            raise WireError(f"field {name!r} has no shape", found=repr(shape)[:80])
        wanted *= size
    if type(num_bytes) is not int or num_bytes != wanted:
        raise WireError(f"field {name!r} has {num_bytes!r:.40} bytes, which is not its shape", found=repr(shape)[:80])
    if not _is_count(offset, _FARTHEST) or offset % wire.ALIGNMENT:
        raise WireError(f"field {name!r} lies nowhere", found=f"offset {offset!r:.40}")
    return Field(name, dtype, kind, shape, offset, num_bytes)


def _is_count(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit

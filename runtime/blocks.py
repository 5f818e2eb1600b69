"""Blocks: `Rows` as the body of a message, and back, equal in value, dtype and shape or refused where they are sent.

=====================  ==============================================================
keys                   one DENSE int32 field [rows, 3], found through `Header.KEYS`
numpy array            DENSE
`Ragged`               PACKED values [tokens] or [tokens, k], then DENSE offsets [rows + 1]
list of str            TEXT: utf-8 blob, then DENSE int32 byte offsets [rows + 1]
any other list         MSGPACK: one msgpack list
=====================  ==============================================================

Large arrays are sent as they lie (see body.py), so the columns of a sent `Rows` must not change until it is
acknowledged; the arrays of a received one are views of the received frames and may be read-only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import WireError
from flowrl.rows import Column, Key, Ragged, Rows, pack_keys, unpack_keys

from . import plain, wire
from .body import ITEM_BYTES, Body, BodyWriter, Dtype, Field, FieldKind

_NUMPY = {
    Dtype.BOOL: "?",
    Dtype.U8: "<u1",
    Dtype.I8: "<i1",
    Dtype.I16: "<i2",
    Dtype.I32: "<i4",
    Dtype.I64: "<i8",
    Dtype.F16: "<f2",
    Dtype.F32: "<f4",
    Dtype.F64: "<f8",
    Dtype.U16: "<u2",
    Dtype.U32: "<u4",
    Dtype.U64: "<u8",
}
_DTYPES = {code: np.dtype(name) for code, name in _NUMPY.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_KEYS = "keys"


def encode_rows(rows: Rows, meta: dict[str, Any] | None = None, *, context: str = "rows") -> wire.Payload:
    """Make `rows` ready to be sent.

    Args:
        meta: a plain map that travels along.
        context: who sends this on which edge; every error begins with it.

    Raises:
        WireError: a value that would not come back equal, with its column, row and path.
    """
    writer = BodyWriter()
    keys = _key_array(rows.keys, context)
    writer.add(_KEYS, Dtype.I32, FieldKind.DENSE, keys.shape, keys.data)
    for name, column in rows.columns.items():
        _add_column(writer, name, column, f"{context}: column {name!r}")
    header: dict[int, Any] = {wire.Header.NUM_ITEMS.value: len(rows), wire.Header.KEYS.value: 0}
    if meta:
        header[wire.Header.META.value] = meta
    return writer.payload(header, what=f"{context}: the header")


def decode_rows(message: wire.Message, frames: Sequence[memoryview]) -> Rows:
    """The rows of a message whose header has `Header.KEYS`.

    Args:
        frames: the frames after frame 0. Arrays of the answer are views of them.

    Raises:
        WireError: the message is not one that `encode_rows` makes.
    """
    body = Body(message, frames)
    num_rows = message.header.get(wire.Header.NUM_ITEMS)
    position = message.header.get(wire.Header.KEYS)
    if type(num_rows) is not int or type(position) is not int or not 0 <= position < len(body.fields):
        raise WireError("a block of rows without keys")
    key_field = body.fields[position]
    if key_field.dtype != Dtype.I32 or key_field.shape != [num_rows, 3]:
        raise WireError("a block of rows with keys of another shape", found=key_field.shape, wanted=[num_rows, 3])
    keys = unpack_keys(_array(body, key_field).ravel().tolist())
    columns: dict[str, Column] = {}
    fields = iter(body.fields[:position] + body.fields[position + 1 :])
    for field in fields:
        if field.name in columns:
            raise WireError(f"a block with two columns called {field.name!r}")
        columns[field.name] = _column(body, field, fields, num_rows)
    return Rows(keys, columns)


def _key_array(keys: Sequence[Key], context: str) -> NDArray[np.int32]:
    try:
        numbers = np.array(pack_keys(keys), np.int32)
    except (TypeError, OverflowError) as error:
        raise WireError(f"{context}: the rows' keys are no (step, prompt, sample): {error}") from None
    if len(numbers) != 3 * len(keys):
        raise WireError(f"{context}: the rows' keys are no (step, prompt, sample)", found=f"{len(numbers)} numbers")
    return numbers.reshape(len(keys), 3)


def _add_column(writer: BodyWriter, name: object, column: Column, what: str) -> None:
    if type(name) is not str or plain.find_fault(name):
        raise WireError(f"{what} needs a str as its name", found=repr(name))
    kind = type(column)
    if kind is np.ndarray:
        _add_array(writer, name, column, FieldKind.DENSE, what)
    elif kind is Ragged:
        _add_array(writer, name, column.values, FieldKind.PACKED, what)
        _check_packed(column.values.shape, what)
        _check_offsets(column.offsets, len(column.values), what)
        _add_array(writer, name, column.offsets, FieldKind.DENSE, what)
    elif kind is list and all(type(value) is str for value in column):
        _add_text(writer, name, column, what)
    elif kind is list:
        fault = plain.find_fault(column)
        if fault:
            raise plain.fault_error(fault, f"{what} row ")
        packed = plain.pack(column, what=what)
        writer.add(name, Dtype.U8, FieldKind.MSGPACK, [len(packed)], memoryview(packed))
    else:
        raise WireError(
            f"{what} is no column",
            found=f"{kind.__module__}.{kind.__qualname__}",
            wanted="a numpy array, Ragged or list",
            fix="tensors go as tensor.numpy(), other sequences as list(column)",
        )


def _add_array(writer: BodyWriter, name: str, array: NDArray[Any], kind: FieldKind, what: str) -> None:
    if type(array) is not np.ndarray:
        raise WireError(f"{what} holds no numpy array", found=type(array).__name__, fix="use np.asarray(...)")
    code = _CODES.get(array.dtype) if array.ndim else None
    if code is None:
        raise WireError(
            f"{what} has a type that does not travel",
            found=f"{array.dtype}, {array.ndim} axes",
            wanted=f"one of {', '.join(str(dtype) for dtype in _CODES)}, with one axis or more",
            fix="use .astype(...), or a list of str",
        )
    contiguous = np.ascontiguousarray(array)
    writer.add(name, code, kind, array.shape, contiguous.data)


def _add_text(writer: BodyWriter, name: str, column: list[str], what: str) -> None:
    joined = "".join(column)
    if joined.isascii():
        blob, lengths = joined.encode("ascii"), map(len, column)
    else:
        if fault := plain.find_fault(column):
            raise plain.fault_error(fault, f"{what} row ")
        pieces = [text.encode() for text in column]
        blob, lengths = b"".join(pieces), map(len, pieces)
    if len(blob) >= 1 << 31:
        raise WireError(f"{what} holds too much text for one block", found=f"{len(blob)} bytes", wanted="< 2 GiB")
    offsets = np.fromiter(accumulate(lengths, initial=0), np.int32, len(column) + 1)
    writer.add(name, Dtype.U8, FieldKind.TEXT, [len(blob)], memoryview(blob))
    writer.add(name, Dtype.I32, FieldKind.DENSE, offsets.shape, offsets.data)


def _array(body: Body, field: Field) -> NDArray[Any]:
    dtype = _DTYPES.get(Dtype(field.dtype))
    if dtype is None:
        raise WireError(f"column {field.name!r} has a type that numpy lacks", found=Dtype(field.dtype).name)
    try:
        if not field.num_bytes:
            return np.empty(field.shape, dtype)
        return np.frombuffer(body.bytes_of(field), dtype).reshape(field.shape)
    except ValueError as error:
        raise WireError(f"column {field.name!r} has no shape: {error}") from None


def _column(body: Body, field: Field, rest: Iterator[Field], num_rows: int) -> Column:
    """The column that begins with `field`; its offsets, if it has any, are taken from `rest`."""
    if field.kind == FieldKind.DENSE:
        column: Column = _array(body, field)
    elif field.kind == FieldKind.MSGPACK:
        column = _msgpack_list(body, field)
    elif field.kind == FieldKind.PACKED:
        _check_packed(field.shape, f"column {field.name!r}")
        column = Ragged(_array(body, field), _offsets(body, rest, field.shape[0], field.name))
    else:
        column = _text(body, field, rest)
    if (field.kind == FieldKind.DENSE and not field.shape) or len(column) != num_rows:
        raise WireError(f"column {field.name!r} has the wrong number of rows", found=field.shape, wanted=num_rows)
    return column


def _text(body: Body, field: Field, rest: Iterator[Field]) -> list[str]:
    _check_bytes(field)
    offsets = _offsets(body, rest, field.num_bytes, field.name).tolist()
    blob = body.bytes_of(field)
    try:
        text = str(blob, "utf-8")
        if len(text) == len(blob):  # ASCII: a byte is a character
            return [text[start:end] for start, end in pairwise(offsets)]
        return [str(blob[start:end], "utf-8") for start, end in pairwise(offsets)]
    except UnicodeDecodeError as error:
        raise WireError(f"column {field.name!r} is no text: {error}") from None


def _msgpack_list(body: Body, field: Field) -> list[Any]:
    _check_bytes(field)
    try:
        values = plain.unpack(body.bytes_of(field))
    except ValueError as error:
        raise WireError(f"column {field.name!r} cannot be read: {error}") from None
    if type(values) is not list:
        raise WireError(f"column {field.name!r} is no list", found=type(values).__name__)
    return values


def _offsets(body: Body, rest: Iterator[Field], num_values: int, name: str) -> NDArray[Any]:
    field = next(rest, None)
    if field is None or field.name != name or field.kind != FieldKind.DENSE:
        raise WireError(f"column {name!r} comes without its offsets")
    offsets = _array(body, field)
    _check_offsets(offsets, num_values, f"column {name!r}")
    return offsets


def _check_packed(shape: Sequence[int], what: str) -> None:
    """k is not 0: of no bytes any number of tokens can be claimed, which readers would take memory for."""
    if len(shape) not in (1, 2) or shape[1:] in ((0,), [0]):
        raise WireError(f"{what} packs values of no shape", found=list(shape), wanted="[tokens] or [tokens, k], k >= 1")


def _check_offsets(offsets: NDArray[Any], num_values: int, what: str) -> None:
    if (
        type(offsets) is not np.ndarray
        or offsets.ndim != 1
        or not len(offsets)
        or offsets.dtype not in (np.int32, np.int64)
    ):
        raise WireError(f"{what} has offsets of the wrong type", found=repr(offsets)[:80])
    if offsets[0] != 0 or offsets[-1] != num_values or (offsets[1:] < offsets[:-1]).any():
        raise WireError(f"{what} has offsets that do not rise from 0 to its {num_values} values")


def _check_bytes(field: Field) -> None:
    if ITEM_BYTES[field.dtype] != 1 or len(field.shape) != 1:
        raise WireError(f"column {field.name!r} is no blob of bytes", found=field.shape)

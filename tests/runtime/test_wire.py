"""Frames: what is sent comes back equal, or is refused where it is sent; what is no message raises and does nothing
else."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowrl.errors import WireError
from flowrl.rows import Key, Ragged, Rows
from flowrl.runtime import wire
from flowrl.runtime.blocks import decode_rows, encode_rows
from flowrl.runtime.tensors import decode_tensors, encode_tensors
from flowrl.runtime.wire import Flag, Header, Kind

CHECKOUT = Path(__file__).parents[2]
CHARACTERS = st.characters(exclude_categories=["Cs"])
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(CHARACTERS, max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=4), inner, max_size=3),
    max_leaves=8,
)
DTYPES = ["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "u2", "u4", "u8"]


def keys(num_rows: int) -> list[Key]:
    return [Key(3, prompt, -1 if prompt % 2 else 7) for prompt in range(num_rows)]


def columns(num_rows: int) -> st.SearchStrategy[Any]:
    def ragged(lengths: list[int], width: int | None) -> Ragged:
        shape = () if width is None else (width,)
        return Ragged.pack([np.full((length, *shape), length) for length in lengths], "int32")

    return (
        st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, st.just((num_rows,)) | st.just((num_rows, 3))))
        | st.builds(
            ragged,
            st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows),
            st.none() | st.integers(1, 3),
        )
        | st.lists(st.text(CHARACTERS), min_size=num_rows, max_size=num_rows)
        | st.lists(PLAIN, min_size=num_rows, max_size=num_rows)
    )


BLOCKS = st.integers(0, 4).flatmap(
    lambda num_rows: st.dictionaries(st.text(CHARACTERS, max_size=5), columns(num_rows), max_size=4).map(
        lambda table: Rows(keys(num_rows), table)
    )
)


def travel(rows: Rows, meta: dict[str, Any] | None = None) -> tuple[wire.Message, Rows]:
    payload = encode_rows(rows, meta)
    message = wire.decode(payload.first_frame(Kind.DATA, seq=5))
    return message, decode_rows(message, [memoryview(frame) for frame in payload.body])


def assert_same(found: Any, wanted: Any) -> None:
    """Equal in type, bits and shape: NaN equals NaN, -0.0 differs from 0.0, 1 from True."""
    assert type(found) is type(wanted)
    if isinstance(wanted, Ragged):
        assert_same(found.values, wanted.values)
        assert_same(found.offsets, wanted.offsets)
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        assert_same(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, float) and not math.isnan(wanted):
        assert struct.pack("d", found) == struct.pack("d", wanted)
    else:
        assert found == wanted or wanted != wanted


@given(BLOCKS)
@settings(deadline=None, max_examples=150)
def test_rows_come_back_equal_in_value_type_and_shape(rows: Rows) -> None:
    _, found = travel(rows)
    assert found.keys == rows.keys
    assert_same(found.columns, rows.columns)


@given(st.dictionaries(st.text(CHARACTERS, max_size=4), PLAIN, max_size=4))
@settings(deadline=None)
def test_control_messages_come_back_equal(message: dict[str, Any]) -> None:
    frame = wire.encode(Kind.CONTROL, {Header.META.value: message}, edge=2, seq=9, aux=4)
    found = wire.decode(frame)
    assert (found.kind, found.edge, found.seq, found.aux) == (Kind.CONTROL, 2, 9, 4)
    assert_same(wire.meta_of(found), message)


def test_large_columns_travel_without_a_copy_and_small_ones_in_one_frame() -> None:
    large = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    rows = Rows(keys(1000), {"large": large, "small": np.arange(1000), "text": ["é"] * 1000})
    payload = encode_rows(rows)
    assert len(payload.body) == 2
    assert np.shares_memory(np.frombuffer(payload.body[1], np.float32), large)
    message = wire.decode(payload.first_frame(Kind.DATA, seq=1))
    found = decode_rows(message, [memoryview(frame) for frame in payload.body])
    assert_same(found.columns, rows.columns)
    assert np.shares_memory(found["large"], large)


def test_a_body_in_one_frame_reads_as_well_as_one_frame_a_field() -> None:
    rows = Rows(keys(2), {"a": np.arange(40_000).reshape(2, 20_000), "b": np.arange(60_000).reshape(2, 30_000)})
    payload = encode_rows(rows)
    assert len(payload.body) == 3
    whole = b"".join(bytes(frame) + bytes(-len(bytes(frame)) % 64) for frame in payload.body)
    found = decode_rows(wire.decode(payload.first_frame(Kind.DATA, seq=1)), [memoryview(whole)])
    assert_same(found.columns, rows.columns)


def test_redelivery_changes_the_prelude_alone() -> None:
    payload = encode_rows(Rows(keys(1), {"a": ["x"]}))
    first, again = (payload.first_frame(Kind.DATA, seq=4, flags=flags) for flags in (0, Flag.REDELIVERED.value))
    assert first[wire.PRELUDE_BYTES :] == again[wire.PRELUDE_BYTES :]
    assert wire.decode(again).flags == Flag.INLINE | Flag.REDELIVERED


def test_the_users_map_travels_with_the_rows() -> None:
    message, _ = travel(Rows(keys(1), {}), {"firing": 3, "version": [1, 2]})
    assert wire.meta_of(message) == {"firing": 3, "version": [1, 2]}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.float32(0.5), "numpy.float32"),
        (np.int64(3), "numpy.int64"),
        (np.bool_(True), "numpy.bool"),
        (np.float64(0.5), "numpy.float64"),
        (torch.tensor(1.0), "torch.Tensor"),
        ((1, 2), "tuple"),
        ({1, 2}, "set"),
        (2**64, "65 bits"),
        (bytearray(b"x"), "bytearray"),
        ("\ud83d", "lone surrogate"),
        ({1: 0.5}, "the key 1 of type int"),
        ({(1, 2): 3}, r"the key \(1, 2\) of type tuple"),
        (object, "type"),
    ],
    ids=repr,
)
def test_a_value_that_would_not_come_back_equal_is_refused_at_the_sender(value: object, what: str) -> None:
    rows = Rows(keys(2), {"ok": ["a", "b"], "extra": [{"x": [0, 1]}, {"x": [0, value]}]})
    place = r"node 'reward': column 'extra' row \[1\]\['x'\]\[1\]"
    with pytest.raises(WireError, match=rf"(?s){place} cannot travel.*{what}"):
        encode_rows(rows, context="node 'reward'")


@pytest.mark.parametrize("value", [np.float32(0.5), (1, 2), {1}, 2**64, "\ud83d", {(1, 2): 3}], ids=repr)
def test_a_map_that_would_not_come_back_equal_is_refused_with_the_path(value: object) -> None:
    with pytest.raises(WireError, match=r"(?s)node 'reward': the header\['x'\]\[0\] cannot travel"):
        encode_rows(Rows(keys(1), {}), {"x": [value]}, context="node 'reward'")
    with pytest.raises(WireError, match=r"(?s)the CONTROL message\['x'\]\[0\] cannot travel"):
        wire.encode(Kind.CONTROL, {Header.META.value: {"x": [value]}})


@pytest.mark.parametrize("value", [math.nan, -0.0, math.inf, 2**64 - 1, -(2**63), b"", "", None, [], {}], ids=repr)
def test_a_value_at_the_edge_of_its_type_comes_back_equal(value: object) -> None:
    _, found = travel(Rows(keys(1), {"extra": [[value, {"x": value}]]}))
    assert_same(found["extra"], [[value, {"x": value}]])


@pytest.mark.parametrize(
    "column",
    [
        torch.zeros(2),
        (1, 2),
        np.array(["a", "b"]),
        np.array([{}, None], object),
        np.array([1, 2], ">i4"),
        np.array([1, 2], np.complex64),
        np.ma.masked_array([1, 2]),
        Ragged(np.arange(3), np.array([0, 2, 4])),
        Ragged(np.arange(3), np.array([0, 4, 3])),
        Ragged([1, 2], np.array([0, 1, 2])),  # type: ignore[arg-type]
        Ragged(np.zeros((3, 0)), np.array([0, 2, 3])),
        Ragged(np.zeros((3, 2, 2)), np.array([0, 2, 3])),
        ["x", "\udc00"],
    ],
    ids=repr,
)
def test_a_column_of_another_kind_is_refused_by_name(column: object) -> None:
    with pytest.raises(WireError, match="node 'score': column 'extra'"):
        encode_rows(Rows(keys(2), {"extra": column}), context="node 'score'")


@pytest.mark.parametrize(
    "key",
    [Key(2**31, 0), Key(0, 1.5), Key(0, "a"), Key(2**70, 0)],
    ids=repr,  # type: ignore[arg-type]
)
def test_a_key_that_is_no_int32_is_refused(key: Key) -> None:
    with pytest.raises(WireError, match="keys are no"):
        encode_rows(Rows([key], {}))


def test_columns_that_lie_scattered_in_memory_come_back_equal() -> None:
    table = np.arange(12, dtype=np.float64).reshape(4, 3)
    wanted = {"strided": table[:, 1], "fortran": np.asfortranarray(table), "reversed": np.arange(4)[::-1]}
    _, found = travel(Rows(keys(4), dict(wanted)))
    assert_same(found.columns, wanted)


TENSORS = {
    "bf16": torch.randn(300, 200).bfloat16(),
    "scattered": torch.randn(4, 6).t(),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "one number": torch.tensor(3),
    "f8": torch.randn(9).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "trained": torch.nn.Parameter(torch.randn(5)),
}


@pytest.mark.parametrize("names", [list(TENSORS), ["scattered", "empty", "one number"], []], ids=len)
def test_tensors_come_back_equal_in_bits_type_and_shape(names: list[str]) -> None:
    tensors = {name: TENSORS[name] for name in names}
    payload = encode_tensors(tensors, {"version": 3})
    message = wire.decode(payload.first_frame(Kind.DATA, seq=1))
    found = decode_tensors(message, [memoryview(bytearray(frame)) for frame in payload.body])
    assert list(found) == names
    for name, wanted in tensors.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (found[name], wanted)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), 1.0], ids=type)
def test_a_tensor_that_does_not_travel_is_refused_by_name(value: Any) -> None:
    with pytest.raises(WireError, match="sync to 'w0': 'head' is no tensor that travels"):
        encode_tensors({"head": value}, context="sync to 'w0'")


def change(position: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda frame: frame[:position] + value + frame[position + len(value) :]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda frame: frame[:20], "too short"),
        (change(0, b"HTTP"), "does not begin"),
        (change(4, b"\x02"), "another wire version"),
        (change(5, b"\xff"), "unknown kind"),
        (change(6, b"\x03"), "does not speak"),
        (change(6, b"\x80"), "does not speak"),
        (change(12, b"\xff\xff\xff\xff"), "says a header of 4294967295 bytes"),
        (change(32, b"\xdd\xff\xff\xff\xff"), "cannot be read"),
        (change(32, b"\xc1"), "cannot be read"),
    ],
)
def test_a_damaged_frame_is_refused(damage: Callable[[bytes], bytes], what: str) -> None:
    frame = encode_rows(Rows(keys(1), {"a": ["x"]})).first_frame(Kind.DATA, seq=1)
    with pytest.raises(WireError, match=what):
        wire.decode(damage(frame))


FIELD = ["a", 5, 0, [1], 64, 8]


@pytest.mark.parametrize(
    "field",
    [
        ["a", 99, 0, [1], 64, 8],
        ["a", -1, 0, [1], 64, 8],
        ["a", 5, 7, [1], 64, 8],
        ["a", 5, 0, [2], 64, 8],
        ["a", 5, 0, [-1, -1], 64, 8],
        ["a", 5, 0, [2**40, 2**40], 64, 8],
        ["a", 5, 0, [1] * 99, 64, 8],
        ["a", 5, 0, [], 64, 8],
        ["a", 5, 0, [1], -64, 8],
        ["a", 5, 0, [1], 2**60, 8],
        ["a", 5, 0, [1], 1, 8],
        ["a", 5, 0, [1], 4096, 8],
        ["a", 7, 0, [4], 64, 8],
        ["a", 5, 1, [1], 64, 8],
        ["a", 1, 2, [8], 64, 8],
        ["a", 1, 3, [8], 64, 8],
        ["a", 5, 0, "x", 64, 8],
        [b"a", 5, 0, [1], 64, 8],
        ["a", 5, 0],
        "field",
    ],
    ids=repr,
)
def test_a_field_that_does_not_lie_in_its_body_is_refused(field: object) -> None:
    header = {0: 1, 1: [["keys", 4, 0, [1, 3], 0, 12], field], 2: 0}
    packed = wire.pack_header(header, what="test")
    payload = wire.Payload(packed, len(packed), Flag.OOB.value, [bytes(72)])
    message = wire.decode(payload.first_frame(Kind.DATA, seq=1))
    with pytest.raises(WireError):
        decode_rows(message, [memoryview(bytes(72))])


@pytest.mark.parametrize("shape", [[2**40, 0], [2**40, 0, 8], [0, 2**62, 2**62], []], ids=repr)
def test_packed_values_of_no_bytes_cannot_claim_rows_that_readers_take_memory_for(shape: list[int]) -> None:
    body = np.array([1, 2, 3, 0], np.int32).tobytes() + bytes(48) + np.array([0, *shape[:1]], np.int64).tobytes()
    offsets = ["a", 5, 0, [1 + len(shape[:1])], 64, 8 + 8 * len(shape[:1])]
    size = 0 if shape else 4
    header = {0: 1, 1: [["keys", 4, 0, [1, 3], 0, 12], ["a", 4, 1, shape, 64, size], offsets], 2: 0}
    packed = wire.pack_header(header, what="test")
    message = wire.decode(wire.Payload(packed, len(packed), Flag.OOB.value, [body]).first_frame(Kind.DATA, seq=1))
    with pytest.raises(WireError, match="column 'a' packs values of no shape"):
        decode_rows(message, [memoryview(body)])


def decode_all(frame: bytes, body: list[memoryview]) -> None:
    """All that an inbox does to a frame; anything but WireError escapes."""
    try:
        message = wire.decode(frame)
        if Header.KEYS in message.header:
            decode_rows(message, body)
        else:
            decode_tensors(message, body)
    except WireError:
        return


VALID = encode_rows(
    Rows(
        keys(3),
        {
            "t": ["a", "é", ""],
            "r": Ragged.pack([[1], [], [2, 3]], "int32"),
            "k": Ragged.pack([[[1, 2]], [], []], "int8"),
            "j": [{}, [1], None],
        },
    )
).first_frame(Kind.DATA, seq=1)


CHANGES = st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4)


@given(CHANGES, st.integers(0, 64))
@settings(deadline=None, max_examples=400)
def test_no_change_of_bytes_does_more_than_raise(changes: list[tuple[int, int]], cut: int) -> None:
    frame = bytearray(VALID)
    for position, value in changes:
        frame[position] = value
    decode_all(bytes(frame[: len(frame) - cut]), [])


@given(st.binary(max_size=200), st.lists(st.binary(max_size=80), max_size=2))
@settings(deadline=None, max_examples=200)
def test_no_garbage_behind_a_good_prelude_does_more_than_raise(header: bytes, body: list[bytes]) -> None:
    flags = Flag.OOB if body else Flag.INLINE
    frame = wire.Payload(header, len(header), flags.value).first_frame(Kind.DATA, seq=1)
    decode_all(frame, [memoryview(part) for part in body])


@pytest.mark.parametrize("header", [b"\x91" * 1000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1"], ids=len)
def test_hostile_headers_of_a_stranger_cost_about_a_millisecond(header: bytes) -> None:
    frame = wire.Payload(header, len(header), 0).first_frame(Kind.HELLO, seq=0)
    best = math.inf
    for _ in range(5):  # the fastest of several, for other programs run here too
        start = time.perf_counter()
        with pytest.raises(WireError):
            wire.decode(frame, max_header=1024)
        best = min(best, time.perf_counter() - start)
    assert best < 0.002


def test_the_wire_loads_no_torch() -> None:
    code = "import sys, flowrl.runtime.endpoint, flowrl.runtime.control; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=False).returncode == 0

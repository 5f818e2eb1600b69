"""Events and commands over the wire and back."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.backend import EffectiveShare, Max, Sum
from flowrl.rows import Key
from flowrl.runtime.events import Block, Died, Failed, Finished, Fire, Firing, Free, Input, Joined, Produced, Send
from flowrl.runtime.messages import pack_command, pack_event, unpack_event, unpack_firing, unpack_rows

NAMES = st.text(max_size=8)
NUMBERS = st.integers(0, 2**40)
KEYS = st.builds(Key, st.integers(-1, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(-1, 2**31 - 1))
ROWS = st.none() | st.lists(NUMBERS, max_size=5).map(tuple)
MANY_KEYS = st.lists(KEYS, max_size=5).map(tuple)
COLUMNS = st.lists(NAMES, max_size=3).map(tuple)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | NAMES
SETTINGS = st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=3), max_size=3)
BLOCKS = st.builds(Block, st.just("w"), NUMBERS, MANY_KEYS, COLUMNS, NUMBERS, ROWS)
FLOATS = st.floats(allow_nan=False)
METRICS = st.one_of(
    st.builds(Sum, FLOATS, FLOATS | st.integers(0, 9)),
    st.builds(Max, FLOATS),
    st.builds(EffectiveShare, FLOATS, FLOATS, FLOATS),
)
EVENTS = st.one_of(
    st.just(Joined("w")),
    st.builds(Produced, st.just("w"), NUMBERS, NUMBERS, st.none() | BLOCKS, st.dictionaries(KEYS, NAMES, max_size=5)),
    st.builds(Finished, st.just("w"), NUMBERS, NUMBERS, st.dictionaries(NAMES, METRICS, max_size=3), st.floats(0, 1e6)),
    st.builds(Failed, st.just("w"), NUMBERS, NUMBERS, SETTINGS),
)
INPUTS = st.lists(st.builds(Input, NAMES, NAMES, NUMBERS, ROWS, COLUMNS), max_size=3).map(tuple)
FIRINGS = st.builds(
    Firing, NUMBERS, NAMES, st.sampled_from(["rollout", "step"]), st.integers(-1, 2**40), NUMBERS, MANY_KEYS, INPUTS,
    NUMBERS, SETTINGS,
)  # fmt: skip


def sent(message: dict[str, Any]) -> Any:
    """What arrives."""
    return msgpack.unpackb(msgpack.packb(message))


@given(EVENTS)
def test_events_arrive_as_they_were(event: Any) -> None:
    arrived = unpack_event("w", sent(pack_event(event)))
    assert arrived == event
    if isinstance(event, Finished):
        assert isinstance(arrived, Finished)
        assert [type(metric) for metric in arrived.metrics.values()] == [type(m) for m in event.metrics.values()]


@given(FIRINGS)
def test_firings_arrive_as_they_were(firing: Firing) -> None:
    message = sent(pack_command(Fire("w", firing)))
    assert message["do"] == "fire"
    assert unpack_firing(message) == firing


@given(st.builds(Send, st.just("w"), NAMES, NUMBERS, NUMBERS, NUMBERS, ROWS, COLUMNS), st.none() | NAMES)
def test_sends_arrive_as_they_were(send: Send, address: str | None) -> None:
    message = sent(pack_command(send, address))
    assert unpack_rows(message) == send.rows
    del message["rows"]
    assert message == {
        "do": "send", "to": send.to, "at": address, "firing": send.firing, "index": send.index, "number": send.number,
        "columns": list(send.columns),
    }  # fmt: skip


def test_blocks_to_forget_arrive() -> None:
    assert sent(pack_command(Free("w", (1, 2**40)))) == {"do": "free", "numbers": [1, 2**40]}


def test_a_firing_over_256_rows_takes_some_kilobytes() -> None:
    keys = tuple(Key(1000, i // 8, i % 8) for i in range(256))
    block = Block("w", 1, keys, ("scores",), 1024)
    dropped = dict.fromkeys(keys, "a reason that all of them share, told once")
    assert len(msgpack.packb(pack_event(Produced("w", 1, 1, block, {})))) < 256 * 12 + 100
    assert len(msgpack.packb(pack_event(Produced("w", 1, 1, None, dropped)))) < 256 * 12 + 200


def test_what_workers_do_not_say_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="a worker does not send"):
        pack_event(Died("w", "signal 9"))
    with pytest.raises(AssertionError, match="worker 'w' sent an unknown event 'gone'"):
        unpack_event("w", {"is": "gone"})

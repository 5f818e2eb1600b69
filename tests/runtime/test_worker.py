"""A worker: firings, blocks, and errors as they were."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.errors import Location, NodeError, ResultError
from flowrl.rows import Key, Rows
from flowrl.runtime import actions, wire
from flowrl.runtime.events import Failed, Finished, Firing, Produced
from flowrl.runtime.firing import describe_error, fire
from flowrl.runtime.messages import pack_event, unpack_event

from .hands import ROWS, Hands, digest, policy


@fl.reward
def fragile(response: str) -> float:
    raise KeyError("no such thing")


@fl.graph
def small(reward: Any = digest) -> None:
    model = policy()
    samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=2, max_new_tokens=3)
    fl.update(
        model, samples, advantages.grpo(samples, reward(samples)), loss=losses.ppo_clip(clip_low=0.2, clip_high=0.2)
    )


@pytest.fixture
def hands() -> Hands:
    hands = Hands(small())
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    return hands


def test_a_block_is_described_as_it_lies(hands: Hands) -> None:
    [block] = hands.blocks["prompts"]
    rows = hands.rows("prompts")
    assert block.keys == tuple(rows.keys)
    assert block.columns == tuple(rows.columns)
    assert block.num_bytes == rows.num_bytes > 0
    host = hands.workers["host"]
    part = host.block(block.number, (1,), ("prompt",))
    assert (part.keys, part.columns) == ([Key(0, 1)], {"prompt": ["1+1="]})


def test_a_freed_block_is_gone_and_numbers_are_never_used_again(hands: Hands) -> None:
    host = hands.workers["host"]
    [old] = hands.blocks.pop("prompts")
    host.free([old.number, 99])
    assert not host.blocks
    hands.fire("prompts")
    assert hands.blocks["prompts"][0].number > old.number


def test_arguments_follow_the_firings_order_and_repeat_the_prompts_columns(hands: Hands) -> None:
    keys = sorted(hands.rows("rollout").keys, reverse=True)
    hands.fire("digest", keys)
    assert hands.rows("digest").keys == keys
    texts = hands.rows("rollout").select(keys)["response"]
    expected = [sum(text.encode()) + key.prompt for text, key in zip(texts, keys, strict=True)]
    assert hands.rows("digest")["scores"].tolist() == expected


def test_a_users_exception_fails_the_firing_with_its_own_traceback() -> None:
    hands = Hands(small(fragile))
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    hands.try_to_fire("fragile", hands.rows("rollout").keys)
    error = hands.failure()
    assert error["type"] == "NodeError"
    assert error["problem"] == "function 'fragile' of node 'fragile' raised KeyError: 'no such thing'"
    assert "test_worker.py" in error["at"]
    assert 'raise KeyError("no such thing")' in error["traceback"]
    assert "NodeError" not in error["traceback"]
    assert error["found"].startswith("in the call for step 1 prompt")


def test_an_error_of_our_own_keeps_its_parts() -> None:
    told = describe_error(ResultError("wrong", at=Location("a.py", 3), node="x", found=[1], wanted="2", fix="do"))
    assert told["traceback"].endswith("fix:    do")
    assert {k: v for k, v in told.items() if k != "traceback"} == {
        "type": "ResultError",
        "problem": "wrong",
        "at": "a.py:3",
        "found": "[1]",
        "wanted": "2",
        "fix": "do",
        "ours": True,
    }


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute(), "Mute: (its __str__ raised RuntimeError)"),
        (ValueError("half \ud83d an emoji"), r"ValueError: half \ud83d an emoji"),
        (ValueError("x" * 20_000_000), "xxx ... 19980012 characters left out ... xxx"),
    ],
)
def test_whatever_an_exception_says_its_message_can_travel(error: Exception, said: str) -> None:
    told = describe_error(error)
    assert said in told["problem"]
    message = pack_event(Failed("score.0", 1, 1, told))
    assert (
        unpack_event("score.0", wire.meta_of(wire.decode(wire.encode(wire.Kind.CONTROL, {8: message})))).error == told
    )


@fl.reward
def mute(response: str) -> float:
    raise Mute


def test_a_reward_whose_exception_has_no_text_is_named_all_the_same() -> None:
    hands = Hands(small(mute))
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    hands.try_to_fire("mute", hands.rows("rollout").keys)
    problem = "function 'mute' of node 'mute' raised Mute: (its __str__ raised RuntimeError)"
    assert hands.failure()["problem"] == problem


def test_any_other_error_keeps_its_type_and_traceback() -> None:
    try:
        int("x")
    except ValueError as error:
        told = describe_error(error)
    assert told["type"] == "ValueError"
    assert told["problem"].startswith("ValueError: invalid literal")
    assert 'int("x")' in told["traceback"]
    assert told["ours"] is False
    assert describe_error(NodeError("a", traceback="mine"))["traceback"] == "mine"


def test_what_the_driver_does_between_blocks_is_not_the_nodes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(*_: Any) -> Iterator[Any]:
        yield actions.Emitted(Rows([Key(0, 0)], {}))
        yield actions.Emitted(None, {Key(0, 1): "why"})
        yield {}

    monkeypatch.setitem(actions.ACTIONS, "prompts", two)
    events = []
    for event in fire(Hands(small()).workers["host"], Firing(1, "prompts", "prompts", 0, 1, ()), []):
        events.append(event)
        time.sleep(0.05)
    first, second, last = events
    assert isinstance(first, Produced)
    assert isinstance(second, Produced)
    assert first.block is not None
    assert (second.block, second.dropped) == (None, {Key(0, 1): "why"})
    assert isinstance(last, Finished)
    assert last.compute_s < 0.04

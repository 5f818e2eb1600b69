"""Samples as they are written down."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rows import Key
from flowrl.runtime.json_lines import JsonLines, read
from flowrl.runtime.record import Recorder

from .hands import ROWS, Hands, digest, policy


class Memory:
    """Lines in memory."""

    def __init__(self) -> None:
        self.writes: list[list[Mapping[str, Any]]] = []

    def write_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.writes.append(list(records))


@fl.reward
def flat(response: str) -> float:
    return 1.0


@fl.graph
def small(rewards: int = 1) -> None:
    model = policy()
    samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=2, max_new_tokens=3)
    scores = digest(samples)
    if rewards == 2:
        fl.update(model, samples, best(samples, a=scores, b=flat(samples)), loss=PPO)
    else:
        fl.update(model, samples, advantages.grpo(samples, scores), loss=PPO)


PPO = losses.ppo_clip(clip_low=0.2, clip_high=0.2)


@fl.node(out="advantages", per="batch")
def best(a: Any, b: Any) -> Any:
    return a + b


def played(graph: Any, lines: Any) -> tuple[Hands, list[Key]]:
    hands = Hands(graph, lines)
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys, version=3)
    return hands, sorted(hands.rows("rollout").keys)


def test_a_sample_is_written_whole_and_a_step_at_once() -> None:
    lines = Memory()
    hands, keys = played(small(), lines)
    hands.fire("digest", keys)
    hands.fire("record", keys)
    [records] = lines.writes
    rows = hands.rows("rollout").select(keys)
    assert [record["response"] for record in records] == rows["response"]
    assert [record["num_tokens"] for record in records] == rows["response_ids"].lengths.tolist()
    assert [record["reward"] for record in records] == hands.rows("digest")["scores"].tolist()
    first = {
        name: records[3][name] for name in ("step", "prompt_index", "sample_index", "prompt", "version", "dropped")
    }
    assert first == {
        "step": 1, "prompt_index": 1, "sample_index": 1, "prompt": "1+1=", "version": 3, "dropped": None,
    }  # fmt: skip


def test_several_rewards_are_all_written() -> None:
    lines = Memory()
    hands, keys = played(small(rewards=2), lines)
    hands.fire("digest", keys)
    hands.fire("flat", keys[:1])
    hands.fire("record", keys)
    [records] = lines.writes
    assert [record["rewards"]["flat"] for record in records] == [1.0, None, None, None]
    assert all(record["rewards"]["digest"] is not None for record in records)


@pytest.mark.parametrize("when", ["before the rollout", "before the reward"])
def test_a_row_that_was_dropped_early_is_written_with_its_reason(when: str) -> None:
    lines = Memory()
    hands, keys = played(small(), lines)
    lost = Key(0, 1, 5)  # never sampled
    dropped = {"1": "lost"}
    if when == "before the rollout":
        hands.fire("digest", keys)
        hands.fire("record", [keys[0], lost], settings={"dropped": dropped})
    else:
        hands.fire("digest", keys[:1])
        hands.fire("record", keys[:2], settings={"dropped": dropped})
    [[good, bad]] = lines.writes
    assert (good["dropped"], bad["dropped"]) == (None, "lost")
    assert bad["reward"] is None
    if when == "before the rollout":
        assert (bad["response"], bad["version"], bad["stop"], bad["num_tokens"]) == ("", None, None, None)
        assert bad["prompt"] == "1+1="


def test_a_step_in_which_nothing_was_made_is_written_all_the_same() -> None:
    lines = Memory()
    hands = Hands(small(), lines)
    hands.fire("record", [Key(0, 0, 0)], settings={"dropped": {"0": "no prompt"}})
    [[record]] = lines.writes
    assert (record["prompt"], record["dropped"]) == ("", "no prompt")


def test_nothing_is_written_without_a_place_for_it() -> None:
    hands, keys = played(small(), None)
    hands.fire("digest", keys)
    hands.fire("record", keys)
    assert isinstance(hands.workers["host"].recorder, Recorder)


def test_many_lines_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    file, sizes = lines._file, []

    class Slow:
        """A file that takes half of what it is given."""

        def write(self, data: Any) -> int:
            sizes.append(len(data))
            return file.write(data[: max(1, len(data) // 2)])

    lines.write_all({"step": i, "text": "a\nb"} for i in range(256))
    monkeypatch.setattr(lines, "_file", Slow())
    lines.write_all([{"step": 256, "x": float("nan")}])
    assert len(sizes) > 1
    file.close()
    found = list(read(tmp_path / "a.jsonl"))
    assert [record["step"] for record in found] == list(range(257))
    assert found[-1]["x"] is None
    assert json.dumps(found[0]) == '{"step": 0, "text": "a\\nb"}'

"""A sandbox that is lost is no score of 0: its row is absent, also from the baseline of its group."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl import advantages, rewards, sandbox
from flowrl.errors import SandboxError
from flowrl.graph import FunctionSpec
from flowrl.rows import Key
from flowrl.runtime.calls import Called, call_function

ROWS = [{"prompt": "x?", "tests": "assert x == 1"}] * 2
KEYS = [Key(0, 0, sample) for sample in range(4)]
PROGRAMS = ["x = 1", "while True: pass  # LOST", "x = 2", "x = 1"]


@fl.reward(timeout=None, on_error="drop")
def solved(response: str, tests: str) -> float:
    return rewards.runs_code(response, tests)


@fl.graph
def graph() -> None:
    policy = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-3))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=1), n=4, max_new_tokens=4)
    advantages.grpo(samples, solved(samples))
    advantages.grpo(samples, rewards.runs_code(samples), name="strict")


def called(name: str, keys: list[Key], **columns: Any) -> Called:
    node = graph()[name]
    assert isinstance(node.spec, FunctionSpec)
    return call_function(node, node.spec, keys, columns)


@pytest.fixture(autouse=True)
def somebody_kills_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine does that has no memory left."""
    watch = sandbox._Child.watch

    def kill(child: sandbox._Child, wall_s: float) -> sandbox.Limit | None:
        if "LOST" in (child.folder / "program.py").read_text():
            os.kill(child._process.pid, signal.SIGKILL)
        return watch(child, wall_s)

    monkeypatch.setattr(sandbox._Child, "watch", kill)


def test_a_lost_sandbox_drops_its_row_and_the_others_are_a_group_of_three() -> None:
    scores = called("solved", KEYS, response=PROGRAMS, tests=[ROWS[0]["tests"]] * 4)
    assert scores.rows is not None
    assert scores.rows.keys == [KEYS[0], KEYS[2], KEYS[3]]
    assert scores.rows["scores"].tolist() == [1.0, 0.0, 1.0]
    assert scores.dropped == {KEYS[1]: "solved failed: a program could not be run in a sandbox"}
    found = called("grpo", scores.rows.keys, scores=scores.rows["scores"])
    assert found.rows is not None
    np.testing.assert_allclose(found.rows["advantages"], [0.57735, -1.154701, 0.57735], atol=1e-5)


def test_by_itself_it_ends_the_run() -> None:
    with pytest.raises(
        SandboxError, match=r"(?s)a program could not be run in a sandbox.*killed from outside"
    ) as caught:
        called("runs_code", KEYS, response=PROGRAMS, tests=[ROWS[0]["tests"]] * 4)
    assert (caught.value.node, caught.value.at) == ("runs_code", graph()["runs_code"].at)

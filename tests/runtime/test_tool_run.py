"""Whole runs with a tool, in real processes: they agree with one another, resume, and end as declared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

import flowrl as fl
from flowrl import advantages, losses
from flowrl.errors import NodeError
from flowrl.runtime import run
from flowrl.runtime.cli import main

GRAPH = str(Path(__file__).parent / "graph_with_tool.py")
FLOWRL = [sys.executable, "-P", "-c", "import sys; from flowrl.runtime.cli import main; sys.exit(main())"]
pytestmark = pytest.mark.timeout(120)


def local(run_dir: Path, *words: str, steps: int = 3) -> None:
    """Run with one process a rank."""
    command = [*FLOWRL, "run", GRAPH, "--steps", str(steps), "--run-dir", str(run_dir), *words]
    root = str(Path(fl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def inline(run_dir: Path, *words: str, steps: int = 3) -> int:
    """Run in this process."""
    return main(["run", GRAPH, "--launcher", "inline", "--steps", str(steps), "--run-dir", str(run_dir), *words])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run_dir: Path, step: int = 3) -> bytes:
    return (run_dir / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors").read_bytes()


def test_inline_and_local_runs_agree_bit_for_bit(tmp_path: Path) -> None:
    local(tmp_path / "local", "--every", "2")
    assert inline(tmp_path / "inline", "--every", "2") == 0
    there, here = (lines(tmp_path / name / "samples.jsonl") for name in ("local", "inline"))
    assert sorted(map(json.dumps, there)) == sorted(map(json.dumps, here))
    assert weights(tmp_path / "local") == weights(tmp_path / "inline")
    metrics = lines(tmp_path / "inline" / "metrics.jsonl")
    assert all(record["turns"] > 1 and record["tool_calls"] > 16 and record["tool_tokens"] > 0 for record in metrics)
    assert all(abs(record["kl"]) < 1e-6 for record in metrics)  # the ratio on unchanged weights is 1
    assert [sorted(name for name in record if name.startswith("evaluate")) for record in metrics] == [
        ["evaluate/failed/start", "evaluate/start"],
        ["evaluate", "evaluate/failed"],
        ["evaluate", "evaluate/failed"],
    ]


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    local(tmp_path / "two", "--train.dp", "2")
    assert inline(tmp_path / "one") == 0
    two, one = (lines(tmp_path / name / "samples.jsonl") for name in ("two", "one"))
    assert sorted(map(json.dumps, two)) == sorted(map(json.dumps, one))
    many, single = (load(weights(tmp_path / name)) for name in ("two", "one"))
    assert max(float((many[name] - single[name]).abs().max()) for name in single) < 1e-5


@pytest.mark.parametrize("backend", ["tiny", "hf"])
def test_a_resumed_run_continues_as_if_it_had_never_stopped(tmp_path: Path, backend: str) -> None:
    words = ("--backend", backend)
    assert inline(tmp_path / "whole", *words, steps=4) == 0
    assert inline(tmp_path / "parts", *words, steps=2) == 0
    assert inline(tmp_path / "parts", *words, "--resume", steps=4) == 0
    assert weights(tmp_path / "whole", 4) == weights(tmp_path / "parts", 4)
    assert lines(tmp_path / "whole" / "samples.jsonl") == lines(tmp_path / "parts" / "samples.jsonl")


@pytest.mark.parametrize(("trouble", "why"), [("raise", "RuntimeError: the line is dead"), ("hang", "took longer")])
def test_a_failing_tool_drops_its_rows_with_the_reason_and_the_run_adds_up(
    tmp_path: Path, trouble: str, why: str
) -> None:
    assert inline(tmp_path / "run", "--trouble", trouble, steps=3) == 0  # an epoch: number 1 comes once
    samples = lines(tmp_path / "run" / "samples.jsonl")
    lost = [sample for sample in samples if sample["dropped"]]
    assert len(samples) == 3 * 16
    assert [sample["prompt"] for sample in lost] == ["1>"] * 4
    assert all(sample["dropped"].startswith("count failed: ") and why in sample["dropped"] for sample in lost)
    assert all(sample["reward"] is None for sample in lost)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(record["tool_failures"] for record in metrics) == 4
    assert sum(record.get("num_dropped", 0) for record in metrics) == 4


def test_a_tool_that_fails_too_often_ends_the_run(tmp_path: Path) -> None:
    @fl.tool(on_error="drop", max_failure_rate=0.4)
    def broken(response: str, number: int) -> str:
        if number % 2:
            raise RuntimeError("the line is dead")
        return "ok"

    @fl.reward
    def length(response: str) -> float:
        return float(len(response))

    @fl.graph
    def converse() -> None:
        policy = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=0.02))
        prompts = fl.prompts([{"prompt": f"{i}>", "number": i} for i in range(4)], batch=4)
        samples = fl.rollout(policy, prompts, n=2, max_new_tokens=200, tool=broken, max_turns=2, stop=("a", "e", "i"))
        fl.update(policy, samples, advantages.grpo(samples, length(samples)), loss=losses.ppo_clip())

    with pytest.raises(NodeError, match=r"node 'rollout' failed for 4 of 8 rows of step 1") as caught:
        run(converse(), steps=1, run_dir=tmp_path)
    assert "broken failed: RuntimeError: the line is dead" in str(caught.value.found)
    assert caught.value.wanted == "at most 40% (max_failure_rate)"

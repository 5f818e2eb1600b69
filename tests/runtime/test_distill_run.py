"""Whole runs on columns of k numbers a token: over the wire, through a user's function, on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load

import flowrl
from flowrl.runtime.cli import main

GRAPH = str(Path(__file__).parent / "graph_to_distill.py")
FLOWRL = [sys.executable, "-P", "-c", "import sys; from flowrl.runtime.cli import main; sys.exit(main())"]
pytestmark = pytest.mark.timeout(120)


def local(run_dir: Path, *words: str) -> None:
    command = [*FLOWRL, "run", GRAPH, "--steps", "3", "--run-dir", str(run_dir), *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(flowrl.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def inline(run_dir: Path, *words: str) -> None:
    assert main(["run", GRAPH, "--launcher", "inline", "--steps", "3", "--run-dir", str(run_dir), *words]) == 0


def weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / "step-000003" / "policy" / "model.safetensors").read_bytes()


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_inline_and_local_runs_agree_bit_for_bit(tmp_path: Path) -> None:
    local(tmp_path / "local", "--by-student")
    inline(tmp_path / "inline", "--by-student")
    assert weights(tmp_path / "local") == weights(tmp_path / "inline")
    assert losses(tmp_path / "local") == losses(tmp_path / "inline")


def test_two_ranks_agree_with_one_to_rounding(tmp_path: Path) -> None:
    local(tmp_path / "two", "--train.dp", "2", "--max-tokens", "10")
    inline(tmp_path / "one")
    two, one = (load(weights(tmp_path / name)) for name in ("two", "one"))
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-5
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert len(set(losses(tmp_path / "one"))) == 3

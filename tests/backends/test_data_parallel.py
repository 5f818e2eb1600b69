"""Two ranks over gloo train as one does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flowrl as fl
from flowrl.rows import Rows

WORKER = Path(__file__).parent / "dp_worker.py"
ROOT = WORKER.parents[2]


def worker_module() -> Any:
    spec = importlib.util.spec_from_file_location("dp_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(100)
def test_two_ranks_train_as_one(
    make_backend: Callable[..., Any], sampled: Callable[..., Rows], folders: dict[str, Path], tmp_path: Path
) -> None:
    rows = sampled(make_backend(lr=None), ["12>", "a", "987654>"])
    columns = {
        name: [one.tolist() for one in rows[name]] for name in ("prompt_ids", "response_ids", "mask", "old_logprobs")
    }
    (tmp_path / "rows.json").write_text(json.dumps({**columns, "advantages": rows["advantages"].tolist()}))
    arguments = [str(tmp_path / "meet"), str(folders["llama"]), str(tmp_path / "rows.json"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-P", str(WORKER), str(rank), "2", *arguments], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=80) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    module = worker_module()
    alone = make_backend(optimizer=fl.AdamW(lr=1e-2, eps=1e-4, warmup_steps=3))
    history = module.train(alone, module.read_rows(tmp_path / "rows.json"), None)
    records = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [record["gradient"] for record in records] == [3.0, 3.0]  # not 4.6667, the mean of the ranks' means
    for record in records:
        for one, two in zip(history, record["history"], strict=True):
            assert two == pytest.approx(one, rel=1e-4)
    assert [step["skipped"] for step in history] == [0, 0, 1, 0, 0, 0, 0]
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    for name, tensor in alone.export_weights():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-5)
    alone.load(tmp_path / "checkpoint")
    assert all(torch.equal(first[name], tensor) for name, tensor in alone.export_weights())

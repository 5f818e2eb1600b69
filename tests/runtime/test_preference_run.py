"""Whole runs of losses that compare the samples of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import flowrl as fl
from flowrl import losses, preferences
from flowrl.runtime import run

pytestmark = pytest.mark.timeout(60)


@fl.reward
def odd(response_ids: np.ndarray[Any, Any]) -> float:
    return float((response_ids % 2).mean())


@fl.graph
def online_dpo(
    backend: str = "tiny",
    n: int = 2,
    beta: float = 0.1,
    lr: float = 0.02,
    max_tokens: int | None = None,
    minibatches: int = 1,
    lengths: bool = False,
) -> None:
    """Answer with odd ids."""
    source = "tiny" if backend == "tiny" else "builtin:reverse_digits"
    policy = fl.Model(source, backend=backend, optimizer=fl.AdamW(lr=lr, eps=1e-4))
    rows = [{"prompt": f"{i}>"} for i in range(12)]
    samples = fl.rollout(policy, fl.prompts(rows, batch=12), n=n, max_new_tokens=4)
    preference = preferences.best_and_worst(samples, odd(samples))
    if lengths:  # some rows of a prompt are gone when the update comes
        samples = fl.filter(samples, keep=lambda response_ids: response_ids[0] % 5 > 0, reason="for the test")
    reference = fl.logprobs(policy.frozen(), samples)
    loss = losses.dpo(beta=beta)
    fl.update(policy, samples, preference, reference, loss=loss, max_tokens=max_tokens, minibatches=minibatches)


def records(folder: Path, graph: fl.Graph, steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    assert run(graph, steps=steps, run_dir=folder, save_every=steps).outcome == "done"
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors")


def test_a_policy_prefers_ever_more_what_scored_better(tmp_path: Path) -> None:
    found = records(tmp_path, online_dpo(n=8, lr=0.3), 20)
    assert found[0]["margin"] == pytest.approx(0, abs=1e-6)  # the policy is its reference yet
    assert found[0]["accuracy"] == pytest.approx(0.5)
    late = found[-5:]
    assert sum(step["margin"] for step in late) / 5 > 0.1
    assert sum(step["accuracy"] for step in late) / 5 > 0.7
    assert sum(step["reward"] for step in late) / 5 > found[0]["reward"] + 0.15
    for step in found:
        assert step["margin"] == pytest.approx(step["rewards/chosen"] - step["rewards/rejected"], abs=1e-5)
        assert step["rows"] <= 24
        assert step["left_out"] == pytest.approx(1 - step["rows"] / 96)


@pytest.mark.parametrize("backend", ["tiny", "hf"])
def test_passes_and_micro_batches_change_no_update_on_pairs(tmp_path: Path, backend: str) -> None:
    runs = {}
    for max_tokens in (None, 60, 1):
        graph = online_dpo(backend=backend, n=4, max_tokens=max_tokens, minibatches=2, lengths=True, lr=1e-3)
        found = records(tmp_path / str(max_tokens), graph, 3)
        runs[max_tokens] = found, weights(tmp_path / str(max_tokens), 3)
    whole, final = runs.pop(None)
    assert all(0 < step["rows"] < 12 * 2 for step in whole), "some pairs lose a row"
    for found, other in runs.values():
        for step, wanted in zip(found, whole, strict=True):
            for name in ("loss", "margin", "accuracy", "rewards/chosen", "rows", "left_out", "grad_norm"):
                assert step[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, final[name], rtol=0, atol=1e-5)

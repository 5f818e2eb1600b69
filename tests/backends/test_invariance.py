"""Neither micro-batches, token budgets, padding nor ranks change a loss or its gradient: every loss, every aggregation,
through the code that trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl.backends.torch_backend import TorchBackend
from flowrl.loss import Loss
from flowrl.rows import Rows

from .loss_cases import backend_for, declared, over_processes, padded, parts, rows_for

DECLARED = declared()
ALL = list(range(16))
Calls = list[tuple[list[int], int | None]]
"""Rows of each call of `backward`, and its token budget."""
WAYS: dict[str, tuple[Calls, int, tuple[int, int]]] = {
    "2 micro-batches, padded at the left": ([(part, None) for part in parts(2)], 1, (3, 0)),
    "4 micro-batches, padded at the right": ([(part, None) for part in parts(4)], 1, (0, 5)),
    "8 micro-batches on two ranks": ([(part, None) for part in parts(8)], 2, (0, 0)),
    "30 tokens a pass": ([(ALL, 30)], 1, (0, 0)),
    "two ranks, 40 tokens a pass, padded at both sides": ([(part, 40) for part in parts(2)], 2, (2, 1)),
    "two ranks, of which one has no rows": ([(ALL, None), ([], None)], 2, (0, 0)),
}
"""Calls, ranks that take them in turn, and padding."""
Found = dict[str, Tensor]


def train(ranks: Sequence[TorchBackend], rows: Rows, calls: Calls, loss: Loss) -> Found:
    """Loss and gradients over a mini-batch, summed over the ranks."""
    sums = {"tokens": 0.0, "rows": 0.0, "loss": 0.0}
    for number, (part, budget) in enumerate(calls):
        metrics = ranks[number % len(ranks)].backward(rows.take(part), loss, 1.0, budget)
        sums = {name: total + metrics[name].total for name, total in sums.items()}
    denominator = loss.denominator(sums["tokens"], sums["rows"])
    found = {"loss": torch.tensor(sums["loss"] / denominator, dtype=torch.float64)}
    for backend in ranks:
        for name, parameter in backend.network.module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = found.get(name, 0) + gradient.double() / denominator
        assert backend.optimizer is not None
        backend.optimizer.forget()
    return found


def expect_same(ranks: Sequence[TorchBackend], rows: Rows, loss: Loss, tolerance: float) -> None:
    """Every way of training on the rows gives what all of them at once give."""
    whole = train(ranks[:1], rows, [(ALL, None)], loss)
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
    assert any(bool(tensor.ne(0).any()) for name, tensor in whole.items() if name != "loss")
    for what, (calls, num_ranks, width) in WAYS.items():
        found = train(ranks[:num_ranks], rows, calls, padded(loss, *width))
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            size = max(1.0, float(tensor.abs().max()))
            apart = float((found[name] - tensor).abs().max())
            assert apart <= tolerance * size, f"{what}: {name} differs by {apart:.3g} of {size:.3g}"


@cache
def backends(reads: tuple[str, ...], dtype: torch.dtype) -> list[TorchBackend]:
    """Two ranks of one model, for losses that read these columns."""
    loss = next(loss for loss in DECLARED.values() if loss.reads == reads)
    return [backend_for(loss, dtype) for _ in range(2)]


@pytest.mark.parametrize("name", DECLARED)
def test_a_loss_and_its_gradient_do_not_depend_on_how_rows_are_cut_padded_and_spread(name: str) -> None:
    loss = DECLARED[name]
    expect_same(backends(loss.reads, torch.float64), rows_for(loss), loss, 1e-12)


@pytest.mark.parametrize(
    "name", [name for name in DECLARED if name.split()[-1] in ("token-mean", "seq-mean", "tokens")]
)
def test_nor_do_they_in_single_precision_but_for_rounding(name: str) -> None:
    loss = DECLARED[name]
    expect_same(backends(loss.reads, torch.float32), rows_for(loss), loss, 1e-6)


@pytest.mark.parametrize(("network", "name"), [("llama", "gspo seq-mean-token-mean"), ("gpt2", "a sum")])
def test_nor_do_they_through_a_network_that_attends(make_backend: Callable[..., Any], network: str, name: str) -> None:
    loss = DECLARED[name]
    rows = rows_for(loss)
    for column in ("prompt_ids", "response_ids"):
        rows[column].values[:] %= make_backend(network).network.vocab_size
    expect_same([make_backend(network, double=True) for _ in range(2)], rows, loss, 1e-12)


@pytest.mark.timeout(100)
def test_two_processes_take_the_step_of_one(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "invariance_worker.py"
    environment = {
        **os.environ,
        "PYTHONPATH": str(worker.parents[2]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-P", str(worker)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet"), str(tmp_path / str(rank))], env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=80) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    one, two = (load_file(tmp_path / str(rank)) for rank in range(2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
    for name, loss in over_processes().items():
        alone = backend_for(loss, torch.float64)
        metrics = alone.backward(rows_for(loss), loss, 1.0, None)
        denominator = loss.denominator(metrics["tokens"].total, metrics["rows"].total)
        alone.step(denominator, None)
        assert float(one[f"{name}/loss"]) == pytest.approx(metrics["loss"].total / denominator, rel=1e-12)
        for weight, tensor in alone.export_weights():
            torch.testing.assert_close(one[f"{name}/{weight}"], tensor, rtol=0, atol=1e-12)

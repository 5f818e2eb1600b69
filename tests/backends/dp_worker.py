"""One rank of a data-parallel mesh: ``python dp_worker.py RANK WORLD RENDEZVOUS MODEL ROWS OUT``."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist

import flowrl as fl
from flowrl import losses
from flowrl.backends.hf import HFBackend
from flowrl.backends.optimizer import Optimizer
from flowrl.loss import Loss, loss
from flowrl.rows import Key, Ragged, Rows


@loss
def clipped(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


SHARES = [[[0, 1, 2, 3, 4], [5]], [[0, 1, 2, 3, 4, 5], []], [[], []], [[0], [1, 2, 3, 4, 5]]]
"""Rows of each rank in each step: unequal, none for one, none at all, and the other way round."""
PAIRS = [[[0, 1, 2, 3], [4, 5]], [[0, 1], [2, 3, 4, 5]], [[0, 1, 4], [2, 3]]]
"""The same of a loss on pairs, which are whole; in the last step a row of one rank is without a partner."""


def read_rows(path: Path) -> Rows:
    columns = json.loads(path.read_text())
    kinds = {"prompt_ids": "int32", "response_ids": "int32", "mask": "bool", "old_logprobs": "float32"}
    made = {name: Ragged.pack(columns[name], dtype) for name, dtype in kinds.items()}
    made["advantages"] = np.array(columns["advantages"], np.float32)
    made["ref_logprobs"] = made["old_logprobs"]
    made["preference"] = np.tile(np.array([1.0, -1.0], np.float32), 3)
    return Rows([Key(0, i // 2, i % 2) for i in range(len(columns["advantages"]))], made)


def train(backend: HFBackend, rows: Rows, rank: int | None) -> list[dict[str, float]]:
    """Seven steps on this rank's shares (all shares when it is alone)."""
    history = []
    for shares in [*SHARES, *PAIRS]:
        settings: Loss = losses.dpo() if shares in PAIRS else clipped(aggregate="token-mean")
        mine = shares[rank] if rank is not None else [row for share in shares for row in share]
        metrics = backend.backward(rows.take(mine), settings, 1.0, max_tokens=40)
        counted = torch.tensor([metrics["tokens"].total, metrics["rows"].total])
        if rank is not None:
            dist.all_reduce(counted)
        stepped = backend.step(settings.denominator(*counted.tolist()), 0.5)
        history.append({name: value.total for name, value in stepped.items()})
    return history


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, folder, rows, out = map(Path, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=40)
    )
    ranks = SimpleNamespace(rank=rank, world_size=world, dp_rank=rank, dp_size=world)
    theta = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer({"theta": theta}, fl.AdamW(lr=0.1), ranks)
    (theta * torch.tensor([[8.0], [0.0, 0.0, 4.0]][rank])).sum().backward()
    gradient = optimizer.step(4.0, None)["grad_norm"].total
    backend = HFBackend(fl.Model(str(folder), optimizer=fl.AdamW(lr=1e-2, eps=1e-4, warmup_steps=3)), ranks, "cpu")
    history = train(backend, read_rows(rows), rank)
    backend.save(out / "checkpoint")
    save_file({name: tensor.clone() for name, tensor in backend.export_weights()}, out / f"{rank}.safetensors")
    (out / f"{rank}.json").write_text(json.dumps({"gradient": gradient, "history": history}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of two: ``python invariance_worker.py RANK RENDEZVOUS OUT`` trains a step on losses of loss_cases.py."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import distributed as dist

from tests.backends.loss_cases import backend_for, over_processes, parts, rows_for


def main() -> None:
    rank, rendezvous, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    ranks = SimpleNamespace(rank=rank, world_size=2, dp_rank=rank, dp_size=2)
    found = {}
    for name, loss in over_processes().items():
        backend = backend_for(loss, torch.float64, ranks)
        mine = list(parts(2))[rank]
        metrics = backend.backward(rows_for(loss).take(mine), loss, 1.0, 40)
        sums = torch.tensor([metrics[what].total for what in ("tokens", "rows", "loss")], dtype=torch.float64)
        dist.all_reduce(sums)
        tokens, rows, total = sums.tolist()
        denominator = loss.denominator(tokens, rows)
        backend.step(denominator, None)
        found[f"{name}/loss"] = torch.tensor(total / denominator, dtype=torch.float64)
        found |= {f"{name}/{weight}": tensor.clone() for weight, tensor in backend.export_weights()}
    save_file(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Where a process stands: its place in a mesh, and the device that it computes on."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from flowrl.errors import MeshError

from .plan import Plan, Pool

log = logging.getLogger("flowrl.ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process's place in its mesh; implements `flowrl.backend.Ranks`."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


def place(pool: Pool, index: int) -> Rank:
    """The place of the `index`-th worker of a pool.

    Ranks of one tensor and context group are neighbours, then come dp and pp: Megatron's own order.
    """
    mesh = pool.mesh
    if mesh is None or pool.kind != "model":
        return Rank(rank=index, world_size=pool.size, dp_rank=index, dp_size=pool.size)
    return Rank(rank=index, world_size=pool.size, dp_rank=index // (mesh.tp * mesh.cp) % mesh.dp, dp_size=mesh.dp)


def devices(plan: Plan, num_gpus: int) -> dict[str, str]:
    """The device of each model worker: one CUDA device each, or the CPU.

    Meshes with ``device="auto"`` take CUDA devices when there are enough for all of them, else all compute on the CPU.

    Raises:
        MeshError: meshes with ``device="cuda"`` need more devices than the machine has.
    """
    pools = [pool for pool in plan.pools.values() if pool.kind == "model" and pool.mesh is not None]
    wanting = [pool for pool in pools if pool.mesh and pool.mesh.device != "cpu"]
    needed = sum(pool.size for pool in wanting)
    forced = [pool for pool in wanting if pool.mesh and pool.mesh.device == "cuda"]
    if sum(pool.size for pool in forced) > num_gpus:
        raise MeshError(
            f"meshes {', '.join(repr(pool.name) for pool in forced)} need {sum(p.size for p in forced)} CUDA devices",
            found=f"{num_gpus} visible ({_visible()})",
            wanted="one device a rank",
            fix="fewer ranks, one mesh for both, or device='cpu'",
        )
    on_gpu = wanting if needed <= num_gpus else forced
    if num_gpus and on_gpu != wanting:
        names = ", ".join(repr(pool.name) for pool in wanting if pool not in on_gpu)
        log.warning("meshes %s compute on the CPU: all need %d devices, %d are visible", names, needed, num_gpus)
    given = iter(range(num_gpus))
    return {worker: f"cuda:{next(given)}" if pool in on_gpu else "cpu" for pool in pools for worker in pool.workers}


def num_threads(plan: Plan) -> int:
    """Torch threads of each worker on the CPU, so that all of them together do not exceed the cores they may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // len(plan.workers()))


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is unset" if value is None else f"CUDA_VISIBLE_DEVICES={value!r}"

"""A mesh: a named box of ranks that nodes and models are placed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import MeshError

AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """A box of ranks with named axes, or a pool of CPU workers (`Mesh.cpu`).

    Nodes on one mesh share its processes in turn; nodes on different meshes overlap. A mesh is itself: two meshes of
    the same shape are two sets of processes, and one mesh given to two models holds both.
    """

    dp: int = 1
    """Data-parallel ranks: replicas of a model, each with its share of the rows."""
    tp: int = 1
    """Tensor-parallel ranks of one replica."""
    pp: int = 1
    """Pipeline-parallel stages of one replica."""
    cp: int = 1
    """Context-parallel ranks of one replica."""
    ep: int = 1
    """Expert-parallel ranks."""
    sequence_parallel: bool = False
    """Split the sequence between tensor-parallel ranks outside attention."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where its ranks compute; ``auto`` takes CUDA devices when the machine has enough of them."""
    workers: int = 0
    """CPU worker processes for function nodes; 0 makes this a mesh of model ranks."""
    name: str = ""
    """Empty: the name of the graph parameter that holds it."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "workers"):
            size = getattr(self, axis)
            least = 0 if axis == "workers" else 1
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise MeshError(
                    f"mesh axis '{axis}' is not a count",
                    found=f"{axis}={size!r}",
                    wanted=f"an integer >= {least}",
                    fix=f"{axis}={least} or more",
                )
        if self.workers and any(getattr(self, axis) != 1 for axis in AXES):
            raise MeshError(
                "a mesh is either CPU workers or model ranks",
                found=f"workers={self.workers}, " + ", ".join(f"{axis}={getattr(self, axis)}" for axis in AXES),
                wanted="workers alone, or axes alone",
                fix="use Mesh.cpu(workers) for function nodes and Mesh(dp=, tp=, ...) for models",
            )
        if self.device not in ("auto", "cpu", "cuda"):
            fix = "device='cuda'" if "cuda" in str(self.device) or "gpu" in str(self.device) else "device='cpu'"
            wanted = "'auto', 'cpu' or 'cuda'"
            raise MeshError("mesh has an unknown device", found=repr(self.device), wanted=wanted, fix=fix)

    @classmethod
    def cpu(cls, workers: int = 1) -> Mesh:
        """A pool of CPU worker processes for rewards and other functions."""
        if workers < 1:
            raise MeshError("a CPU mesh needs a worker", found=workers, wanted="an integer >= 1", fix="Mesh.cpu(1)")
        return cls(workers=workers)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.workers or self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        if self.workers:
            return f"cpu({self.workers})"
        axes = ", ".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
        return f"mesh({axes or 'dp=1'})"

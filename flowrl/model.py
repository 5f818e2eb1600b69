"""A model is a role: weights, a backend, a mesh, an optimizer and a head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from .errors import GraphError, Location, WrongType
from .location import caller
from .mesh import Mesh

Head = Literal["lm", "value", "score"]
"""What a model computes: the next token, a value a token, or a score a response."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Of weights and activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    lr: float
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices; vectors (norms, biases) never decay."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from ``lr / warmup_steps`` to ``lr``."""
    decay_steps: int | None = None
    """Optimizer steps after which the rate, falling linearly from the first, is 0; None keeps it."""

    def __post_init__(self) -> None:
        if not isinstance(self.lr, (int, float)) or isinstance(self.lr, bool) or not self.lr >= 0:
            raise WrongType("AdamW's lr is not a rate", found=repr(self.lr), wanted="a float >= 0")
        if self.warmup_steps < 0:
            raise WrongType("AdamW's warmup_steps is negative", found=self.warmup_steps, wanted="an integer >= 0")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise WrongType("AdamW's decay_steps is no count", found=self.decay_steps, wanted="an integer >= 1")

    def lr_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0 over the whole run."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        decay = max(0.0, 1.0 - step / self.decay_steps) if self.decay_steps else 1.0
        return self.lr * warmup * decay


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Weights in a role.

    Args (by name after the first):
        source: a Hugging Face model directory or hub id, or ``builtin:NAME`` for weights that flowrl ships.
        mesh: where it lives and trains; a mesh of one rank when left out.
        optimizer: what trains it; a model without one is frozen.
        backend: which implementation runs it; ``flowrl doctor`` lists those installed.
        head: what it computes: next tokens, a value a token, or a score a response.
        dtype: of weights and activations in compute; optimizer state stays in float32.
        name: how errors, metrics and pictures call it.

    ``at`` is the line that makes it.
    """

    source: str
    mesh: Mesh = field(default_factory=Mesh, kw_only=True)
    optimizer: AdamW | None = field(default=None, kw_only=True)
    backend: str = field(default="hf", kw_only=True)
    head: Head = field(default="lm", kw_only=True)
    dtype: Dtype = field(default="float32", kw_only=True)
    name: str = field(default="", kw_only=True)
    at: Location | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", caller())
        if not isinstance(self.source, str) or not self.source:
            raise WrongType("a model's source is not a path or id", found=repr(self.source), wanted="a non-empty str")
        if not isinstance(self.mesh, Mesh):
            raise WrongType(f"model '{self.source}' is placed on no mesh", found=repr(self.mesh), wanted="fl.Mesh(...)")
        if self.mesh.workers:
            raise WrongType(
                f"model '{self.source}' is placed on CPU workers",
                found=str(self.mesh),
                wanted="a mesh of model ranks",
                fix="fl.Mesh(dp=N, device='cpu') runs a model on the CPU; Mesh.cpu(N) is for functions",
            )
        if not self.name:
            object.__setattr__(self, "name", "policy" if self.optimizer else "model")

    def frozen(self, *, name: str = "reference", mesh: Mesh | None = None) -> Model:
        """The same initial weights without an optimizer: a reference policy."""
        if self.optimizer is None:
            raise GraphError(f"model '{self.name}' is frozen already", fix="use it as it is, or make a second fl.Model")
        return dataclasses.replace(self, name=name, optimizer=None, mesh=mesh or self.mesh)

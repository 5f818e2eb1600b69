"""AdamW over float32 masters, one division by the denominator, and the sum over data-parallel ranks.

Weights of 16 bits compute in 16 bits; their gradients are added up, and their updates applied, in float32 copies. At
the learning rates of reinforcement learning an update is smaller than the last bit of a bfloat16 weight, and would be
lost. Weights of 32 bits are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from flowrl.backend import Metrics, Ranks, Sum
from flowrl.errors import CheckpointError, NodeError
from flowrl.model import AdamW

BUCKET_NUMBERS = 1 << 24
"""Of one all-reduce: 64 MiB of float32, enough to hide its latency and little beside a model."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """The optimizer of one rank; every rank of a mesh holds the whole of it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamW, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.num_steps = 0
        """Optimizer steps taken over the whole run: the place in the learning rate's schedule."""
        self._parameters = dict(parameters)
        self._masters = {name: _master(parameter) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            if self._masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _added_to(self._masters[name])
                )
        matrices = [master for master in self._masters.values() if master.dim() >= 2]
        vectors = [master for master in self._masters.values() if master.dim() < 2]
        groups = [(matrices, settings.weight_decay), (vectors, 0.0)]
        self._adamw = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for params, decay in groups if params],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def forget(self) -> None:
        """Drop the gradients."""
        for master in self._masters.values():
            master.grad = None

    @torch.no_grad()
    def step(self, denominator: float, clip_grad: float | None) -> Metrics:
        """See `flowrl.backend.Backend.step`.

        Raises:
            NodeError: the norm of the gradients is not finite; nothing is changed.
        """
        gradients = [_gradient(master) for master in self._masters.values()]
        self._sum_over_ranks(gradients)
        lr = self.settings.lr_at(self.num_steps)
        if denominator == 0:
            self.forget()
            return {"grad_norm": Sum(0.0, 0.0), "lr": Sum(lr, 1.0), "skipped": Sum(1.0, 1.0)}
        torch._foreach_div_(gradients, float(denominator))
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if not math.isfinite(norm):
            self.forget()
            raise NodeError(
                "the norm of the gradients is not finite",
                found=f"{norm} after {self.num_steps} optimizer steps, denominator {denominator:g}",
                wanted="a finite norm",
                fix="lower the learning rate, clip the ratio, or compute in bfloat16 rather than float16",
            )
        if clip_grad is not None and norm > clip_grad:
            torch._foreach_mul_(gradients, clip_grad / norm)
        self._update(lr)
        return {"grad_norm": Sum(norm, 1.0), "lr": Sum(lr, 1.0), "skipped": Sum(0.0, 1.0)}

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name; `num_steps` aside."""
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                state[f"master.{name}"] = master.detach()
            for moment, tensor in self._adamw.state.get(master, {}).items():
                state[f"{moment}.{name}"] = tensor
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Read what `state` gave.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape; nothing is changed.
        """
        moments = (*_MOMENTS, "step") if num_steps else ()
        shapes = {
            f"{kind}.{name}": () if kind == "step" else tuple(master.shape)
            for name, master in self._masters.items()
            for kind in (*moments, *(("master",) if master is not self._parameters[name] else ()))
        }
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != found:
            wrong = sorted(set(shapes.items()) ^ set(found.items()))
            raise CheckpointError(
                "the saved optimizer state is of another model",
                found=", ".join(f"{name} {list(shape)}" for name, shape in wrong[:8]),
                wanted=f"{len(shapes)} tensors",
            )
        self.forget()
        self._adamw.state.clear()
        for name, master in self._masters.items():
            if f"master.{name}" in state:
                master.copy_(state[f"master.{name}"])
            if moments:
                self._adamw.state[master] = {
                    kind: state[f"{kind}.{name}"].to(master.device, copy=True) for kind in moments
                }
        self.num_steps = num_steps

    @torch.no_grad()
    def read_weights(self) -> None:
        """Take the weights as they are now for the masters, after they were replaced."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(self._parameters[name])

    def _update(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.num_steps += 1
        self.forget()
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)

    def _sum_over_ranks(self, gradients: list[Tensor]) -> None:
        """Every rank joins, whatever it trained: one that had no rows adds zeros."""
        if self.ranks.world_size == 1:
            return
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            start = 0
            for gradient in bucket:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float()


def _added_to(master: Tensor) -> Callable[[Tensor], None]:
    """Move a gradient of 16 bits into the master's, as soon as it is whole."""

    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def _gradient(master: Tensor) -> Tensor:
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(one.numel() for one in bucket) + gradient.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket

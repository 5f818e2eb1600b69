"""The complete state of a module by canonical name, out and in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrl.errors import BackendError, did_you_mean


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by name, without a gradient; a tied pair once, under its first name."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


@torch.no_grad()
def replace_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` over the complete state of `module`.

    Raises:
        BackendError: a name is missing or left over, or a shape or dtype differs; nothing is changed then.
    """
    state = named_state(module)
    check_names(state, tensors, what="the model's state")
    for name, tensor in state.items():
        tensor.copy_(tensors[name])


def check_names(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], *, what: str) -> None:
    """Match names, shapes and dtypes both ways.

    Raises:
        BackendError: lists every name that is missing, left over or different.
    """
    faults = [f"'{name}' is missing" for name in wanted if name not in given]
    left_over = [name for name in given if name not in wanted]
    faults += [f"'{name}' is left over" for name in left_over]
    faults += [
        f"'{name}' is {_kind(given[name])}, not {_kind(tensor)}"
        for name, tensor in wanted.items()
        if name in given and _kind(given[name]) != _kind(tensor)
    ]
    if faults:
        raise BackendError(
            f"the given tensors are not {what}; nothing was changed",
            found="; ".join(faults),
            wanted=f"{len(wanted)} tensors, each by its name, shape and dtype",
            fix=did_you_mean(left_over[0], [name for name in wanted if name not in given]) if left_over else None,
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""One name for a complete set of weights: what both sides of a weight sync compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")


def weights_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; the order of the tensors does not matter.

    Args:
        tensors: name and tensor, of any dtype (bfloat16 included), on any device, contiguous or not.

    Returns:
        64 hexadecimal digits.
    """
    lines = sorted(f"{name} {_tensor_digest(tensor)}" for name, tensor in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""What policy losses share: the ratio to the sampler's policy, its metrics and its clip range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.kl import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")

Metrics = dict[str, "Tensor"]
"""By name, [rows, tokens] without a gradient; averaged over trained tokens."""


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[rows, tokens] probability ratio, 1 on the sampler's own policy."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[rows] means of x [rows, tokens] over each row's trained tokens; 0 without any."""
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def ratio_metrics(ratio: Tensor, clipped: Tensor) -> Metrics:
    """Share of tokens whose gradient was cut off, and the ratio [rows, tokens]."""
    return {"clip_fraction": clipped.to(ratio.dtype), "ratio": ratio.detach()}


def check_clip(low: float, high: float) -> None:
    """Raise ValueError for a negative clip range."""
    if low < 0 or high < 0:
        raise ValueError(f"a clip range is not negative; found clip_low={low}, clip_high={high}")

"""What policy losses share: the ratio to the sampler's policy, its metrics and its clip range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import WrongType
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


def check_clip(*, clip_low: float = 0.2, clip_high: float = 0.2, **settings: object) -> None:
    """Refuse a clip range that is none, as a loss's ``check``."""
    expect_not_negative(clip_low=clip_low, clip_high=clip_high)


def expect_not_negative(**ranges: float) -> None:
    """Refuse ranges below 0.

    Raises:
        WrongType: one is no number >= 0.
    """
    for name, value in ranges.items():
        if not isinstance(value, (int, float)) or not value >= 0:
            what, fix = "a range of a loss is negative", f"leave {name}= out for its default"
            raise WrongType(what, found=f"{name}={value}", wanted=f"{name} >= 0", fix=fix)

"""Losses of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.loss import loss

from .ratios import Metrics, expect_not_negative

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


@loss(check=expect_not_negative)
def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2) -> tuple[Tensor, Metrics]:
    """Half the squared error of a value, of the worse of it and itself kept within `clip` of what it was.

    The value loss of PPO's published code (Huang et al. 2022, "The 37 implementation details of PPO", detail 9).

    Args:
        values: [rows, tokens] float, of the model that is trained.
        old_values: [rows, tokens] float, of the same model before the update.
        returns: [rows, tokens] float, what a value predicts.
        clip: how far a value may move, >= 0.

    Returns:
        [rows, tokens] losses; ``value_clip_fraction`` (tokens whose gradient the clip removed) and ``value``.

    Raises:
        WrongType: `clip` is negative.
    """
    plain = (values - returns).square()
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    moved = (values - old_values).abs() > clip
    inactive = moved & (clipped > plain)
    metrics = {"value_clip_fraction": inactive.to(values.dtype), "value": values.detach()}
    return 0.5 * torch.maximum(plain, clipped), metrics

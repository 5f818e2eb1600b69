"""A policy loss under a constraint: as much reward as a bound on the mean cost allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.coefficients import Lagrange
from flowrl.errors import WrongType
from flowrl.loss import loss

from .ratios import check_clip, ratio_metrics, ratio_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


@loss(check=check_clip)
def ppo_lagrangian(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cost_advantages: Tensor,
    costs: Tensor,
    mask: Tensor,
    *,
    multiplier: float | Lagrange,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor | tuple[Tensor, Tensor]]]:
    """The clipped surrogate of the reward less ``multiplier`` times that of the cost, over ``1 + multiplier``.

    PPO-Lagrangian as in Safe RLHF, eq. 10 to 12 of Dai et al. 2023 (arXiv:2310.12773)::

        losses.ppo_lagrangian(multiplier=fl.Lagrange(limit=0.1))

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        cost_advantages: [rows, tokens] float, of the cost.
        costs: [rows] float, of each response (spread over its tokens): its mean is what the multiplier follows.
        mask: [rows, tokens] bool, to count each response once.
        multiplier: >= 0, or a `flowrl.Lagrange` that an update moves from step to step.
        clip_low: the ratio is kept above ``1 - clip_low``.
        clip_high: and below ``1 + clip_high``.

    Returns:
        [rows, tokens] losses; ``cost`` (mean of a response), ``clip_fraction`` and ``ratio``.

    Raises:
        WrongType: `multiplier` has no value here, or a clip range is negative.
    """
    if isinstance(multiplier, Lagrange):
        raise WrongType(
            "the multiplier of a constraint has no value outside an update",
            found=str(multiplier),
            wanted="a number",
            fix="loss.at([1.0]) puts one in its place",
        )
    ratio = ratio_of(logprobs, old_logprobs)
    kept = ratio.clamp(1 - clip_low, 1 + clip_high)
    reward = torch.maximum(-advantages * ratio, -advantages * kept)
    cost = torch.maximum(cost_advantages * ratio, cost_advantages * kept)
    first = mask & (mask.cumsum(-1) == 1)
    metrics = ratio_metrics(ratio, -advantages * kept > -advantages * ratio)
    return (reward + multiplier * cost) / (1 + multiplier), {**metrics, "cost": (costs, first)}

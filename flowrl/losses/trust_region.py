"""Policy losses that leave out tokens beyond a trust region of probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import WrongType
from flowrl.loss import loss

from .ratios import Metrics, expect_not_negative, ratio_metrics, ratio_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")

CERTAIN = 1e-8
"""Added to the probability of every other token, so that a certain token has a finite divergence."""


def _check_thresholds(*, ratio_cap: float = 20.0, **thresholds: float) -> None:
    expect_not_negative(**thresholds)
    if not ratio_cap > 0:
        what, fix = "a token weighs at most ratio_cap", "leave ratio_cap= out for its default"
        raise WrongType(what, found=f"ratio_cap={ratio_cap}", wanted="ratio_cap > 0", fix=fix)


@loss(check=_check_thresholds)
def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by the ratio, for tokens whose probability moved no further than a threshold.

    DPPO-Binary-TV (arXiv:2602.04879): the trust region is on probabilities, not on their ratio, so that a rare token is
    not cut off for a change that moves hardly any mass.

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        threshold_low: most probability that a token without a positive advantage may have lost.
        threshold_high: most that one with a positive advantage may have gained.
        ratio_cap: most that a token weighs.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` and ``ratio``.

    Raises:
        WrongType: a threshold is negative, or `ratio_cap` not positive.
    """
    gained = logprobs.detach().exp() - old_logprobs.exp()
    inside = torch.where(advantages > 0, gained <= threshold_high, gained >= -threshold_low)
    return _weighted_inside(logprobs, old_logprobs, advantages, inside, ratio_cap)


@loss(check=_check_thresholds)
def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by the ratio, for tokens whose binary KL from the sampler stays within a threshold.

    DPPO-Binary-KL (arXiv:2602.04879): the divergence of "this token or another one" under the two policies. A token
    that moves back towards the sampler's probability is never cut off.

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        threshold_low: nats that a token without a positive advantage may be away, below.
        threshold_high: nats that one with a positive advantage may be away, above.
        ratio_cap: most that a token weighs.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` and ``ratio``.

    Raises:
        WrongType: a threshold is negative, or `ratio_cap` not positive.
    """
    now = logprobs.detach()
    p, old = now.exp(), old_logprobs.exp()
    others = (1 - old) * ((1 - old + CERTAIN) / (1 - p + CERTAIN)).log()
    divergence = old * (old_logprobs - now) + others
    rising = (divergence <= threshold_high) | (p <= old)
    falling = (divergence <= threshold_low) | (p >= old)
    inside = torch.where(advantages > 0, rising, falling)
    return _weighted_inside(logprobs, old_logprobs, advantages, inside, ratio_cap)


def _weighted_inside(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, inside: Tensor, ratio_cap: float
) -> tuple[Tensor, Metrics]:
    ratio = ratio_of(logprobs, old_logprobs).detach()
    value = -advantages * ratio.clamp(max=ratio_cap) * logprobs
    return torch.where(inside, value, torch.zeros_like(value)), ratio_metrics(ratio, ~inside)

"""Policy losses that hold back the few tokens by which a policy loses its entropy.

To first order the entropy falls by the covariance of log-prob and advantage over tokens, and few tokens make up most
of it: those that are likely already and get a large advantage (Cui et al. 2025, arXiv:2505.22617). `high_covariance`
marks them, over the whole batch and before its first optimizer step, so that neither passes nor ranks change which; the
losses read the mark::

    marked = losses.high_covariance(samples, advantage, share=2e-4, low=1.0, high=5.0)
    fl.update(policy, samples, advantage, marked, loss=losses.clip_cov())
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl.errors import WrongType
from flowrl.functions import node
from flowrl.loss import loss
from flowrl.moments import checked
from flowrl.seeds import mix

from .policy import ppo_clip
from .ratios import Metrics, check_clip, ratio_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


def _check_share(
    columns: Sequence[str], *, share: float, low: float | None = None, high: float | None = None, seed: int = 0
) -> None:
    if not 0 < share <= 1:
        raise WrongType(
            "a share of all tokens is marked", found=f"share={share}", wanted="0 < share <= 1", fix="share=2e-4"
        )
    if low is not None and high is not None and not low < high:
        raise WrongType(
            "the marked covariances lie in a range", found=f"low={low}, high={high}", wanted="low < high", fix="low=1.0"
        )


@node(out="high_covariance", per="batch", check=_check_share)
def high_covariance(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    share: float,
    low: float | None = None,
    high: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Mark tokens whose log-prob and advantage stand far from their means on the same side.

    A token's covariance is the product of both distances from the means over all trained tokens of the batch. Without a
    range the largest are marked (KL-Cov). With one (Clip-Cov: 1 to 5 in the paper) the marked ones are drawn from those
    inside; the draw is a hash of the token's own numbers, so that it depends on no order and no generator's state.

    Args:
        logprobs: [rows, tokens] float, of the sampler; or ``logprobs=fl.logprobs(policy, samples)``.
        advantages: [rows] or [rows, tokens] float.
        mask: [rows, tokens] bool, 1 = trained.
        share: of the trained tokens that is marked: 2e-4 with a range and 2e-4 to 2e-3 without in the paper. One token
            is marked at least, if any is inside.
        low: covariances above it may be marked.
        high: covariances below it may be marked.
        seed: of the draw.

    Returns:
        [rows, tokens] bool.

    Raises:
        ValueError: shapes differ, or an input is not finite.
    """
    trained = checked(mask, logprobs=logprobs)
    wide = advantages[:, None].expand(trained.shape) if advantages.dim() == 1 else advantages
    checked(mask, advantages=wide)
    p, a = logprobs.detach().double()[trained], wide.detach().double()[trained]
    marked = torch.zeros_like(p, dtype=torch.bool)
    if len(p):
        covariance = (p - p.mean()) * (a - a.mean())
        count = max(1, int(share * len(p)))
        if low is None and high is None:
            order = covariance.argsort(descending=True, stable=True)
        else:
            above, below = -math.inf if low is None else low, math.inf if high is None else high
            order = ((covariance > above) & (covariance < below)).nonzero()[:, 0]
            drawn = [mix(seed, *bits) for bits in torch.stack([p, a], -1)[order].view(torch.int64).tolist()]
            order = order[sorted(range(len(drawn)), key=drawn.__getitem__)]
        marked[order[:count]] = True
    return torch.zeros_like(trained).masked_scatter(trained, marked)


@loss(check=check_clip)
def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    high_covariance: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, and no loss for the marked tokens: Clip-Cov of Cui et al. 2025.

    A marked token still counts in the denominator.

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        high_covariance: [rows, tokens] bool, see the function of that name.
        clip_low, clip_high: as for `ppo_clip`.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` (marked tokens among them) and ``ratio``.

    Raises:
        WrongType: a clip range is negative.
    """
    value, metrics = ppo_clip(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    marked = high_covariance.bool()
    fraction = torch.where(marked, 1.0, metrics["clip_fraction"])
    return torch.where(marked, 0.0, value), {**metrics, "clip_fraction": fraction}


@loss
def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, high_covariance: Tensor, *, coef: float = 1.0
) -> tuple[Tensor, Metrics]:
    """The surrogate of PPO without a clip, and for the marked tokens a penalty: KL-Cov of Cui et al. 2025.

    The penalty is the absolute log-ratio, as in the authors' own code.

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        high_covariance: [rows, tokens] bool, see the function of that name.
        coef: weight of the penalty.

    Returns:
        [rows, tokens] losses; ``ratio``.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    penalty = torch.where(high_covariance.bool(), coef * (logprobs - old_logprobs).abs(), 0.0)
    return -advantages * ratio + penalty, {"ratio": ratio.detach()}

"""Loss functions: plain torch on [rows, tokens], one number a token.

Each is called on tensors, or on settings alone to declare a `flowrl.Loss`::

    losses.ppo_clip(clip_low=0.2, clip_high=0.28) - 0.005 * losses.entropy() + 0.01 * losses.kl(estimator="k3")

Masking and aggregation are not here: `Loss.total` replaces masked positions before a function sees them, and
`Loss.denominator` divides once. A function that looks along a row (GSPO, GMPO) names ``mask``. Only columns of the
model that is trained carry a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kl import LOG_RATIO_LIMIT, Estimator, estimate
from .loss import EMPTY, loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The clamp of a response's mean log-ratio: 2.2e4 is as broken for a mean as `LOG_RATIO_LIMIT` is for a token."""
CERTAIN = 1e-8
"""Added to the probability of every other token, so that a certain token has a finite divergence."""

Metrics = dict[str, "Tensor"]
"""By name, [rows, tokens] without a gradient; averaged over trained tokens."""


@loss
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate of PPO, eq. 7 of Schulman et al. 2017 (arXiv:1707.06347).

    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv:2503.14476). `dual_clip` bounds the loss of a token with a
    negative advantage at ``-dual_clip * advantage``, however large its ratio (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        old_logprobs: [rows, tokens] float, of the policy that sampled.
        advantages: [rows, tokens] float.
        clip_low: the ratio is kept above ``1 - clip_low``.
        clip_high: and below ``1 + clip_high``.
        dual_clip: > 1, or None for none.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` (tokens whose gradient the clip removed) and ``ratio``.

    Raises:
        ValueError: a clip range is negative, or `dual_clip` is not above 1.
    """
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is a ratio above 1; found {dual_clip}")
    ratio = _ratio(logprobs, old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    value = torch.maximum(plain, clipped)
    inactive = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        beyond = (advantages < 0) & (value > bound)
        value = torch.where(beyond, bound, value)
        inactive = inactive | beyond
    return value, _metrics(ratio, inactive)


@loss
def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE (Williams 1992): ``-advantage * log-prob``.

    Args:
        logprobs: [rows, tokens] float.
        advantages: [rows, tokens] float.

    Returns:
        [rows, tokens].
    """
    return -advantages * logprobs


@loss
def entropy(entropy: Tensor) -> tuple[Tensor, Metrics]:
    """Entropy of the next-token distribution: subtract it to keep a policy from collapsing.

    Args:
        entropy: [rows, tokens] float, nats, of the model that is trained.

    Returns:
        [rows, tokens], and ``entropy``.
    """
    return entropy, {"entropy": entropy.detach()}


@loss
def kl(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Estimator = "k3") -> tuple[Tensor, Metrics]:
    """KL from the reference as a term of the loss (GRPO, eq. 4 of arXiv:2402.03300, with ``k3``).

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        ref_logprobs: [rows, tokens] float, of the reference.
        estimator: see `flowrl.kl`.

    Returns:
        [rows, tokens] nats, and ``kl``.
    """
    value = estimate(logprobs, ref_logprobs, estimator=estimator)
    return value, {"kl": value.detach()}


@loss
def sft(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of the tokens.

    Args:
        logprobs: [rows, tokens] float.

    Returns:
        [rows, tokens] nats.
    """
    return -logprobs


@loss
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
        ValueError: `clip` is negative.
    """
    _check_clip(clip, clip)
    plain = (values - returns).square()
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    moved = (values - old_values).abs() > clip
    inactive = moved & (clipped > plain)
    metrics = {"value_clip_fraction": inactive.to(values.dtype), "value": values.detach()}
    return 0.5 * torch.maximum(plain, clipped), metrics


@loss
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    """PPO's surrogate with one ratio a response: the geometric mean of its tokens' ratios.

    GSPO-token, Zheng et al. 2025 (arXiv:2507.18071): the value is the response's, the gradient each token's
    own. The paper aggregates by ``seq-mean-token-mean``; the defaults are its clip ranges.

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        mask: [rows, tokens] bool, the tokens of the mean.
        clip_low: the response's ratio is kept above ``1 - clip_low``.
        clip_high: and below ``1 + clip_high``.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` and ``ratio``.

    Raises:
        ValueError: a clip range is negative.
    """
    _check_clip(clip_low, clip_high)
    row = _row_mean(logprobs.detach() - old_logprobs, mask)[:, None]
    ratio = (row + logprobs - logprobs.detach()).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), _metrics(ratio, clipped > plain)


@loss
def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Metrics]:
    """A response's advantage times the geometric mean of its tokens' clipped ratios.

    GMPO, Zhao et al. 2025 (arXiv:2507.20673). Each token of a row carries the row's loss, so that
    ``seq-mean-token-mean`` is the paper's mean over responses. The clip acts on the log-ratio: (-0.4, 0.4) there.

    Args:
        logprobs: [rows, tokens] float.
        old_logprobs: [rows, tokens] float.
        advantages: [rows, tokens] float; a row takes the mean over its tokens.
        mask: [rows, tokens] bool, the tokens of the means.
        clip_low: a token's log-ratio is kept above ``-clip_low``.
        clip_high: and below ``clip_high``.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` and ``ratio``.

    Raises:
        ValueError: a clip range is negative.
    """
    _check_clip(clip_low, clip_high)
    log_ratio = logprobs - old_logprobs
    clamped = log_ratio.clamp(-clip_low, clip_high)
    kept = torch.where(advantages > 0, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped))
    summed = torch.where(mask & (advantages != 0), kept, 0).sum(-1)
    # Divided as the aggregation divides a row's sum, so that the published form of the two together is met to rounding.
    ratio = (summed / (mask.sum(-1).to(summed.dtype) + EMPTY)).clamp(max=LOG_RATIO_LIMIT).exp()
    value = -_row_mean(advantages, mask) * ratio
    return value[:, None].expand(mask.shape), _metrics(_ratio(logprobs, old_logprobs), kept != log_ratio)


@loss
def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by the clipped ratio, which carries no gradient: no token's gradient is cut off.

    CISPO, from the MiniMax-M1 report (arXiv:2506.13585).

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        clip_low: the weight is kept above ``1 - clip_low``; 1 leaves it free below.
        clip_high: and below ``1 + clip_high``.

    Returns:
        [rows, tokens] losses; ``clip_fraction`` and ``ratio``.

    Raises:
        ValueError: a clip range is negative.
    """
    _check_clip(clip_low, clip_high)
    ratio = _ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, _metrics(ratio, weight != ratio)


@loss
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """A sigmoid gate on the ratio in place of the clip.

    SAPO, Gao et al. 2025 (arXiv:2511.20347): ``4 / tau * sigmoid(tau * (ratio - 1))`` times the advantage.
    The paper aggregates by ``seq-mean-token-mean``.

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        tau_positive: temperature of the gate where the advantage is positive.
        tau_negative: and elsewhere; larger damps a ratio far from 1 more.

    Returns:
        [rows, tokens] losses; ``ratio``.

    Raises:
        ValueError: a temperature is not positive.
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(f"a gate's temperature is positive; found {tau_positive} and {tau_negative}")
    ratio = _ratio(logprobs, old_logprobs)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), {"ratio": ratio.detach()}


@loss
def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float) -> tuple[Tensor, Metrics]:
    """REINFORCE with half the squared log-ratio as a penalty.

    The policy part of DRO, Richemond et al. 2024 (arXiv:2405.19107).

    Args:
        logprobs, old_logprobs, advantages: [rows, tokens] float, as for `ppo_clip`.
        beta: weight of the penalty.

    Returns:
        [rows, tokens] losses; ``ratio``.
    """
    log_ratio = logprobs - old_logprobs
    value = -advantages * logprobs + 0.5 * beta * log_ratio.square()
    return value, {"ratio": _ratio(logprobs, old_logprobs).detach()}


@loss
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
        ValueError: a threshold is negative.
    """
    _check_clip(threshold_low, threshold_high)
    gained = logprobs.detach().exp() - old_logprobs.exp()
    inside = torch.where(advantages > 0, gained <= threshold_high, gained >= -threshold_low)
    return _weighted_inside(logprobs, old_logprobs, advantages, inside, ratio_cap)


@loss
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
        ValueError: a threshold is negative.
    """
    _check_clip(threshold_low, threshold_high)
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
    ratio = _ratio(logprobs, old_logprobs).detach()
    value = -advantages * ratio.clamp(max=ratio_cap) * logprobs
    return torch.where(inside, value, torch.zeros_like(value)), _metrics(ratio, ~inside)


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[rows] means of x [rows, tokens] over each row's trained tokens; 0 without any."""
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[rows, tokens] probability ratio, 1 on the sampler's own policy."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _metrics(ratio: Tensor, clipped: Tensor) -> Metrics:
    return {"clip_fraction": clipped.to(ratio.dtype), "ratio": ratio.detach()}


def _check_clip(low: float, high: float) -> None:
    if low < 0 or high < 0:
        raise ValueError(f"a clip range is not negative; found clip_low={low}, clip_high={high}")

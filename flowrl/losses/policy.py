"""Policy losses on the ratio to the sampler's policy, and on log-probs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrl.errors import WrongType
from flowrl.kl import LOG_RATIO_LIMIT
from flowrl.loss import EMPTY, loss

from .ratios import Metrics, check_clip, ratio_metrics, ratio_of, row_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The clamp of a response's mean log-ratio: 2.2e4 is as broken for a mean as `LOG_RATIO_LIMIT` is for a token."""


def _check_ppo(*, dual_clip: float | None = None, **settings: Any) -> None:
    check_clip(**settings)
    if dual_clip is not None and not dual_clip > 1:
        what, wanted = "dual_clip is a ratio above 1", "dual_clip > 1, or None"
        raise WrongType(what, found=f"dual_clip={dual_clip}", wanted=wanted, fix="dual_clip=3.0, for one")


@loss(check=_check_ppo)
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
        WrongType: a clip range is negative, or `dual_clip` is not above 1.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    value = torch.maximum(plain, clipped)
    inactive = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        beyond = (advantages < 0) & (value > bound)
        value = torch.where(beyond, bound, value)
        inactive = inactive | beyond
    return value, ratio_metrics(ratio, inactive)


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


@loss(check=check_clip)
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
        WrongType: a clip range is negative.
    """
    row = row_mean(logprobs.detach() - old_logprobs, mask)[:, None]
    ratio = (row + logprobs - logprobs.detach()).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), ratio_metrics(ratio, clipped > plain)


@loss(check=check_clip)
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
        WrongType: a clip range is negative.
    """
    log_ratio = logprobs - old_logprobs
    clamped = log_ratio.clamp(-clip_low, clip_high)
    kept = torch.where(advantages > 0, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped))
    summed = torch.where(mask & (advantages != 0), kept, 0).sum(-1)
    # Divided as the aggregation divides a row's sum, so that the published form of the two together is met to rounding.
    ratio = (summed / (mask.sum(-1).to(summed.dtype) + EMPTY)).clamp(max=LOG_RATIO_LIMIT).exp()
    value = -row_mean(advantages, mask) * ratio
    return value[:, None].expand(mask.shape), ratio_metrics(ratio_of(logprobs, old_logprobs), kept != log_ratio)


@loss(check=check_clip)
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
        WrongType: a clip range is negative.
    """
    ratio = ratio_of(logprobs, old_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, ratio_metrics(ratio, weight != ratio)


def _check_gates(**temperatures: float) -> None:
    for name, tau in temperatures.items():
        if not tau > 0:
            what, fix = "a gate's temperature is not positive", f"leave {name}= out for its default"
            raise WrongType(what, found=f"{name}={tau}", wanted=f"{name} > 0", fix=fix)


@loss(check=_check_gates)
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
        WrongType: a temperature is not positive.
    """
    ratio = ratio_of(logprobs, old_logprobs)
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
    return value, {"ratio": ratio_of(logprobs, old_logprobs).detach()}

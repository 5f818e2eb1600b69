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
from .loss import loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

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


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[rows, tokens] probability ratio, 1 on the sampler's own policy."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _metrics(ratio: Tensor, clipped: Tensor) -> Metrics:
    return {"clip_fraction": clipped.to(ratio.dtype), "ratio": ratio.detach()}


def _check_clip(low: float, high: float) -> None:
    if low < 0 or high < 0:
        raise ValueError(f"a clip range is not negative; found clip_low={low}, clip_high={high}")

"""Estimators of the KL divergence between two policies from log-probs of sampled tokens, and a coefficient for it.

All estimate KL(policy || reference) per token, for tokens sampled from the policy (Schulman 2020, "Approximating KL
divergence", http://joschu.net/blog/kl-approx.html). ``k1`` and ``k3`` have the right mean. As terms of a loss they
differ: the mean gradient of ``k1`` is 0, that of ``k2`` is the gradient of this KL, and that of ``k3`` is the gradient
of the KL the other way round. ``abs`` is a distance, no estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from .errors import WrongType, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

Estimator = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here before `exp`: 4.9e8 is finite in every dtype but float16, and a token beyond it is broken
rather than informative. Without it one such token gives an infinite value, or a finite one whose gradient is nan."""

MAX_ERROR = 0.2
"""Largest relative distance from the target that one adaptation answers (Ziegler et al. 2019, section 2.2)."""


def estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Estimator = "k3") -> Tensor:
    """KL of the policy from the reference, per token.

    Args:
        logprobs: [rows, tokens] float, of the policy; the gradient flows through them.
        ref_logprobs: [rows, tokens] float, of the reference, at the same temperature and over the same support.
        estimator: ``k1`` is log p/q, ``k2`` half its square, ``k3`` q/p - 1 - log q/p, ``abs`` the absolute log-ratio.

    Returns:
        [rows, tokens] in nats.

    Raises:
        WrongType: there is no such estimator.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "k3":
        inverse = (-log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(inverse) - inverse
    raise _unknown(estimator)


def check_estimator(*, estimator: object = "k3", **settings: object) -> None:
    """Refuse an estimator that there is none of, as a loss's ``check``.

    Raises:
        WrongType: there is no such estimator.
    """
    if estimator not in get_args(Estimator):
        raise _unknown(estimator)


def _unknown(estimator: object) -> WrongType:
    return WrongType(
        "there is no such KL estimator",
        found=repr(estimator),
        wanted=", ".join(get_args(Estimator)),
        fix=did_you_mean(str(estimator), get_args(Estimator)),
    )


def adapt(coefficient: float, observed_kl: float, *, target: float, samples: int, horizon: int = 10_000) -> float:
    """The KL coefficient of the next step, moved towards the one that keeps KL at `target`.

    The proportional controller of Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.

    Args:
        coefficient: the one of the step just made.
        observed_kl: mean KL of that step, in nats.
        target: the KL to keep, in nats, > 0.
        samples: responses of that step.
        horizon: responses over which a KL of 20% above target multiplies the coefficient by about 1.2. A step of more
            moves it by no more than that: its sign never changes.

    Raises:
        ValueError: `target` or `horizon` is not positive, or `observed_kl` is not finite.
    """
    if not target > 0 or not horizon > 0:
        raise ValueError(f"a KL target and its horizon are positive; found target={target}, horizon={horizon}")
    if not abs(observed_kl) < float("inf"):
        raise ValueError(f"the observed KL is {observed_kl}: no coefficient follows from it")
    error = min(max(observed_kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * min(samples / horizon, 1))

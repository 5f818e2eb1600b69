"""Correction for a sampler that is not quite the policy that is trained: another engine, precision or version.

All compare the sampler's ``logprobs`` with ``old_logprobs``, which the trainer computes of the same tokens before its
first optimizer step, by ``fl.logprobs(policy, samples)``. `truncated_is` and `icepop` write ``importance_weights``,
which multiply a loss; `reject` narrows the ``mask``, so that a token neither is trained nor counts in a denominator::

    recomputed = fl.logprobs(policy, samples)
    weights = correction.truncated_is(samples, recomputed, cap=2.0)
    kept = correction.reject(samples, recomputed, by="seq-mean", low=0.99, high=1.01)
    loss = losses.ppo_clip(weights="importance_weights")
    fl.update(policy, samples, advantage, recomputed, weights, mask=kept, loss=loss)

Each is called on tensors or declared as a node. As a node it reports ``NODE/weight``, the mean weight of trained
tokens, and ``NODE/rejected``, the share of them that is left out. Results are float32, float64 for float64 input,
without a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from .errors import WrongType, did_you_mean
from .functions import node
from .kl import LOG_RATIO_LIMIT, Estimator, estimate
from .moments import checked, like

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

Level = Literal["token", "sequence"]
"""What has a weight of its own: each token, or a response, by the product of its tokens' ratios."""
By = Literal["token", "seq-sum", "seq-mean", "seq-max"]
"""What is rejected, and by which statistic: each token by its own, or a response by one over its trained tokens."""


def _check_cap(columns: Sequence[str], *, cap: float = 2.0, level: Level = "token") -> None:
    _check_choice("level", level, get_args(Level))
    if not cap > 0:
        raise WrongType(
            "weights are capped at a positive number", found=f"cap={cap}", wanted="cap > 0", fix="cap=2.0, for one"
        )


@node(out="importance_weights", per="group", check=_check_cap)
def truncated_is(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    group: Tensor | None = None,
    *,
    cap: float = 2.0,
    level: Level = "token",
) -> Tensor:
    """Importance weights, the trainer's probability over the sampler's, no larger than `cap`.

    Truncated importance sampling (Ionides 2008), which Yao et al. 2025 ("Your efficient RL framework secretly brings
    you off-policy RL training") apply to the mismatch of engines, token by token. A response's weight has no bias
    before it is capped, and a variance that grows with its length.

    Args:
        logprobs: [rows, tokens] float, of the sampler.
        old_logprobs: [rows, tokens] float, of the trainer before the update.
        mask: [rows, tokens] bool, 1 = trained.
        group: not read: no row depends on another, and a node that names it is called once for many prompts.
        cap: largest weight, > 0.
        level: ``"token"``, or ``"sequence"`` for one weight a response.

    Returns:
        [rows, tokens] weights, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or a log-prob is not finite.
    """
    trained, log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand(trained.shape)
    return like(torch.where(trained, _ratio(log_ratio).clamp(max=cap), 0), logprobs)


def _check_range(columns: Sequence[str], *, low: float = 0.5, high: float = 5.0) -> None:
    if not 0 <= low < high:
        raise WrongType(
            "kept weights lie in a range",
            found=f"low={low}, high={high}",
            wanted="0 <= low < high",
            fix="low=0.5, high=5.0, as in the paper",
        )


@node(out="importance_weights", per="group", check=_check_range)
def icepop(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    group: Tensor | None = None,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """Importance weights of tokens, 0 instead of one outside a range: too small says as much as too large.

    IcePop, from the Ring-1T report (arXiv:2510.18855). A token of weight 0 still counts in the loss's denominator.

    Args:
        logprobs: [rows, tokens] float, of the sampler.
        old_logprobs: [rows, tokens] float, of the trainer before the update.
        mask: [rows, tokens] bool, 1 = trained.
        group: not read: no row depends on another, and a node that names it is called once for many prompts.
        low: smallest weight that is kept, >= 0.
        high: largest weight that is kept, > low.

    Returns:
        [rows, tokens] weights, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or a log-prob is not finite.
    """
    trained, log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = _ratio(log_ratio)
    return like(torch.where(trained & (ratio >= low) & (ratio <= high), ratio, 0), logprobs)


def _check_bounds(
    columns: Sequence[str], *, by: By, high: float, low: float | None = None, estimator: Estimator = "k1"
) -> None:
    _check_choice("by", by, get_args(By))
    _check_choice("estimator", estimator, ("k2", "k3") if by == "seq-max" else ("k1", "k2", "k3"))
    if not high > 0 or (low is not None and not (estimator == "k1" and 0 < low < high)):
        raise WrongType(
            f"what {estimator} rejects is not bounded so",
            found=f"low={low}, high={high}",
            wanted="0 < low < high, or high > 0 alone"
            if estimator == "k1"
            else "high > 0, and no low: it is never < 0",
            fix="low=0.9, high=1.1, for one" if estimator == "k1" else "high=1.1, for one",
        )


@node(out="mask", per="group", check=_check_bounds)
def reject(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    group: Tensor | None = None,
    *,
    by: By,
    high: float,
    low: float | None = None,
    estimator: Estimator = "k1",
) -> Tensor:
    """The mask without tokens, or without responses, for which the sampler is too far from the trainer.

    Masked importance sampling: rejection by token, by the product of a response's ratios (``by="seq-sum"``), or by
    their geometric mean (``by="seq-mean"``), which does not depend on the length (Liu, Li et al. 2025, "When speed
    kills stability: demystifying RL collapse from the training-inference mismatch").

    Args:
        logprobs: [rows, tokens] float, of the sampler.
        old_logprobs: [rows, tokens] float, of the trainer before the update.
        mask: [rows, tokens] bool, 1 = trained.
        group: not read: no row depends on another, and a node that names it is called once for many prompts.
        by: what the statistic is of; with ``"seq-..."`` a response is kept or rejected whole.
        high: largest value that is kept: of ``k1`` as the ratio ``exp(k1)``, of ``k2`` and ``k3`` in nats.
        low: smallest ratio that is kept, with ``k1`` alone, whose sign says which side is more certain.
        estimator: of the KL of the sampler from the trainer (`flowrl.kl`); ``exp(k1)`` is the sampler's probability
            over the trainer's.

    Returns:
        [rows, tokens] bool.

    Raises:
        ValueError: shapes differ, or a log-prob is not finite.
    """
    trained, log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    found = estimate(-log_ratio, torch.zeros_like(log_ratio), estimator=estimator)
    if by != "token":
        found = _of_rows(found, trained, by)[:, None].expand(trained.shape)
    if estimator == "k1":
        found = found.exp()
    inside = found <= high
    return trained & inside if low is None else trained & inside & (found >= low)


def _of_rows(x: Tensor, trained: Tensor, by: By) -> Tensor:
    """[rows] one statistic of x [rows, tokens], which is 0 where nothing is trained."""
    if by == "seq-max":  # no estimate that has a maximum here is negative
        return x.amax(-1) if x.shape[-1] else x.sum(-1)
    return x.sum(-1) / trained.sum(-1).clamp(min=1) if by == "seq-mean" else x.sum(-1)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask as bool, and the trainer's log-prob less the sampler's [rows, tokens] float64, 0 where it is 0."""
    trained = checked(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return trained, torch.where(trained, old_logprobs.detach().double() - logprobs.detach().double(), 0)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise WrongType(
            f"{name}= has an unknown value",
            found=f"{name}={value!r}",
            wanted=" or ".join(repr(one) for one in allowed),
            fix=did_you_mean(str(value), allowed) or f"{name}={allowed[0]!r}",
        )

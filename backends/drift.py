"""How far the trained policy is from its reference, from the policy before the update, and from its own sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.backend import EffectiveShare, Max, Metrics, Sum
from flowrl.kl import LOG_RATIO_LIMIT, estimate
from flowrl.loss import Loss

from .batch import Batch

MAXIMA = frozenset({"max_ratio"})
"""Of the numbers that passes report, those that are maxima; all others are sums."""


def drift(batch: Batch, found: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers over the trained tokens of a pass.

    Args:
        found: [wanted] what the trained model says of each trained token, without a gradient.
        dtype: of the columns that it is compared with.
    """
    if "logprobs" not in found:
        return {}
    sums = {"entropy": found["entropy"].sum()}
    if "old_logprobs" in batch.rows.columns:
        old = batch.flat(batch.column("old_logprobs", dtype))
        sums["kl"] = estimate(old, found["logprobs"], estimator="k1").sum()
    if "ref_logprobs" in batch.rows.columns:
        reference = batch.flat(batch.column("ref_logprobs", dtype))
        sums["kl"] = estimate(found["logprobs"], reference, estimator="k3").sum()
    if "sampler_logprobs" in batch.rows.columns:
        sums |= mismatch(batch.flat(batch.column("sampler_logprobs", dtype)), found["logprobs"])
    return sums


def mismatch(sampler: Tensor, trainer: Tensor) -> dict[str, Tensor]:
    """KL of the sampler from the trainer, and of the ratios trainer / sampler their largest, sum and sum of squares.

    Args:
        sampler, trainer: [tokens] log-probs of one token, at least one.
    """
    sampler, trainer = sampler.double(), trainer.double()
    ratio = (trainer - sampler).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "mismatch_kl": estimate(sampler, trainer, estimator="k3").sum(),
        "max_ratio": ratio.max(),
        "ratio/sum": ratio.sum(),
        "ratio/squares": ratio.square().sum(),
    }


def merge(sums: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Take the numbers of another pass in."""
    for name, value in more.items():
        if name not in sums:
            sums[name] = value
        else:
            sums[name] = torch.maximum(sums[name], value) if name in MAXIMA else sums[name] + value


def to_metrics(sums: dict[str, Tensor], tokens: int, rows: int, loss: Loss) -> Metrics:
    """Metrics from tensors, in one transfer."""
    values = torch.stack([value.double() for value in sums.values()]).tolist() if sums else []
    numbers = dict(zip(sums, values, strict=True))
    metrics: Metrics = {"tokens": Sum(float(tokens), 1.0), "rows": Sum(float(rows), 1.0)}
    metrics["loss"] = Sum(numbers.pop("loss", 0.0), loss.denominator(tokens, rows))
    if "max_ratio" in numbers:
        metrics["max_ratio"] = Max(numbers.pop("max_ratio"))
        metrics["ess"] = EffectiveShare(numbers.pop("ratio/sum"), numbers.pop("ratio/squares"), float(tokens))
    for name, value in numbers.items():
        if not name.endswith("/weight"):
            metrics[name] = Sum(value, numbers.get(f"{name}/weight", float(tokens)))
    return metrics

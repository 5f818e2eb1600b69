"""Losses on preferences: which response to a prompt is the better one, or whether a response is good.

All read the column ``preference`` ([rows]: +1 chosen or desirable, -1 rejected or undesirable, 0 neither) and give one
number a row. What makes a pair, and what becomes of rows without a partner, is said in `pairs`. A policy's implicit
reward is the log-ratio of the whole response to the reference, times ``beta``::

    reference = fl.logprobs(policy.frozen(), samples)
    fl.update(policy, samples, reference, loss=losses.dpo(beta=0.1))

Their metrics are means over pairs: ``rewards/chosen``, ``rewards/rejected``, ``margin`` (their difference) and
``accuracy`` (the share of pairs with a positive margin; one of 0 counts half).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from flowrl.errors import WrongType, did_you_mean
from flowrl.loss import loss

from .pairs import Pairs, labelled, paired
from .ratios import row_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")

Variant = Literal["sigmoid", "ipo", "hinge"]
RowMetrics = dict[str, "Tensor | tuple[Tensor, Tensor]"]
"""By name, [rows] without a gradient; one that only some rows have beside [rows] bool."""


def _check_dpo(
    *, beta: float = 0.1, variant: Variant = "sigmoid", label_smoothing: float = 0.0, normalize_length: bool = False
) -> None:
    _check_beta(beta=beta)
    if variant not in get_args(Variant):
        allowed = get_args(Variant)
        fix = did_you_mean(str(variant), allowed) or "variant='sigmoid'"
        raise WrongType("loss 'dpo' has no such variant", found=repr(variant), wanted=" | ".join(allowed), fix=fix)
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and variant != "sigmoid"):
        raise WrongType(
            "label_smoothing is the share of labels that are wrong, of variant 'sigmoid'",
            found=f"label_smoothing={label_smoothing}, variant={variant!r}",
            wanted="0 <= label_smoothing < 0.5",
            fix="leave label_smoothing= out",
        )


def _check_beta(*, beta: float = 1.0, **settings: float) -> None:
    if not beta > 0:
        raise WrongType("beta scales the rewards of a preference", found=f"beta={beta}", wanted="> 0", fix="beta=0.1")


def _check_weights(*, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
    _check_beta(beta=beta)
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if not weight >= 0:
            what, fix = "a weight of loss 'kto' is negative", f"{name}=1.0"
            raise WrongType(what, found=f"{name}={weight}", wanted=f"{name} >= 0", fix=fix)


@loss(per="row", where=paired, check=_check_dpo)
def dpo(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    preference: Tensor,
    group: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.1,
    variant: Variant = "sigmoid",
    label_smoothing: float = 0.0,
    normalize_length: bool = False,
) -> tuple[Tensor, RowMetrics]:
    """Direct preference optimisation, eq. 7 of Rafailov et al. 2023 (arXiv:2305.18290).

    With h the log-ratio of the chosen response to the reference less that of the rejected one, the loss of a pair is
    ``-logsigmoid(beta * h)`` (``"sigmoid"``), ``(h - 1 / (2 * beta)) ** 2`` (``"ipo"``, eq. 17 of Azar et al. 2023,
    arXiv:2310.12036) or ``max(0, 1 - beta * h)`` (``"hinge"``, SLiC, arXiv:2305.10425, with DPO's reward).

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        ref_logprobs: [rows, tokens] float, of the reference.
        preference: [rows] +1, -1 or 0.
        group: [rows] int, the prompt that each row answers.
        mask: [rows, tokens] bool, the tokens of the response.
        beta: > 0.
        variant: of the loss of a pair.
        label_smoothing: chance that a label is wrong, in [0, 0.5): conservative DPO (Mitchell 2023). Of ``"sigmoid"``.
        normalize_length: a response's log-ratio is the mean over its tokens, not the sum: as IPO's authors computed
            it, and length-normalised DPO (arXiv:2411.15124). `beta` is then larger.

    Returns:
        [rows], and the metrics of pairs.
    """
    ratio = row_mean(logprobs - ref_logprobs, mask) if normalize_length else (logprobs - ref_logprobs).sum(-1)
    pairs = Pairs.of(preference, group)
    h = pairs.of_chosen(ratio) - pairs.of_rejected(ratio)
    if variant == "ipo":
        value = (h - 1 / (2 * beta)).square()
    elif variant == "hinge":
        value = (1 - beta * h).clamp(min=0)
    else:
        value = -(1 - label_smoothing) * _logsigmoid(beta * h) - label_smoothing * _logsigmoid(-beta * h)
    return pairs.to_rows(value), _pair_metrics(pairs, beta * ratio)


@loss(per="row", where=labelled, check=_check_weights)
def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    preference: Tensor,
    kl_baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, RowMetrics]:
    """Kahneman-Tversky optimisation, Ethayarajh et al. 2024 (arXiv:2402.01306), which needs no pairs.

    A good response should beat the baseline, a bad one stay below: ``weight * sigmoid(beta * (baseline - log-ratio))``
    and ``weight * sigmoid(beta * (log-ratio - baseline))``. Where good and bad rows are not as many, the paper weighs
    them so that they count about alike.

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        ref_logprobs: [rows, tokens] float, of the reference.
        preference: [rows] +1 desirable, -1 undesirable, 0 neither: such a row is left out.
        kl_baseline: [rows] float, nats >= 0: the same for all rows (`flowrl.preferences.kto_baseline`).
        beta: > 0.
        desirable_weight: of rows with +1.
        undesirable_weight: and with -1.

    Returns:
        [rows], and ``rewards/chosen`` and ``rewards/rejected``, each over its rows, and ``kl_baseline``.
    """
    ratio = (logprobs - ref_logprobs).sum(-1)
    good = preference > 0
    below = kl_baseline.detach() - ratio
    weight = torch.full_like(ratio, undesirable_weight).masked_fill(good, desirable_weight)
    value = weight * torch.sigmoid(beta * torch.where(good, below, -below))
    reward = beta * ratio
    metrics: RowMetrics = {
        "rewards/chosen": (reward, good),
        "rewards/rejected": (reward, ~good),
        "kl_baseline": kl_baseline.to(ratio.dtype),
    }
    return value, metrics


@loss(per="row", where=paired, check=_check_beta)
def orpo(
    logprobs: Tensor, preference: Tensor, group: Tensor, mask: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, RowMetrics]:
    """Odds ratio preference optimisation, eq. 6 of Hong et al. 2024 (arXiv:2403.07691): no reference.

    The mean negative log-likelihood of the chosen response's tokens, and `beta` (the paper's lambda) times
    ``-logsigmoid`` of the log of the two responses' odds ratio. A response's probability is the geometric mean of its
    tokens'. Odds are bounded where a response is certain to rounding, and then have no gradient.

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        preference, group, mask: as for `dpo`.
        beta: > 0.

    Returns:
        [rows], and the metrics of pairs, whose reward is ``beta`` times the mean log-prob.
    """
    mean = row_mean(logprobs, mask)
    certain = -torch.finfo(mean.dtype).eps
    log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=certain)))
    pairs = Pairs.of(preference, group)
    ratio = pairs.of_chosen(log_odds) - pairs.of_rejected(log_odds)
    value = -pairs.of_chosen(mean) - beta * _logsigmoid(ratio)
    return pairs.to_rows(value), _pair_metrics(pairs, beta * mean)


@loss(per="row", where=paired, check=_check_beta)
def simpo(
    logprobs: Tensor, preference: Tensor, group: Tensor, mask: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> tuple[Tensor, RowMetrics]:
    """Simple preference optimisation, eq. 6 of Meng et al. 2024 (arXiv:2405.14734): no reference.

    ``-logsigmoid`` of `beta` times the difference of the two responses' mean log-probs, less `gamma`.

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        preference, group, mask: as for `dpo`.
        beta: > 0; 2 to 10 in the paper.
        gamma: margin that the chosen response should win by; 0.3 to 1.6 in the paper.

    Returns:
        [rows], and the metrics of pairs.
    """
    reward = beta * row_mean(logprobs, mask)
    pairs = Pairs.of(preference, group)
    value = -_logsigmoid(pairs.of_chosen(reward) - pairs.of_rejected(reward) - gamma)
    return pairs.to_rows(value), _pair_metrics(pairs, reward)


@loss(per="row", where=paired)
def bradley_terry(
    scores: Tensor, preference: Tensor, group: Tensor, margin: Tensor | None = None, *, center: float = 0.0
) -> tuple[Tensor, RowMetrics]:
    """What trains a reward model: ``-logsigmoid`` of the difference of the two responses' scores.

    Bradley & Terry 1952, as in eq. 1 of Ouyang et al. 2022 (arXiv:2203.02155).

    Args:
        scores: [rows] float, of the model that is trained (``head="score"``).
        preference, group: as for `dpo`.
        margin: [rows] float, where a stream has such a column: by how much the chosen row should win (Llama 2,
            arXiv:2307.09288, eq. 2).
        center: weight of the square of a pair's sum, which keeps scores around 0 (Eisenstein et al. 2023,
            arXiv:2312.09244).

    Returns:
        [rows], and the metrics of pairs, whose rewards are the scores.
    """
    pairs = Pairs.of(preference, group)
    chosen, rejected = pairs.of_chosen(scores), pairs.of_rejected(scores)
    difference = chosen - rejected if margin is None else chosen - rejected - pairs.of_chosen(margin.to(scores.dtype))
    value = -_logsigmoid(difference) + center * (chosen + rejected).square()
    return pairs.to_rows(value), _pair_metrics(pairs, scores)


def _logsigmoid(x: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(x)


def _pair_metrics(pairs: Pairs, rewards: Tensor) -> RowMetrics:
    """Means over each row's pairs, [rows]; their means over rows are those over pairs."""
    chosen, rejected = pairs.of_chosen(rewards.detach()), pairs.of_rejected(rewards.detach())
    margin = chosen - rejected
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "margin": margin,
        "accuracy": 0.5 + 0.5 * margin.sign(),
    }
    return {name: pairs.to_rows(values) for name, values in metrics.items()}

"""From a vector's inputs and parameters to what flowrl gives for them, one function for each kind of case.

Names of parameters are handed on as keywords, so that one that flowrl does not know is an error and never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl import advantages, correction, kl, losses
from flowrl.loss import Loss, LossFunction, loss

Inputs = Mapping[str, Any]
Adapter = Callable[[Inputs, dict[str, Any]], dict[str, Any]]


def adapter_for(family: str, case: str) -> Adapter | None:
    """The adapter of one kind of case; None when flowrl has nothing to compare with it."""
    return ADAPTERS.get(f"{family}/{case}")


def _on_scores(function: Callable[..., Tensor], **columns: str) -> Adapter:
    """Adapt an estimator that takes scores [rows] (the sum of a row's rewards) and returns advantages."""

    def run(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
        mask = given["mask"]
        scores = torch.where(mask, given["token_rewards"], 0).sum(-1)
        result = function(scores, **{name: given[column] for name, column in columns.items()}, **params)
        return {"advantages": result if result.dim() == 2 else result[:, None].expand(mask.shape)}

    return run


def _on_rewards(function: Callable[..., tuple[Tensor, Tensor]], **columns: str) -> Adapter:
    """Adapt an estimator that takes rewards [rows, tokens] and returns advantages and returns."""

    def run(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: given[column] for name, column in columns.items()}
        result, returns = function(rewards=given["token_rewards"], mask=given["mask"], **inputs, **params)
        return {"advantages": result, "returns": returns}

    return run


def _gae(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
    params["normalize"] = params.pop("whiten")
    return _on_rewards(advantages.gae, values="values")(given, params)


def _on_loss(function: LossFunction[..., Any], trained: str) -> Adapter:
    """Adapt a loss function: the aggregated loss, and its gradient with respect to the column `trained`."""

    def run(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
        mask = given["mask"]
        weights = "importance_weights" if "importance_weights" in given else None
        # These vectors divide seq-mean-token-sum-norm by the padded width: their horizon.
        declared = function(aggregate=params.pop("aggregate"), horizon=mask.shape[1], weights=weights, **params)
        unread = set(given) - set(declared.reads) - {"mask", "old_logprobs"}
        assert not unread, f"the loss reads no {', '.join(sorted(unread))}"
        leaf = given[trained].clone().requires_grad_()
        value = aggregated(declared, {**given, trained: leaf}, mask)
        (gradient,) = torch.autograd.grad(value, leaf)
        return {"loss": value.detach(), f"grad_{trained}": gradient}

    return run


def aggregated(declared: Loss, columns: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """The loss of one whole mini-batch."""
    total, _ = declared.total(columns, mask)
    return total / declared.denominator(int(mask.sum()), int(mask.any(-1).sum()))


@loss
def token_loss(token_loss: Tensor) -> Tensor:
    """A loss that is given."""
    return token_loss


def _aggregate(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
    declared = token_loss(aggregate=params.pop("mode"), horizon=given["mask"].shape[1], **params)
    return {"value": aggregated(declared, given, given["mask"])}


def _kl(estimator: kl.Estimator) -> Adapter:
    def run(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
        leaf = given["logprobs"].clone().requires_grad_()
        value = kl.estimate(leaf, given["ref_logprobs"], estimator=estimator, **params)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return {"value": value.detach(), "grad_logprobs": gradient}

    return run


def _adaptive(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
    return {"coefficient": kl.adapt(params.pop("initial"), given["observed_kl"], **params)}


def _weights(function: Callable[..., Tensor], **settings: Any) -> Adapter:
    def run(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
        ratio = given["log_ratio"]  # the trainer's log-prob less the sampler's
        return {"weights": function(torch.zeros_like(ratio), ratio, given["mask"], **settings, **params)}

    return run


def _rejected(by: correction.By, estimator: kl.Estimator) -> Adapter:
    def run(given: Inputs, params: dict[str, Any]) -> dict[str, Any]:
        *low, high = (float(bound) for bound in params.pop("threshold").split("_"))
        settings = {"by": by, "estimator": estimator, "high": high, "low": low[0] if low else None, **params}
        ratio = given["log_ratio"]
        return {"mask": correction.reject(torch.zeros_like(ratio), ratio, given["mask"], **settings).double()}

    return run


POLICY_LOSSES: Mapping[str, LossFunction[..., Any]] = {
    "ppo_clip": losses.ppo_clip,
    "gpg": losses.policy_gradient,
    "gspo": losses.gspo,
    "gmpo": losses.gmpo,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "dro": losses.dro,
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
}

ADAPTERS: Mapping[str, Adapter] = {
    "advantage/grpo": _on_scores(advantages.grpo, group="group"),
    "advantage/grpo_passk": _on_scores(advantages.grpo_passk, group="group"),
    "advantage/rloo": _on_scores(advantages.rloo, group="group"),
    "advantage/gpg": _on_scores(advantages.gpg, group="group"),
    "advantage/opo": _on_scores(advantages.opo, mask="mask", group="group"),
    "advantage/reinforce_plus_plus_baseline": _on_scores(advantages.reinforce_pp_baseline, mask="mask", group="group"),
    "advantage/reinforce_plus_plus": _on_rewards(advantages.reinforce_pp),
    "advantage/remax": _on_rewards(advantages.remax, baseline_scores="baseline_scores"),
    "advantage/gae": _gae,
    **{f"aggregate/{mode}": _aggregate for mode in (
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    )},
    **{f"kl/{estimator}": _kl(estimator) for estimator in ("k1", "k2", "k3", "abs")},
    "kl/adaptive_coefficient": _adaptive,
    "correction/truncated_token": _weights(correction.truncated_is),
    "correction/truncated_sequence": _weights(correction.truncated_is, level="sequence"),
    "correction/icepop_token": _weights(correction.icepop),
    "correction/reject_token_k1": _rejected("token", "k1"),
    "correction/reject_seq_mean_k1": _rejected("seq-mean", "k1"),
    "correction/reject_seq_sum_k1": _rejected("seq-sum", "k1"),
    "correction/reject_seq_mean_k2": _rejected("seq-mean", "k2"),
    "correction/reject_seq_max_k2": _rejected("seq-max", "k2"),
    **{f"policy_loss/{name}": _on_loss(function, "logprobs") for name, function in POLICY_LOSSES.items()},
    "value_loss/clipped": _on_loss(losses.value_clip, "values"),
}  # fmt: skip

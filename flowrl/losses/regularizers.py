"""Terms that keep a policy near a reference, or from collapsing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.coefficients import Adaptive
from flowrl.errors import WrongType
from flowrl.kl import Estimator, check_estimator, estimate
from flowrl.loss import loss

from .ratios import Metrics

if TYPE_CHECKING:
    from torch import Tensor


@loss
def entropy(entropy: Tensor) -> tuple[Tensor, Metrics]:
    """Entropy of the next-token distribution: subtract it to keep a policy from collapsing.

    Args:
        entropy: [rows, tokens] float, nats, of the model that is trained.

    Returns:
        [rows, tokens], and ``entropy``.
    """
    return entropy, {"entropy": entropy.detach()}


@loss(check=check_estimator)
def kl(
    logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Estimator = "k3", coef: float | Adaptive = 1.0
) -> tuple[Tensor, Metrics]:
    """KL from the reference as a term of the loss (GRPO, eq. 4 of arXiv:2402.03300, with ``k3``).

    Args:
        logprobs: [rows, tokens] float, of the model that is trained.
        ref_logprobs: [rows, tokens] float, of the reference.
        estimator: see `flowrl.kl`.
        coef: what the KL is multiplied by: a number, or a `flowrl.Adaptive` that an update moves from step to step.

    Returns:
        [rows, tokens] nats times `coef`, and ``kl``, in nats.

    Raises:
        WrongType: there is no such estimator, or `coef` has no value here.
    """
    if isinstance(coef, Adaptive):
        raise WrongType(
            "the adaptive coefficient of a KL has no value outside an update",
            found=str(coef),
            wanted="a number",
            fix="loss.at([0.1]) puts one in its place",
        )
    value = estimate(logprobs, ref_logprobs, estimator=estimator)
    return coef * value, {"kl": value.detach()}

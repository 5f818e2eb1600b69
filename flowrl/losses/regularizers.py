"""Terms that keep a policy near a reference, or from collapsing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.kl import Estimator, estimate
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

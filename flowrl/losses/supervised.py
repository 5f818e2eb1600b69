"""Losses on given answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.loss import loss

if TYPE_CHECKING:
    from torch import Tensor


@loss
def sft(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of the tokens.

    Args:
        logprobs: [rows, tokens] float.

    Returns:
        [rows, tokens] nats.
    """
    return -logprobs

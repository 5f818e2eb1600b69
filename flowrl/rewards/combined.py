"""One reward of several."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.expect import expect_weights
from flowrl.functions import node
from flowrl.stream import Scores


@node(out=Scores, check=expect_weights)
def weighted_sum(*scores: float, weights: Sequence[float] | None = None) -> float:
    """The sum of several rewards of a response.

    In a graph it takes the scores of every handle::

        rewards.weighted_sum(samples, correct, brief, weights=(1.0, 0.2))

    A response that one of them has dropped is dropped here. To normalise each reward in its group before the sum, see
    `flowrl.advantages.gdpo`.

    Args:
        *scores: one number each.
        weights: of each, in order; None weighs each 1.

    Raises:
        ValueError: there is not one weight for each.
    """
    weights = [1.0] * len(scores) if weights is None else weights
    return float(sum(weight * score for weight, score in zip(weights, scores, strict=True)))

"""One reward of several."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.errors import WrongType
from flowrl.functions import node
from flowrl.stream import Scores


def _check_weights(columns: Sequence[str], *, weights: Sequence[float] | None = None, **settings: object) -> None:
    if weights is not None and len(weights) != len(columns):
        raise WrongType(
            "each reward has a weight",
            found=f"{len(weights)} weights for {len(columns)} rewards",
            wanted="one weight for each handle that has scores, in their order",
            fix=f"weights={(1.0,) * len(columns)}, or leave weights= out",
        )


@node(out=Scores, check=_check_weights)
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

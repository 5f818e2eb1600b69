"""Advantage estimators: plain torch, called on tensors or declared as nodes (``advantages.grpo(samples, scores)``).

Statistics are taken per prompt id, wherever the rows stand, in float64 and in two passes, from each group's smallest
score: a group of equal scores gets exactly 0, and scores near 1e6 lose nothing. Rows that were dropped are absent: they
enter no baseline. A row without a trained token still counts in its group; its advantage reaches no token. Results are
float32, float64 for float64 input, without a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .functions import advantage

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

EPS = 1e-6
"""Added to a standard deviation. Large enough that rounding noise does not become an advantage, small enough that two
scores 1e-3 apart still count as different."""


@advantage(min_group=2)
def grpo(scores: Tensor, group: Tensor, *, normalize_std: bool = True, eps: float = EPS) -> Tensor:
    """Centre each score on the mean of its prompt's group, and divide by the group's standard deviation.

    GRPO, section 4.1.2 of Shao et al. 2024 (arXiv:2402.03300), with the unbiased (n - 1) standard deviation. A group
    with one row left gets 0: it says nothing about its row.

    Args:
        scores: [rows] float, one per response.
        group: [rows] int, the prompt that each row answers; any ids, in any order.
        normalize_std: divide by the standard deviation plus `eps`; without it this is `dr_grpo`.
        eps: added to the standard deviation.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    centred, index, count = _centred(scores, group)
    if normalize_std:
        variance = _total(centred.square(), index, count) / (count - 1).clamp(min=1)
        std = variance.sqrt()[index]
        centred = torch.where(std > 0, centred / torch.where(std > 0, std + eps, 1.0), 0.0)
    return _like(centred, scores)


@advantage(min_group=2)
def dr_grpo(scores: Tensor, group: Tensor) -> Tensor:
    """Centre each score on the mean of its prompt's group (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    Pair it with ``aggregate="seq-mean-token-sum-norm"``, which leaves out the division by a response's length as well.

    Args:
        scores: [rows] float.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    centred, _, _ = _centred(scores, group)
    return _like(centred, scores)


@advantage(min_group=2)
def rloo(scores: Tensor, group: Tensor) -> Tensor:
    """A score minus the mean of the *other* scores of its group.

    Leave-one-out: Ahmadian et al. 2024 (arXiv:2402.14740), eq. 7. Not divided by a standard deviation: that of the
    others can be 0 where the difference is not.

    Args:
        scores: [rows] float.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: a group has one row, so nothing to leave in; shapes differ; a score is not finite.
    """
    centred, index, count = _centred(scores, group)
    if (count < 2).any():
        alone = int(group[(count[index] < 2).nonzero()[0, 0]])
        raise ValueError(f"leave-one-out needs 2 rows of each prompt; group {alone} has 1")
    return _like(centred * (count / (count - 1))[index], scores)


def _centred(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their group's mean [rows] float64, each row's group as 0..G-1 [rows], and group sizes [G]."""
    x, index, count = _grouped(scores, group)
    lowest = torch.full(count.shape, torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, index, x, "amin")
    x = x - lowest[index]
    return x - (_total(x, index, count) / count)[index], index, count


def _grouped(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [rows] float64, each row's group as 0..G-1 [rows], and group sizes [G] float64."""
    if scores.dim() != 1 or group.shape != scores.shape:
        raise ValueError(f"scores and group are [rows] each; found {list(scores.shape)} and {list(group.shape)}")
    if group.is_floating_point():
        raise ValueError(f"group holds prompt ids, which are integers; found {group.dtype}")
    x = scores.detach().double()
    if not torch.isfinite(x).all():
        row = int((~torch.isfinite(x)).nonzero()[0, 0])
        raise ValueError(f"the score of row {row} is {float(x[row])}: a failure has no score, drop its row")
    _, index, count = torch.unique(group, return_inverse=True, return_counts=True)
    return x, index, count.double()


def _total(x: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """[G] sums of x [rows] over groups."""
    return torch.zeros_like(count).index_add(0, index, x)


def _like(x: Tensor, given: Tensor) -> Tensor:
    return x.to(torch.float64 if given.dtype == torch.float64 else torch.float32)

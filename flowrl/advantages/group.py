"""Estimators of one number a response: its score against those of its prompt's other responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl.expect import expect_weights
from flowrl.functions import advantage
from flowrl.moments import centred, check_peers, checked, like, over_std, shifted, total, whiten

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

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
    x, index, count = centred(scores, group)
    return like(over_std(x, x, index, count, eps) if normalize_std else x, scores)


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
    x, _, _ = centred(scores, group)
    return like(x, scores)


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
    x, index, count = centred(scores, group)
    check_peers(index, count, group, "leave-one-out")
    return like(x * (count / (count - 1))[index], scores)


@advantage(min_group=2)
def opo(scores: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """A score minus its group's mean, in which a response weighs its length: the baseline of least variance.

    OPO, Hao et al. 2025 (arXiv:2505.23585).

    Args:
        scores: [rows] float.
        mask: [rows, tokens] bool, 1 = trained; a row's sum is its length.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    x, index, count = shifted(scores, group)
    length = checked(mask, scores=scores).sum(-1).double()
    weight = total(length, index, count).clamp(min=1)
    return like(x - (total(length * x, index, count) / weight)[index], scores)


@advantage(min_group=2)
def grpo_passk(scores: Tensor, group: Tensor, *, normalize_std: bool = True, eps: float = EPS) -> Tensor:
    """The best of a group gets its distance from the second best, all others 0: the gradient of their maximum.

    Tang et al. 2025 (arXiv:2503.19595).

    Args:
        scores: [rows] float.
        group: [rows] int.
        normalize_std: divide by the group's unbiased standard deviation plus `eps`.
        eps: added to the standard deviation.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: a group has one row, so no second best; shapes differ; a score is not finite.
    """
    x, index, count = centred(scores, group)
    check_peers(index, count, group, "the best against the second best")
    by_score = x.argsort(descending=True, stable=True)
    order = by_score[index[by_score].argsort(stable=True)]
    first = (count.cumsum(0) - count).long()
    best, second = order[first], order[first + 1]
    lead = torch.zeros_like(x).index_put((best,), x[best] - x[second])
    return like(over_std(lead, x, index, count, eps) if normalize_std else lead, scores)


@advantage(per="batch", min_group=2)
def gpg(scores: Tensor, group: Tensor) -> Tensor:
    """Centre each score on its group, and scale by rows over rows with a score that is not 0.

    GPG, Chu et al. 2025 (arXiv:2504.02546), whose scale makes up for rows without a gradient. Differs from the paper,
    which counts rows of groups with equal scores, in counting scores of 0, as the common implementation does.

    Args:
        scores: [rows] float.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    x, _, _ = centred(scores, group)
    return like(x * (len(scores) / scores.count_nonzero().clamp(min=1)), scores)


@advantage(per="batch", min_group=2, check=expect_weights)
def gdpo(group: Tensor, *scores: Tensor, weights: Sequence[float] | None = None, eps: float = EPS) -> Tensor:
    """Normalise each reward in its group by itself, add the results up, and whiten the sums over the batch.

    GDPO, Liu et al. 2026 (arXiv:2601.05242). Of rewards that are added up first, as for `grpo`, the one of largest
    spread decides, and groups become alike that are not. In a graph it takes the scores of every handle::

        advantages.gdpo(samples, correct, brief, weights=(1.0, 0.2))

    The mean and the standard deviation of the batch are over responses, as in the paper; some implementations take them
    over tokens, where a response weighs its length.

    Args:
        group: [rows] int.
        *scores: [rows] float each.
        weights: of each reward, in order; None weighs each 1.
        eps: added to the standard deviation of each group.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: there is no reward, or not one weight for each; shapes differ; a score is not finite.
    """
    weights = [1.0] * len(scores) if weights is None else weights
    if not scores or len(weights) != len(scores):
        raise ValueError(f"each reward needs a weight; found {len(scores)} rewards and {len(weights)} weights")
    added = torch.zeros(len(group), dtype=torch.float64, device=group.device)
    for reward, weight in zip(scores, weights, strict=True):
        x, index, count = centred(reward, group)
        added = added + weight * over_std(x, x, index, count, eps)
    return like(whiten(added, torch.ones_like(added, dtype=torch.bool)), scores[0])


@advantage(per="batch", min_group=2)
def reinforce_pp_baseline(scores: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Centre each score on its group, then whiten over all trained tokens of the batch.

    REINFORCE++ with a baseline (arXiv:2501.03262): the group gives the mean, the batch the scale.

    Args:
        scores: [rows] float.
        mask: [rows, tokens] bool, 1 = trained.
        group: [rows] int.

    Returns:
        [rows, tokens] advantages, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    trained = checked(mask, scores=scores)
    x, _, _ = centred(scores, group)
    return like(whiten(x[:, None].expand(trained.shape), trained), scores)

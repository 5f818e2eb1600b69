"""Statistics of groups and of trained tokens, in float64 and two passes.

Groups are found by prompt id, wherever their rows stand. Everything is taken from the smallest value, so that equal
values differ from their mean by exactly 0 and a common offset of 1e6 costs no digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

WHITEN_EPS = 1e-8
"""Added to the variance of a batch: without it, rounding noise of almost equal returns would be scaled to 1."""


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Centre and scale over all trained tokens.

    Args:
        x: [rows, tokens] float.
        mask: [rows, tokens] bool, 1 = trained.

    Returns:
        [rows, tokens] float64 of mean 0 and unbiased variance 1 over trained tokens, 0 where the mask is 0. Equal
        values all give exactly 0.
    """
    trained = mask.bool()
    picked = x.detach().double()[trained]
    if not picked.numel():
        return torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    picked = picked - picked.min()
    picked = picked - picked.mean()
    variance = picked.square().sum() / max(picked.numel() - 1, 1)
    picked = picked * (variance + WHITEN_EPS).rsqrt()
    return torch.zeros(x.shape, dtype=torch.float64, device=x.device).masked_scatter(trained, picked)


def checked(mask: Tensor, **columns: Tensor) -> Tensor:
    """The mask as bool [rows, tokens], once each column is [rows] or [rows, tokens] and finite where it is trained."""
    if mask.dim() != 2:
        raise ValueError(f"a mask is [rows, tokens]; found {list(mask.shape)}")
    trained = mask.bool()
    for name, column in columns.items():
        per_row = name.endswith("scores") or name == "final_values"
        wanted = trained.shape[:1] if per_row else trained.shape
        if column.shape != wanted:
            raise ValueError(f"{name} is {list(column.shape)}; the mask needs {list(wanted)}")
        broken = ~torch.isfinite(column) if per_row else trained & ~torch.isfinite(column)
        if broken.any():
            where = broken.nonzero()[0].tolist()
            raise ValueError(f"{name} is {float(column[tuple(where)])} at {where}")
    return trained


def last_trained(trained: Tensor) -> Tensor:
    """[rows, tokens] int: the last trained token up to each token; -1 before the first."""
    position = torch.arange(trained.shape[1], device=trained.device)
    return torch.where(trained, position, -1).cummax(1).values if trained.numel() else trained.long()


def credited(rewards: Tensor, trained: Tensor) -> Tensor:
    """Rewards [rows, tokens] float64, each moved to the last trained token up to it.

    One before the first trained token is no token's doing, and one that is not finite is padding: both are left out.
    """
    last = last_trained(trained)
    counted = (last >= 0) & torch.isfinite(rewards)
    given = torch.where(counted, rewards.detach().double(), 0)
    return torch.zeros_like(given).scatter_add(1, last.clamp(min=0), given)


def discounted(rewards: Tensor, trained: Tensor, gamma: float) -> Tensor:
    """[rows, tokens] sums of each trained token's reward and the later ones; `gamma` discounts a trained token."""
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(trained[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return torch.where(trained, returns, 0)


def centred(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their group's mean [rows] float64, each row's group as 0..G-1 [rows], and group sizes [G]."""
    x, index, count = shifted(scores, group)
    return x - (total(x, index, count) / count)[index], index, count


def shifted(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their group's smallest [rows] float64, each row's group as 0..G-1 [rows], and group sizes [G]."""
    if scores.dim() != 1 or group.shape != scores.shape:
        raise ValueError(f"scores and group are [rows] each; found {list(scores.shape)} and {list(group.shape)}")
    if group.is_floating_point():
        raise ValueError(f"group holds prompt ids, which are integers; found {group.dtype}")
    x = scores.detach().double()
    if not torch.isfinite(x).all():
        row = int((~torch.isfinite(x)).nonzero()[0, 0])
        raise ValueError(f"the score of row {row} is {float(x[row])}: a failure has no score, drop its row")
    _, index, count = torch.unique(group, return_inverse=True, return_counts=True)
    lowest = torch.full(count.shape, torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, index, x, "amin")
    return x - lowest[index], index, count.double()


def over_std(x: Tensor, centred: Tensor, index: Tensor, count: Tensor, eps: float) -> Tensor:
    """x [rows] over (unbiased standard deviation of its group + eps); 0 in a group of equal scores."""
    variance = total(centred.square(), index, count) / (count - 1).clamp(min=1)
    std = variance.sqrt()[index]
    return torch.where(std > 0, x / torch.where(std > 0, std + eps, 1.0), 0.0)


def check_peers(index: Tensor, count: Tensor, group: Tensor, what: str) -> None:
    """Raise ValueError for a group of one row."""
    alone = (count[index] < 2).nonzero()
    if len(alone):
        raise ValueError(f"{what} needs 2 rows of each prompt; group {int(group[alone[0, 0]])} has 1")


def total(x: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """[G] sums of x [rows] over groups."""
    return torch.zeros_like(count).index_add(0, index, x)


def like(x: Tensor, given: Tensor) -> Tensor:
    """x as float32, or as float64 when `given` is float64."""
    return x.to(torch.float64 if given.dtype == torch.float64 else torch.float32)

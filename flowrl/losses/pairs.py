"""Pairs of responses to one prompt, of which the column ``preference`` chooses one and rejects the other.

A prompt with several chosen or rejected responses makes a pair of each chosen with each rejected one. A row's loss is
the mean over its pairs, so that the mean over rows is, within a prompt, the mean over pairs, and a prompt weighs by its
rows; with one of each it is the plain mean over pairs. A row without a partner (its other half was dropped, has no
trained token, or all were equally good) makes no pair: `paired` leaves it out of the loss and of its denominator, and
the update's metric ``left_out`` counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


def labelled(preference: Tensor) -> Tensor:
    """[rows] bool: where a response is chosen (+1) or rejected (-1), not neither (0).

    Raises:
        ValueError: a preference is something else.
    """
    found = preference.abs() == 1
    unknown = ~(found | (preference == 0))
    if unknown.any():
        raise ValueError(f"a preference is 1, -1 or 0; found {preference[unknown][0].item()}")
    return found


def paired(preference: Tensor, group: Tensor) -> Tensor:
    """[rows] bool: rows with another one of their prompt on the other side.

    Args:
        preference: [rows] +1, -1 or 0.
        group: [rows] int, the prompt that each row answers.

    Raises:
        ValueError: a preference is something else.
    """
    sided = labelled(preference)
    numbers, prompt = torch.unique(group, return_inverse=True)
    chosen = sided & (preference > 0)
    has_chosen, has_rejected = (
        torch.zeros(len(numbers), dtype=torch.bool, device=group.device).index_fill(0, prompt[rows], True)
        for rows in (chosen, sided & ~chosen)
    )
    return sided & torch.where(chosen, has_rejected[prompt], has_chosen[prompt])


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """All pairs of some rows, by prompt."""

    chosen: Tensor
    """[prompts, most chosen] int64 rows; 0 where a prompt has fewer."""
    rejected: Tensor
    """[prompts, most rejected] int64 rows."""
    real: Tensor
    """[prompts, most chosen, most rejected] bool: which are pairs."""
    num_rows: int

    @classmethod
    def of(cls, preference: Tensor, group: Tensor) -> Pairs:
        """The pairs of rows that `paired` has let through."""
        numbers, prompt = torch.unique(group, return_inverse=True)
        chosen, has_chosen = _by_prompt(preference > 0, prompt, len(numbers))
        rejected, has_rejected = _by_prompt(preference < 0, prompt, len(numbers))
        return cls(chosen, rejected, has_chosen[:, :, None] & has_rejected[:, None, :], len(preference))

    def of_chosen(self, values: Tensor) -> Tensor:
        """[prompts, most chosen, most rejected] the value [rows] of each pair's chosen row; 0 where there is no pair.

        A gradient reaches a row by the pairs that it is in, and by nothing else.
        """
        return torch.where(self.real, values[self.chosen][:, :, None], 0)

    def of_rejected(self, values: Tensor) -> Tensor:
        """As `of_chosen`, of each pair's rejected row."""
        return torch.where(self.real, values[self.rejected][:, None, :], 0)

    def to_rows(self, values: Tensor) -> Tensor:
        """[rows] the mean of a number a pair over each row's pairs."""
        kept = torch.where(self.real, values, 0)
        rows = values.new_zeros(self.num_rows)
        for which, axis in ((self.chosen, 2), (self.rejected, 1)):
            count = self.real.sum(axis)
            has = count > 0
            rows = rows.index_put((which[has],), (kept.sum(axis) / count.clamp(min=1))[has])
        return rows


def _by_prompt(side: Tensor, prompt: Tensor, num_prompts: int) -> tuple[Tensor, Tensor]:
    """The rows of one side of each prompt, [prompts, most] int64, and which of these there are."""
    rows = side.nonzero()[:, 0]
    order = prompt[rows].argsort(stable=True)
    rows = rows[order]
    home = prompt[rows]
    counts = home.bincount(minlength=num_prompts)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[home]
    table = rows.new_zeros(num_prompts, int(counts.max())).index_put((home, place), rows)
    return table, torch.arange(table.shape[1], device=rows.device) < counts[:, None]

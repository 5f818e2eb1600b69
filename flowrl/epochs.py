"""Which rows of a source make up which step: arithmetic on numbers, with no data and no state.

A step's rows are a function of (number of rows, settings, step). So the cursor of a source is the step number, and a
resumed run needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import DataError
from .seeds import mix, permuted

Last = Literal["drop", "short", "wrap"]
"""What becomes of the rows at the end of an epoch that fill no whole batch.

``drop``: they are left out of that epoch. ``short``: they make a smaller batch. ``wrap``: the batch is filled with the
first rows of the next epoch, which goes on behind them, so that every row is seen equally often.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """The rows of each step."""

    num_rows: int | None
    """Usable rows of the source; None: unbounded, read in its own order."""
    batch: int
    """Rows a step."""
    shuffle: bool = False
    """A new order each epoch, a function of (seed, epoch). An unbounded source has no epochs, and is not shuffled."""
    seed: int = 0
    """Of the order."""
    last: Last = "drop"
    """What becomes of an epoch's last rows."""
    epochs: int | None = None
    """Passes over the rows; None repeats for ever."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise DataError("a batch has at least one row", found=f"batch={self.batch}")
        if self.last not in get_args(Last):
            raise DataError("unknown policy 'last'", found=repr(self.last), wanted=", ".join(get_args(Last)))
        if self.epochs is not None and self.epochs < 1:
            raise DataError("a source is read at least once", found=f"epochs={self.epochs}", wanted=">= 1, or None")
        if self.epochs is not None and self.num_rows is None:
            raise DataError("an unbounded source has no epochs", found=f"epochs={self.epochs}", fix="leave epochs out")

    @property
    def num_steps(self) -> int | None:
        """Steps until the rows are used up; None: never."""
        if self.num_rows is None or self.epochs is None:
            return None
        if self.last == "wrap":
            return -(-self.epochs * self.num_rows // self.batch)
        return self.epochs * self._steps_per_epoch(self.num_rows)

    @property
    def num_dropped_last(self) -> int:
        """Rows left out at the end of each epoch."""
        return self.num_rows % self.batch if self.num_rows is not None and self.last == "drop" else 0

    def rows(self, step: int) -> list[int] | None:
        """The numbers of a step's rows, in order; None once the source is used up."""
        assert step >= 0
        if self.num_steps is not None and step >= self.num_steps:
            return None
        start = step * self.batch
        if self.num_rows is None:
            return list(range(start, start + self.batch))
        if self.last == "wrap":
            places = (divmod(place, self.num_rows) for place in range(start, start + self.batch))
            return [self._row(epoch, position) for epoch, position in places]
        epoch, within = divmod(step, self._steps_per_epoch(self.num_rows))
        start = within * self.batch
        return [self._row(epoch, position) for position in range(start, min(start + self.batch, self.num_rows))]

    def describe(self) -> str:
        """What happens at the end of an epoch, in words."""
        if self.num_rows is None:
            return "unbounded, read in its own order"
        rest = self.num_rows % self.batch
        if self.last == "wrap" and rest:
            return "each epoch's last batch is filled with the first rows of the next"
        if self.last == "short" and rest:
            return f"the last batch of each epoch has {_count(rest)}"
        if rest:
            return f"{_count(rest)} dropped at the end of each epoch"
        return f"{self.num_rows // self.batch} steps an epoch"

    def _steps_per_epoch(self, num_rows: int) -> int:
        steps = num_rows // self.batch if self.last == "drop" else -(-num_rows // self.batch)
        assert steps, "the reader refuses fewer rows than a batch"
        return steps

    def _row(self, epoch: int, position: int) -> int:
        assert self.num_rows is not None
        return permuted(position, self.num_rows, mix(self.seed, epoch)) if self.shuffle else position


def _count(rows: int) -> str:
    return f"{rows} row{'s' * (rows != 1)}"

"""Which rows share a forward pass."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.backends.batch import groups_of, micro_batches
from flowrl.rows import Key, Rows

LENGTHS = np.array([3, 4, 2, 5, 1, 1, 9, 2])


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (None, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (10, [[0, 1], [2, 3], [4, 5], [6], [7]]),
        (1, [[row] for row in range(8)]),
    ],
)
def test_rows_are_packed_in_order_up_to_the_budget(budget: int | None, wanted: list[list[int]]) -> None:
    assert micro_batches(LENGTHS, budget) == wanted


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (None, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (20, [[0, 1, 2, 3], [4, 5, 6, 7][:2], [6, 7]]),
        (8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_rows_of_a_prompt_are_never_parted(budget: int | None, wanted: list[list[int]]) -> None:
    groups = groups_of(Rows([Key(0, 5 - row // 2, row % 2) for row in range(8)], {}))
    assert groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert micro_batches(LENGTHS, budget, groups) == wanted

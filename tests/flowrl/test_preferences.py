"""Which responses are preferred, and KTO's baseline."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowrl import preferences


def test_the_best_and_the_worst_of_a_prompt_make_its_pair() -> None:
    scores = torch.tensor([0.5, 7.0, 0.9, -1.0, 0.2, 7.5])
    group = torch.tensor([3, 1, 3, 1, 3, 1])
    assert preferences.best_and_worst(scores, group).tolist() == [0, 0, 1, -1, -1, 1]


def test_of_several_best_the_first_is_taken_and_equal_ones_make_no_pair() -> None:
    scores = torch.tensor([0, 1, 0, 1, 1, 1, 0, 0, 5])
    group = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3])
    assert preferences.best_and_worst(scores, group).tolist() == [-1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_each_prompt_gets_what_it_gets_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 3, (60,), generator=generator).float()
    group = torch.randint(0, 9, (60,), generator=generator)
    together = preferences.best_and_worst(scores, group)
    for one in range(9):
        rows = group == one
        assert together[rows].tolist() == preferences.best_and_worst(scores[rows], group[rows]).tolist()


def test_a_score_that_is_not_finite_prefers_nothing() -> None:
    with pytest.raises(ValueError, match="the score of row 1 is nan"):
        preferences.best_and_worst(torch.tensor([0.0, math.nan]), torch.zeros(2, dtype=torch.int64))


def logs(*rows: float) -> Tensor:
    return torch.tensor(rows)[:, None] * torch.tensor([[0.5, 0.25, 0.25]])


def test_the_baseline_of_kto_is_the_mean_over_mismatched_rows() -> None:
    old, reference = logs(-1, -2, -3, -8), logs(-1.5, -9, -3.5, -1)
    preference = torch.tensor([1.0, 0, 0, -1])
    found = preferences.kto_baseline(old, reference, preference)
    assert found.tolist() == pytest.approx([(7 + 0.5) / 2] * 4)


def test_the_baseline_of_kto_is_never_negative_and_never_made_of_nothing() -> None:
    assert preferences.kto_baseline(logs(-9, -1), logs(-1, -9), torch.tensor([0.0, 1])).tolist() == [0, 0]
    with pytest.raises(ValueError, match="no row has preference 0"):
        preferences.kto_baseline(logs(-9, -1), logs(-1, -9), torch.tensor([-1.0, 1]))
    with pytest.raises(ValueError, match="not finite"):
        preferences.kto_baseline(logs(math.nan, -1), logs(-1, -9), torch.tensor([0.0, 1]))

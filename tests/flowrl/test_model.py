"""Models and their optimizers."""

import pytest

import flowrl as fl
from flowrl.errors import WrongType


def test_the_rate_rises_over_the_warm_up_and_then_stays() -> None:
    optimizer = fl.AdamW(lr=1e-3, warmup_steps=10)
    assert [optimizer.lr_at(k) for k in (0, 5, 9, 500)] == pytest.approx([1e-4, 6e-4, 1e-3, 1e-3])


def test_the_rate_falls_linearly_to_nothing_at_the_end_of_the_decay() -> None:
    optimizer = fl.AdamW(lr=1e-3, warmup_steps=2, decay_steps=10)
    assert [optimizer.lr_at(k) for k in (0, 1, 5, 10, 20)] == pytest.approx([5e-4, 9e-4, 5e-4, 0.0, 0.0])


def test_a_decay_that_is_no_count_is_refused() -> None:
    with pytest.raises(WrongType, match="decay_steps"):
        fl.AdamW(lr=1e-3, decay_steps=0)

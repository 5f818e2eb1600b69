"""How metrics of firings become the numbers of a step's line."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.backend import EffectiveShare, Max, Metric, Sum
from flowrl.runtime.step_metrics import StepMetrics


def closed(*passes: dict[str, Metric], prefix: str = "") -> dict[str, float]:
    metrics = StepMetrics()
    for each in passes:
        metrics.add(0, each, prefix)
    return metrics.close(0)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=20), st.sets(st.integers(1, 19), max_size=5))
def test_a_maximum_and_an_effective_share_do_not_depend_on_how_rows_are_split(weights: list[int], at: set[int]) -> None:
    cuts = [0, *sorted(cut for cut in at if cut < len(weights)), len(weights)]
    parts = [weights[a:b] for a, b in pairwise(cuts)]
    passes: list[dict[str, Metric]] = [
        {"ess": EffectiveShare(sum(part), sum(w * w for w in part), len(part)), "max_ratio": Max(max(part))}
        for part in parts
    ]
    squares = sum(w * w for w in weights)
    assert closed(*passes) == {
        "ess": pytest.approx(sum(weights) ** 2 / (len(weights) * squares)),
        "max_ratio": max(weights),
    }


def test_an_effective_share_is_1_for_equal_weights_and_1_in_n_for_a_single_one() -> None:
    assert EffectiveShare(4 * 0.3, 4 * 0.3**2, 4).value == pytest.approx(1)
    assert EffectiveShare(5.0, 25.0, 4).value == pytest.approx(1 / 4)


def test_counts_add_up_and_other_sums_are_means() -> None:
    found = closed({"tokens": Sum(3, 1), "loss": Sum(6.0, 3)}, {"tokens": Sum(1, 1), "loss": Sum(6.0, 1)})
    assert found == {"tokens": 4, "loss": 3.0}


def test_a_prefix_keeps_two_updates_apart_and_counts_stay_counts() -> None:
    metrics = StepMetrics()
    for prefix, loss in (("", 1.0), ("critic/", 5.0)) * 2:
        metrics.add(7, {"loss": Sum(loss, 1), "tokens": Sum(10, 1)}, prefix)
    assert metrics.close(7) == {"loss": 1.0, "tokens": 20, "critic/loss": 5.0, "critic/tokens": 20}


def test_a_mean_of_nothing_is_left_out_and_a_mean_that_is_no_number_is_not() -> None:
    found = closed(
        {"grad_norm": Sum(0.0, 0.0), "ess": EffectiveShare(0, 0, 0), "lr": Sum(1.0, 1), "x": Sum(math.nan, 2)}
    )
    assert found.keys() == {"lr", "x"}
    assert math.isnan(found["x"])

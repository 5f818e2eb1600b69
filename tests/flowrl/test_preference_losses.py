"""Each preference loss and its gradient against plain formulas, one pair at a time, in Python's own floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import losses
from flowrl.errors import WrongType
from flowrl.loss import Loss

Columns = dict[str, Tensor]

PREFERENCE = [1, -1, -1, 1, 0, -1, 1, -1, 1, 1, -1, 1, -1, -1]
GROUP = [4, 4, 0, 0, 0, 0, 0, 7, 7, 2, 9, 9, 9, 3]
UNTRAINED = 7
"""Prompt 4 has one of each; 0 two of each and one that is neither; 7 lost its rejected row; 2 and 3 have one side; 9
has two rejected."""
PAIRED = [0, 1, 2, 3, 5, 6, 10, 11, 12]


def batch() -> tuple[Columns, Tensor]:
    """Columns with nan wherever the mask is 0."""
    generator = torch.Generator().manual_seed(3)
    rows, tokens = len(GROUP), 6
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    mask[:, 0] = True
    mask[UNTRAINED] = False

    def noise() -> Tensor:
        return torch.where(mask, -2 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64), math.nan)

    columns = {
        "logprobs": noise(),
        "ref_logprobs": noise(),
        "preference": torch.tensor(PREFERENCE, dtype=torch.float32),
        "group": torch.tensor(GROUP),
        "kl_baseline": torch.full((rows,), 0.3, dtype=torch.float64),
        "scores": torch.randn(rows, generator=generator, dtype=torch.float64),
        "margin": torch.tensor([0.5 * (group % 3) for group in GROUP]),
    }
    return columns, mask


def mean_and_gradient(loss: Loss, parts: list[list[int]]) -> tuple[float, Tensor, dict[str, float]]:
    """A mini-batch cut into micro-batches: its loss, the gradient of the trained column, and metrics."""
    columns, mask = batch()
    trained = "scores" if "scores" in loss.reads else "logprobs"
    leaf = columns[trained].clone().requires_grad_()
    total, num_rows = torch.zeros((), dtype=torch.float64), 0
    sums: dict[str, Tensor] = {}
    for rows in parts:
        given = {name: column[rows] for name, column in {**columns, trained: leaf}.items()}
        value, metrics = loss.total(given, mask[rows])
        total = total + value
        alive = mask[rows].any(-1)
        selected = loss.select({name: given[name][alive] for name in loss.selects_by})
        num_rows += int(selected.sum())
        for name, pair in metrics.items():
            sums[name] = sums.get(name, torch.zeros(2)) + torch.stack([number.double() for number in pair])
    value = total / loss.denominator(1, num_rows)
    value.backward()
    assert leaf.grad is not None
    means = {name: float(pair[0] / pair[1]) for name, pair in sums.items()}
    return value.item(), leaf.grad, means


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def minus_log_sigmoid(x: float) -> tuple[float, float]:
    """Value and slope."""
    return math.log1p(math.exp(-x)), sigmoid(x) - 1


# What a pair's two rows are worth, and the loss of a pair with its slope in each of the two


def of_sums(row: int, columns: Columns, mask: Tensor) -> tuple[float, Tensor]:
    """A row's log-ratio to the reference, and its gradient in the log-probs."""
    keep = mask[row]
    return float((columns["logprobs"] - columns["ref_logprobs"])[row][keep].sum()), keep.double()


def of_mean_ratios(row: int, columns: Columns, mask: Tensor) -> tuple[float, Tensor]:
    value, slope = of_sums(row, columns, mask)
    return value / int(mask[row].sum()), slope / mask[row].sum()


def of_means(row: int, columns: Columns, mask: Tensor) -> tuple[float, Tensor]:
    keep = mask[row]
    return float(columns["logprobs"][row][keep].mean()), keep.double() / keep.sum()


def of_scores(row: int, columns: Columns, mask: Tensor) -> tuple[float, Tensor]:
    return float(columns["scores"][row]), torch.ones((), dtype=torch.float64)


def dpo(chosen: float, rejected: float, _: float) -> tuple[float, float, float]:
    value, slope = minus_log_sigmoid(0.3 * (chosen - rejected))
    return value, 0.3 * slope, -0.3 * slope


def cdpo(chosen: float, rejected: float, _: float) -> tuple[float, float, float]:
    x = 0.3 * (chosen - rejected)
    right, wrong = minus_log_sigmoid(x), minus_log_sigmoid(-x)
    slope = 0.3 * (0.9 * right[1] - 0.1 * wrong[1])
    return 0.9 * right[0] + 0.1 * wrong[0], slope, -slope


def ipo(chosen: float, rejected: float, _: float) -> tuple[float, float, float]:
    distance = chosen - rejected - 1 / (2 * 0.3)
    return distance**2, 2 * distance, -2 * distance


def hinge(chosen: float, rejected: float, _: float) -> tuple[float, float, float]:
    value = 1 - 0.3 * (chosen - rejected)
    return (value, -0.3, 0.3) if value > 0 else (0.0, 0.0, 0.0)


def simpo(chosen: float, rejected: float, _: float) -> tuple[float, float, float]:
    value, slope = minus_log_sigmoid(2.5 * (chosen - rejected) - 1.2)
    return value, 2.5 * slope, -2.5 * slope


def orpo(chosen: float, rejected: float, _: float) -> tuple[float, float, float]:
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (chosen, rejected)]
    value, slope = minus_log_sigmoid(math.log(odds[0] / odds[1]))
    slopes = [0.2 * slope / (1 - math.exp(x)) for x in (chosen, rejected)]
    return -chosen + 0.2 * value, -1 + slopes[0], -slopes[1]


def bradley_terry(chosen: float, rejected: float, margin: float) -> tuple[float, float, float]:
    value, slope = minus_log_sigmoid(chosen - rejected - margin)
    center = 2 * 0.01 * (chosen + rejected)
    return value + 0.01 * (chosen + rejected) ** 2, slope + center, -slope + center


Row = Callable[[int, Columns, Tensor], tuple[float, Tensor]]
Pair = Callable[[float, float, float], tuple[float, float, float]]
CASES: dict[str, tuple[Loss, Row, Pair, float]] = {
    "dpo": (losses.dpo(beta=0.3), of_sums, dpo, 0.3),
    "dpo normalised": (losses.dpo(beta=0.3, normalize_length=True), of_mean_ratios, dpo, 0.3),
    "cdpo": (losses.dpo(beta=0.3, label_smoothing=0.1), of_sums, cdpo, 0.3),
    "ipo": (losses.dpo(beta=0.3, variant="ipo"), of_sums, ipo, 0.3),
    "hinge": (losses.dpo(beta=0.3, variant="hinge"), of_sums, hinge, 0.3),
    "simpo": (losses.simpo(beta=2.5, gamma=1.2), of_means, simpo, 2.5),
    "orpo": (losses.orpo(beta=0.2), of_means, orpo, 0.2),
    "bradley_terry": (losses.bradley_terry(center=0.01), of_scores, bradley_terry, 1.0),
}
"""The loss, what it compares of two rows, the loss of a pair, and what a row's reward is in units of the first."""


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_those_of_its_formula(name: str) -> None:
    loss, of_row, of_pair, beta = CASES[name]
    columns, mask = batch()
    value, gradient = 0.0, torch.zeros_like(columns["scores" if of_row is of_scores else "logprobs"])
    wanted = {"rewards/chosen": 0.0, "rewards/rejected": 0.0, "margin": 0.0, "accuracy": 0.0}
    for prompt in (4, 0, 9):
        rows = [row for row in PAIRED if GROUP[row] == prompt]
        sides = [[row for row in rows if PREFERENCE[row] == side] for side in (1, -1)]
        pairs = list(product(*sides))
        share = len(rows) / len(pairs) / len(PAIRED)  # a prompt weighs by its rows, shared by its pairs
        for chosen, rejected in pairs:
            (x, x_slope), (y, y_slope) = of_row(chosen, columns, mask), of_row(rejected, columns, mask)
            pair, in_chosen, in_rejected = of_pair(x, y, float(columns["margin"][chosen]))
            value += share * pair
            gradient[chosen] += share * in_chosen * x_slope
            gradient[rejected] += share * in_rejected * y_slope
            wanted["rewards/chosen"] += share * beta * x
            wanted["rewards/rejected"] += share * beta * y
            wanted["margin"] += share * beta * (x - y)
            wanted["accuracy"] += share * (x > y)
    everything = list(range(len(GROUP)))
    prompts = [[row for row in everything if GROUP[row] == prompt] for prompt in (4, 0, 7, 2, 9, 3)]
    for parts in ([everything], prompts, [prompts[0] + prompts[4], prompts[5] + prompts[1], prompts[2] + prompts[3]]):
        found, slope, metrics = mean_and_gradient(loss, parts)
        assert found == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(slope, gradient, rtol=1e-12, atol=1e-14)
        assert metrics == pytest.approx(wanted, rel=1e-12)


def test_kto_and_its_gradient_are_those_of_its_formula() -> None:
    columns, mask = batch()
    loss = losses.kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    assert not loss.couples
    rows = [row for row in range(len(GROUP)) if PREFERENCE[row] and row != UNTRAINED]
    value, gradient = 0.0, torch.zeros_like(columns["logprobs"])
    for row in rows:
        ratio, slope = of_sums(row, columns, mask)
        weight, side = (1.5, 1) if PREFERENCE[row] > 0 else (0.5, -1)
        gain = sigmoid(0.3 * side * (ratio - float(columns["kl_baseline"][row])))
        value += weight * (1 - gain) / len(rows)
        gradient[row] -= weight * gain * (1 - gain) * 0.3 * side / len(rows) * slope
    for parts in ([list(range(len(GROUP)))], [[row] for row in range(len(GROUP))]):
        found, slope, metrics = mean_and_gradient(loss, parts)
        assert found == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(slope, gradient, rtol=1e-12, atol=1e-14)
        good = [0.3 * of_sums(row, columns, mask)[0] for row in rows if PREFERENCE[row] > 0]
        bad = [0.3 * of_sums(row, columns, mask)[0] for row in rows if PREFERENCE[row] < 0]
        assert metrics == pytest.approx(
            {"rewards/chosen": sum(good) / 6, "rewards/rejected": sum(bad) / 6, "kl_baseline": 0.3}, rel=1e-12
        )


def test_a_tie_counts_half_in_the_accuracy() -> None:
    zeros = torch.zeros(4, 2)
    _, metrics = losses.dpo().total(
        {"logprobs": torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 0]]), "ref_logprobs": zeros,
         "preference": torch.tensor([1, -1, 1, -1]), "group": torch.tensor([0, 0, 1, 1])},
        torch.ones(4, 2),
    )  # fmt: skip
    assert [float(number) for number in metrics["accuracy"]] == [0.75 * 4, 4]


def test_an_untrained_policy_has_the_loss_of_a_coin() -> None:
    columns, mask = batch()
    columns["ref_logprobs"] = columns["logprobs"]
    total, metrics = losses.dpo(beta=0.1).total(columns, mask)
    assert total.item() / len(PAIRED) == pytest.approx(math.log(2))
    assert float(metrics["accuracy"][0] / metrics["accuracy"][1]) == 0.5


def test_a_response_that_is_certain_breaks_no_gradient() -> None:
    columns, mask = batch()
    for certain in (0.0, -1e-12, -1e4):
        leaf = torch.full_like(columns["logprobs"], certain).requires_grad_()
        for loss in (losses.orpo(), losses.simpo(), losses.dpo(), losses.kto()):
            total, _ = loss.total({**columns, "logprobs": leaf, "ref_logprobs": torch.zeros_like(leaf)}, mask)
            (slope,) = torch.autograd.grad(total, leaf)
            assert torch.isfinite(slope).all()


def test_preferences_that_are_none_are_refused() -> None:
    columns, mask = batch()
    columns["preference"][2] = 0.5
    for loss in (losses.dpo(), losses.kto()):
        with pytest.raises(ValueError, match=r"a preference is 1, -1 or 0; found 0\.5"):
            loss.total(columns, mask)
    columns["preference"][2] = math.nan
    with pytest.raises(ValueError, match=r"found nan"):
        losses.dpo().total(columns, mask)


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (losses.dpo, {"variant": "sigmod"}, r"(?s)no such variant.*'sigmod'.*sigmoid \| ipo \| hinge.*sigmoid"),
        (losses.dpo, {"beta": 0.0}, r"(?s)beta=0\.0.*> 0"),
        (losses.dpo, {"label_smoothing": 0.5}, r"(?s)label_smoothing=0\.5.*0 <= label_smoothing < 0\.5"),
        (losses.dpo, {"label_smoothing": 0.1, "variant": "ipo"}, r"(?s)label_smoothing=0\.1, variant='ipo'"),
        (losses.kto, {"desirable_weight": -1.0}, r"(?s)desirable_weight=-1\.0.*desirable_weight >= 0"),
        (losses.simpo, {"beta": -1.0}, r"(?s)beta=-1\.0"),
        (losses.orpo, {"beta": math.nan}, r"(?s)beta=nan"),
    ],
)
def test_settings_that_make_no_loss_are_refused_at_declaration(
    function: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongType, match=message):
        function(**settings)

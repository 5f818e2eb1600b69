"""Coefficients that follow a metric, and the constrained loss that one of them is for."""

from __future__ import annotations

import math

import pytest
import torch

import flowrl as fl
from flowrl import losses
from flowrl.errors import UnknownColumn, WrongType
from flowrl.stream import Advantages


def test_a_multiplier_rises_while_the_cost_is_above_its_limit_and_falls_below() -> None:
    multiplier = fl.Lagrange(limit=0.1, initial=2.0, lr=0.5)
    assert multiplier.after(2.0, 0.3, 8) == pytest.approx(2.0 * math.exp(0.5 * 2.0 * 0.2))
    assert multiplier.after(2.0, 0.1, 8) == pytest.approx(2.0)
    assert 0 < multiplier.after(2.0, 0.0, 8) < 2.0


def test_a_constraint_that_nothing_meets_does_not_end_in_infinity() -> None:
    multiplier, value = fl.Lagrange(limit=0.0, lr=1.0), 1.0
    for _ in range(200):
        value = multiplier.after(value, 1.0, 8)
    assert math.isfinite(value)


def test_a_multiplier_that_one_step_takes_to_0_can_rise_again() -> None:
    multiplier = fl.Lagrange(limit=0.5, lr=10.0)
    value = multiplier.after(1e4, 0.0, 8)  # exp(log 1e4 - 5e4) is 0 in a float64
    assert value > 0
    assert multiplier.after(value, 1.0, 8) > value
    for _ in range(2100):
        value = multiplier.after(value, 1.0, 8)
    assert value > 1


@pytest.mark.parametrize(
    "settings", [{"initial": 0.0}, {"initial": math.inf}, {"lr": -1.0}, {"lr": math.inf}, {"limit": math.inf}]
)
def test_a_multiplier_of_no_positive_number_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(WrongType, match="a multiplier starts and moves by positive numbers"):
        fl.Lagrange(**({"limit": 0.1} | settings))


def test_the_constrained_loss_is_that_of_the_paper_with_its_gradient() -> None:
    torch.manual_seed(0)
    shape = (3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    old = -torch.rand(shape, dtype=torch.float64)
    logprobs = (old + 0.4 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    advantages, cost_advantages = torch.randn(2, *shape, dtype=torch.float64)
    costs = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    loss = losses.ppo_lagrangian(multiplier=fl.Lagrange(limit=0.1), clip_low=0.1, clip_high=0.3).at([1.7])
    columns = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": advantages,
        "cost_advantages": cost_advantages,
        "costs": costs,
    }
    total, metrics = loss.total(columns, mask)
    (gradient,) = torch.autograd.grad(total, logprobs)

    wanted, slope = 0.0, torch.zeros(shape, dtype=torch.float64)
    for row, token in mask.nonzero().tolist():
        ratio = math.exp(float(logprobs[row, token].detach() - old[row, token]))
        for advantage, weight in ((advantages, 1.0), (-cost_advantages, 1.7)):
            a = float(advantage[row, token])
            plain, kept = ratio * a, min(max(ratio, 0.9), 1.3) * a
            wanted -= weight * min(plain, kept) / 2.7
            slope[row, token] -= weight * (plain if plain <= kept else 0.0) / 2.7
    assert float(total.detach()) == pytest.approx(wanted, abs=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-12)
    sum_of_costs, responses = metrics["cost"]
    assert (float(sum_of_costs), float(responses)) == (1.5, 3.0)  # each response once, whatever its length


def test_a_multiplier_has_no_value_outside_an_update() -> None:
    loss = losses.ppo_lagrangian(multiplier=fl.Lagrange(limit=0.1))
    columns = {name: torch.zeros(1, 1) for name in ("logprobs", "old_logprobs", "advantages", "cost_advantages")}
    with pytest.raises(WrongType, match="the multiplier of a constraint has no value outside an update"):
        loss.total({**columns, "costs": torch.zeros(1)}, torch.ones(1, 1))


def test_a_handle_can_be_narrowed_to_one_of_its_node_s_columns() -> None:
    handle = Advantages("gae", {"advantages": "gae", "returns": "gae", "prompt": "prompts"}, ("filter",))
    narrow = handle.only("returns")
    assert isinstance(narrow, Advantages)
    assert dict(narrow.columns) == {"returns": "gae"}
    assert narrow.gates == ("filter",)
    with pytest.raises(UnknownColumn, match="node 'gae' writes no column 'prompt'"):
        handle.only("prompt")

"""KL estimators against the divergence that they estimate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flowrl as fl
from flowrl import kl, losses
from flowrl.errors import WrongType

ESTIMATORS = ("k1", "k2", "k3", "abs")


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.3, 1.0), ("k2", 0.045, 0.3), ("k3", math.exp(-0.3) - 1 + 0.3, 1 - math.exp(-0.3)), ("abs", 0.3, 1.0)],
)
def test_values_and_gradients_are_the_formulas(estimator: kl.Estimator, value: float, slope: float) -> None:
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    found = kl.estimate(logprobs, torch.tensor([[-1.3]], dtype=torch.float64), estimator=estimator)
    found.sum().backward()
    assert found.item() == pytest.approx(value, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)


def _policies() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(5, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean(estimator: kl.Estimator) -> None:
    logits, q = _policies()
    p = logits.log_softmax(0)
    mean = (p.exp() * kl.estimate(p, q, estimator=estimator)).sum()
    torch.testing.assert_close(mean, (p.exp() * (p - q)).sum())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_as_a_loss_each_has_the_gradient_that_the_page_says(estimator: kl.Estimator) -> None:
    logits, q = _policies()
    p = logits.log_softmax(0)
    wanted = {"k1": 0.0 * p.sum(), "k2": (p.exp() * (p - q)).sum(), "k3": (q.exp() * (q - p)).sum()}[estimator]
    found = (p.exp().detach() * kl.estimate(p, q, estimator=estimator)).sum()
    (slope,) = torch.autograd.grad(found, logits, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(wanted, logits)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_are_at_distance_zero(estimator: kl.Estimator) -> None:
    logprobs = torch.tensor([[-0.1, -30.0]])
    assert kl.estimate(logprobs, logprobs, estimator=estimator).eq(0).all()


def test_k3_keeps_the_digits_of_a_small_divergence() -> None:
    found = kl.estimate(torch.tensor(-1.0 + 2**-12), torch.tensor(-1.0), estimator="k3")
    assert found.item() == pytest.approx(0.5 * 2**-24, rel=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_log_ratio_of_a_thousand_has_a_finite_value_and_gradient(estimator: kl.Estimator) -> None:
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    found = kl.estimate(logprobs, torch.tensor([0.0, -1000.0]), estimator=estimator).sum()
    found.backward()
    assert torch.isfinite(found)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_an_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(WrongType, match=r"(?s)no such KL estimator.*'k4'.*k1, k2, k3, abs"):
        kl.estimate(torch.zeros(1), torch.zeros(1), estimator="k4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("observed", "wanted"), [(6.0, 0.2), (6.3, 0.2 * (1 + 0.05 * 0.0256)), (60.0, 0.2 * 1.00512), (0.0, 0.2 * 0.99488)]
)
def test_the_coefficient_moves_by_at_most_a_fifth_of_the_horizon(observed: float, wanted: float) -> None:
    assert kl.adapt(0.2, observed, target=6.0, samples=256, horizon=10_000) == pytest.approx(wanted, abs=1e-12)


def test_a_step_of_many_horizons_moves_the_coefficient_by_a_fifth_and_never_turns_its_sign() -> None:
    assert kl.adapt(0.2, 0.0, target=6.0, samples=512, horizon=100) == pytest.approx(0.16)
    assert kl.adapt(0.2, 60.0, target=6.0, samples=512, horizon=100) == pytest.approx(0.24)


def test_a_coefficient_that_cannot_follow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target=0, horizon=10000"):
        kl.adapt(0.2, 1.0, target=0, samples=1)
    with pytest.raises(ValueError, match="the observed KL is nan"):
        kl.adapt(0.2, math.nan, target=1.0, samples=1)


def test_an_update_gets_a_loss_with_numbers_in_place_of_what_is_adaptive() -> None:
    adaptive = fl.Adaptive(initial=0.2, target=6.0)
    declared = losses.policy_gradient() + 0.5 * losses.kl(coef=adaptive) + losses.kl(estimator="k2", coef=3.0)
    assert declared.adaptive == (adaptive,)
    columns = {
        "logprobs": torch.tensor([[-1.0]]),
        "ref_logprobs": torch.tensor([[-1.3]]),
        "advantages": torch.ones(1, 1),
    }
    total, metrics = declared.at([0.7]).total(columns, torch.ones(1, 1))
    wanted = 1.0 + 0.5 * 0.7 * (math.exp(-0.3) - 1 + 0.3) + 3.0 * 0.045
    assert float(total) == pytest.approx(wanted, rel=1e-6)
    assert float(metrics["kl"][0]) == pytest.approx(0.045, rel=1e-6)  # in nats, whatever the coefficient
    with pytest.raises(WrongType, match="the adaptive coefficient of a KL has no value outside an update"):
        declared.total(columns, torch.ones(1, 1))
    assert adaptive.after(0.2, 60.0, 256) == pytest.approx(0.2 * 1.00512, abs=1e-12)
    assert "coef=Adaptive(initial=0.2, target=6.0, horizon=10000)" in str(declared)


@pytest.mark.parametrize("settings", [{"initial": 0.0}, {"initial": math.inf}, {"target": -1.0}, {"horizon": 0}])
def test_an_adaptive_coefficient_of_no_positive_number_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(WrongType, match="starts, aims and moves by positive numbers"):
        fl.Adaptive(**({"initial": 0.1, "target": 1.0} | settings))

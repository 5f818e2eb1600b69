"""Each loss against its formula and finite differences, and all of them against how a batch is cut and padded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import flowrl as fl
from flowrl import advantages, losses
from flowrl.errors import UnknownName, WrongType
from flowrl.loss import TRAINED, Aggregate, Loss, LossFunction

Columns = dict[str, Tensor]
MODES: tuple[Aggregate, ...] = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
)  # fmt: skip
DECLARED: dict[str, tuple[LossFunction[..., Any], dict[str, Any]]] = {
    "ppo_clip": (losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.28}),
    "ppo_clip dual": (losses.ppo_clip, {"dual_clip": 1.5}),
    "policy_gradient": (losses.policy_gradient, {}),
    "entropy": (losses.entropy, {}),
    "kl": (losses.kl, {"estimator": "k3"}),
    "sft": (losses.sft, {}),
    "value_clip": (losses.value_clip, {"clip": 0.3}),
    "gspo": (losses.gspo, {"clip_low": 0.1, "clip_high": 0.2}),
    "gmpo": (losses.gmpo, {}),
    "cispo": (losses.cispo, {}),
    "sapo": (losses.sapo, {}),
    "dro": (losses.dro, {"beta": 0.3}),
    "dppo_tv": (losses.dppo_tv, {"threshold_low": 0.1, "threshold_high": 0.1, "ratio_cap": 1.5}),
    "dppo_kl": (losses.dppo_kl, {"ratio_cap": 1.5}),
    "clip_cov": (losses.clip_cov, {"clip_low": 0.1}),
    "kl_cov": (losses.kl_cov, {"coef": 0.5}),
}
SMOOTH = ("policy_gradient", "entropy", "kl", "sft", "sapo", "dro")
"""Losses that are differentiable everywhere, with no part of the gradient stopped."""


def batch(rows: int = 8, tokens: int = 7) -> tuple[Columns, Tensor]:
    """Columns with nan wherever the mask is 0; one row has no trained token."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    old = -noise().abs() - 0.05
    mask = noise() < 0.5
    mask[:, 0] = True
    mask[2] = False
    columns = {
        "old_logprobs": old,
        "logprobs": (old + 0.3 * noise()).clamp(max=-0.01),
        "ref_logprobs": old + 0.3 * noise(),
        "advantages": noise(),
        "entropy": noise().abs(),
        "old_values": noise(),
        "values": noise(),
        "returns": noise(),
        "high_covariance": (noise() > 0).double(),
    }
    return {name: torch.where(mask, column, math.nan) for name, column in columns.items()}, mask


def gradients(loss: Loss, columns: Columns, parts: list[tuple[slice, tuple[int, int]]], mask: Tensor) -> Columns:
    """The loss over a mini-batch that is cut into `parts` (rows, padding at left and right), and each gradient."""
    leaves = {name: column.clone().requires_grad_(name in TRAINED) for name, column in columns.items()}
    total = torch.zeros((), dtype=torch.float64)
    tokens = rows = 0
    for where, width in parts:
        given = {name: pad(leaf[where], width, value=math.nan) for name, leaf in leaves.items() if name in loss.reads}
        m = pad(mask[where], width)
        total = total + loss.total(given, m)[0]
        tokens, rows = tokens + int(m.sum()), rows + int(m.any(-1).sum())
    value = total / loss.denominator(tokens, rows)
    value.backward()
    found = {f"grad {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": value.detach(), **found}


@pytest.mark.parametrize("aggregate", MODES)
@pytest.mark.parametrize("name", DECLARED)
def test_neither_micro_batches_nor_padding_change_a_loss(name: str, aggregate: Aggregate) -> None:
    function, settings = DECLARED[name]
    loss = function(aggregate=aggregate, horizon=16, **settings)
    columns, mask = batch()
    whole = gradients(loss, columns, [(slice(0, 8), (0, 0))], mask)
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
    cuts = {size: [(slice(i, i + size), (0, 0)) for i in range(0, 8, size)] for size in (1, 2, 4)}
    pads = [[(slice(0, 8), width)] for width in ((0, 4), (5, 0), (2, 3))]
    ragged = [(slice(0, 3), (1, 0)), (slice(3, 4), (0, 6)), (slice(4, 8), (2, 2))]
    for parts in [*cuts.values(), *pads, ragged, ragged[::-1]]:
        found = gradients(loss, columns, parts, mask)
        assert found.keys() == whole.keys()
        for what, tensor in found.items():
            torch.testing.assert_close(tensor, whole[what], rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_smooth_losses_are_those_of_finite_differences(name: str) -> None:
    function, settings = DECLARED[name]
    loss = function(**settings)
    columns, mask = batch(3, 4)
    (trained,) = (column for column in loss.reads if column in TRAINED)

    def value(leaf: Tensor) -> Tensor:
        return loss.total({**columns, trained: leaf}, mask)[0]

    leaf = torch.where(mask, columns[trained], 0.0).requires_grad_()
    assert torch.autograd.gradcheck(value, (leaf,), atol=1e-6)


@pytest.mark.parametrize("name", DECLARED)
def test_a_broken_log_ratio_never_makes_a_gradient_that_is_not_finite(name: str) -> None:
    function, settings = DECLARED[name]
    loss = function(**settings)
    for logprob, old in [(-1000.0, -0.1), (-0.1, -1000.0)]:
        for sign in (1.0, -1.0, 0.0):
            columns = {column: torch.full((1, 2), -0.1) for column in loss.reads}
            columns |= {"logprobs": torch.tensor([[logprob, -0.1]]), "old_logprobs": torch.tensor([[old, -0.1]])}
            columns |= {"advantages": torch.full((1, 2), sign)}
            leaf = columns["logprobs"].requires_grad_()
            value = loss.total(columns, torch.ones(1, 2))[0]
            if value.requires_grad:
                value.backward()
                assert leaf.grad is not None
                assert torch.isfinite(leaf.grad).all()


# Formulas


def tokens(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted", "clipped"),
    [
        (1.1, 2.0, -2.2, 0), (1.5, 2.0, -2.56, 1), (0.5, 2.0, -1.0, 0), (0.5, -2.0, 1.6, 1), (1.5, -2.0, 3.0, 0),
        (9.0, -2.0, 6.0, 1),
    ],
)  # fmt: skip
def test_the_clipped_surrogate_is_pessimistic(ratio: float, advantage: float, wanted: float, clipped: int) -> None:
    logprobs = tokens(math.log(ratio) - 3).requires_grad_()
    value, metrics = losses.ppo_clip(
        logprobs, tokens(-3), tokens(advantage), clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    value.sum().backward()
    assert value.item() == pytest.approx(wanted, abs=1e-12)
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["ratio"].item() == pytest.approx(ratio)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0 if clipped else -advantage * ratio, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_ratio_on_policy_is_one_at_any_temperature(temperature: float) -> None:
    logits = tokens(2.0, 0.0)
    sampler = (logits / temperature).log_softmax(-1)[:, :1]
    if temperature == 0.5:
        assert sampler.item() == pytest.approx(-0.018150, abs=1e-6)
    _, metrics = losses.ppo_clip(sampler.clone(), sampler, tokens(1.0))
    assert metrics["ratio"].item() == 1.0
    if temperature == 0.5:
        _, metrics = losses.ppo_clip(logits.log_softmax(-1)[:, :1], sampler, tokens(1.0))
        assert metrics["ratio"].item() == pytest.approx(0.896929, abs=1e-6)


def test_the_value_clip_fraction_is_measured_before_the_clamp() -> None:
    values = tokens(2.0, 1.1).requires_grad_()
    loss = losses.value_clip(clip=0.2)
    columns = {"values": values, "old_values": tokens(1, 1), "returns": tokens(3, 3)}
    mask = torch.ones(1, 2)
    total, metrics = loss.total(columns, mask)
    (total / loss.denominator(2, 1)).backward()
    per_token, _ = losses.value_clip(**columns, clip=0.2)
    torch.testing.assert_close(per_token, tokens(1.62, 1.805))
    assert total.item() / 2 == pytest.approx(1.7125)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, tokens(0, -0.95))
    fraction, count = metrics["value_clip_fraction"]
    assert fraction.item() / count.item() == 0.5


def test_a_response_has_one_ratio_under_gspo_and_each_token_its_own_gradient() -> None:
    logprobs, old = tokens(-1.0, -2.0, -9.0).requires_grad_(), tokens(-1.3, -1.9, 0.0)
    mask = torch.tensor([[True, True, False]])
    value, metrics = losses.gspo(logprobs, old, tokens(2, 2, 2), mask, clip_low=0.2, clip_high=0.3)
    ratio = math.exp((0.3 - 0.1) / 2)
    assert value[0, :2].tolist() == pytest.approx([-2 * ratio] * 2)
    assert metrics["ratio"][0, :2].tolist() == pytest.approx([ratio] * 2)
    (slope,) = torch.autograd.grad(torch.where(mask, value, 0).sum(), logprobs)
    assert slope[0, :2].tolist() == pytest.approx([-2 * ratio] * 2)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    logprobs, old = tokens(-1.0, -2.0, -9.0), tokens(-1.9, -2.1, 0.0)
    mask = torch.tensor([[True, True, False]])
    value, _ = losses.gmpo(logprobs, old, tokens(2, 2, 7), mask)
    assert value[0].tolist() == pytest.approx([-2 * math.exp((0.4 + 0.1) / 2)] * 3)


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    logprobs = tokens(math.log(2) - 1).requires_grad_()
    value, metrics = losses.cispo(logprobs, tokens(-1), tokens(3.0), clip_high=0.5)
    value.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-1.5 * 3)
    assert metrics["clip_fraction"].item() == 1


def test_sapo_on_policy_has_the_gradient_of_reinforce() -> None:
    logprobs = tokens(-1.0, -2.0).requires_grad_()
    value, _ = losses.sapo(logprobs, logprobs.detach(), tokens(3.0, -2.0))
    value.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, tokens(-3.0, 2.0))


def test_dppo_lets_go_of_a_token_that_moved_too_much_mass() -> None:
    now, old = tokens(0.8, 0.3, 0.0102).log(), tokens(0.5, 0.5, 0.001).log()
    _, metrics = losses.dppo_tv(now, old, tokens(1, 1, 1))
    assert metrics["clip_fraction"].tolist() == [[1, 0, 0]]
    _, metrics = losses.dppo_kl(now, old, tokens(1, -1, 1))
    assert metrics["clip_fraction"].tolist() == [[1, 1, 0]]


def test_the_plain_losses_are_their_formulas() -> None:
    logprobs, old, advantage = tokens(-1.0), tokens(-1.5), tokens(2.0)
    assert losses.policy_gradient(logprobs, advantage).item() == 2.0
    assert losses.sft(logprobs).item() == 1.0
    assert losses.dro(logprobs, old, advantage, beta=0.4)[0].item() == pytest.approx(2.0 + 0.2 * 0.25)
    assert losses.kl(logprobs, old, estimator="k1")[0].item() == 0.5
    assert losses.entropy(tokens(0.7))[0].item() == 0.7


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda: losses.ppo_clip(clip_low=-1), "a range of a loss is negative\n  found:  clip_low=-1"),
        (lambda: losses.clip_cov(clip_high=float("nan")), "found:  clip_high=nan\n  wanted: clip_high >= 0"),
        (lambda: losses.gspo(clip_low="1"), "found:  clip_low=1"),
        (lambda: losses.value_clip(clip=-0.2), "found:  clip=-0.2"),
        (lambda: losses.dppo_tv(threshold_high=-0.2), "found:  threshold_high=-0.2"),
        (lambda: losses.dppo_kl(ratio_cap=0.0), "a token weighs at most ratio_cap"),
        (lambda: losses.ppo_clip(dual_clip=0.5), "dual_clip is a ratio above 1\n  found:  dual_clip=0.5"),
        (lambda: losses.sapo(tau_positive=0), "a gate's temperature is not positive\n  found:  tau_positive=0"),
        (lambda: losses.kl(estimator="k4"), "there is no such KL estimator\n  found:  'k4'"),
    ],
)
def test_settings_out_of_range_are_refused_when_a_loss_is_declared(declare: Callable[[], Loss], says: str) -> None:
    with pytest.raises(WrongType) as error:
        declare()
    assert says in str(error.value)


def test_settings_out_of_range_are_refused_on_tensors() -> None:
    x = tokens(-1.0)
    with pytest.raises(WrongType, match="a range of a loss is negative"):
        losses.ppo_clip(x, x, x, clip_low=-1)


def test_a_loss_is_declared_with_every_setting_that_it_needs() -> None:
    with pytest.raises(UnknownName, match="loss 'dro' needs a value for its setting 'beta'"):
        losses.dro()


def test_a_sum_of_losses_reads_each_column_once() -> None:
    loss = losses.ppo_clip(clip_low=0.2) - 0.005 * losses.entropy() + 0.01 * losses.kl(estimator="k3")
    assert loss.reads == ("logprobs", "old_logprobs", "advantages", "entropy", "ref_logprobs")
    columns, mask = batch()
    found = gradients(loss, columns, [(slice(0, 8), (0, 0))], mask)
    assert found.keys() == {"loss", "grad logprobs", "grad entropy"}
    wanted = -0.005 * mask.double() / mask.sum()
    torch.testing.assert_close(found["grad entropy"], wanted)


@fl.reward
def length(response: str) -> float:
    return float(len(response))


def test_the_values_of_a_stream_are_the_old_values_of_the_loss() -> None:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("any", mesh=fl.Mesh(dp=1), optimizer=fl.AdamW(lr=1e-3))
        critic = fl.Model("any", mesh=fl.Mesh(dp=1), head="value", optimizer=fl.AdamW(lr=1e-3), name="critic")
        samples = fl.rollout(policy, fl.prompts([{"prompt": "a"}], batch=1), n=4)
        values = fl.values(critic, samples)
        rewards = advantages.token_rewards(samples, length(samples))
        advantage = advantages.gae(samples, rewards, values, lam=0.9)
        fl.update(policy, samples, advantage, loss=losses.ppo_clip())
        fl.update(critic, samples, advantage, values, loss=losses.value_clip(), name="fit")

    bindings = {b.parameter: (b.source, b.column) for b in graph()["fit"].bindings}
    assert bindings["old_values"] == ("values", "values")
    assert bindings["returns"] == ("gae", "returns")

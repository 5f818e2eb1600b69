"""Masking, aggregation and declaration, on inputs that people really met."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl import losses
from flowrl.errors import NodeError, UnknownName, WrongType
from flowrl.loss import Aggregate, Loss

MODES: tuple[Aggregate, ...] = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
)  # fmt: skip


@fl.loss
def given(x: Tensor) -> Tensor:
    """A token loss that is given."""
    return x


def of(aggregate: Aggregate, horizon: int | None = 10) -> Loss:
    return given(aggregate=aggregate, horizon=horizon)


def evaluate(loss: Loss, parts: list[tuple[dict[str, Tensor], Tensor]]) -> Tensor:
    """A mini-batch of several micro-batches: sums add up, the denominator divides once."""
    total = torch.stack([loss.total(columns, mask)[0] for columns, mask in parts]).sum()
    tokens = sum(int(mask.sum()) for _, mask in parts)
    rows = sum(int(mask.bool().any(-1).sum()) for _, mask in parts)
    return total / loss.denominator(tokens, rows)


def test_a_masked_token_changes_neither_loss_nor_gradient() -> None:
    x = torch.tensor([[2.0, 50.0], [4.0, -30.0]], requires_grad=True)
    found = evaluate(of("token-mean"), [({"x": x}, torch.tensor([[1, 0], [1, 0]]))])
    found.backward()
    assert found.item() == 3.0
    assert x.grad is not None
    assert x.grad.tolist() == [[0.5, 0], [0.5, 0]]


def test_ranks_of_unequal_length_weigh_by_their_tokens() -> None:
    theta = torch.tensor(1.0, requires_grad=True)
    ranks = [({"x": theta * torch.tensor([row])}, torch.ones(1, len(row))) for row in ([8.0], [0.0, 0.0, 4.0])]
    evaluate(of("token-mean"), ranks).backward()
    assert theta.grad is not None
    assert theta.grad.item() == 3.0


@pytest.mark.parametrize("width", [3, 5, 10])
def test_a_constant_divisor_ignores_micro_batches_and_padded_width(width: int) -> None:
    x, mask = torch.zeros(2, width), torch.zeros(2, width)
    x[0, :2], x[1, :3], mask[0, :2], mask[1, :3] = 1.0, 2.0, 1, 1
    loss = of("seq-mean-token-sum-norm", 10)
    together = evaluate(loss, [({"x": x}, mask)])
    apart = evaluate(loss, [({"x": x[i : i + 1]}, mask[i : i + 1]) for i in range(2)])
    assert together.item() == pytest.approx(0.4)
    assert apart.item() == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("token-mean", 2.0), ("token-sum", 4.0), ("seq-mean-token-sum", 4.0), ("seq-mean-token-mean", 2.0),
     ("seq-mean-token-sum-norm", 0.4)],
)  # fmt: skip
def test_nan_under_the_mask_reaches_no_mode(mode: Aggregate, wanted: float) -> None:
    x = torch.tensor([[1.0, math.nan, 3.0]], requires_grad=True)
    found = evaluate(of(mode), [({"x": x}, torch.tensor([[1, 0, 1]]))])
    found.backward()
    assert found.item() == pytest.approx(wanted)
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_what_overflows_under_the_mask_has_no_gradient() -> None:
    @fl.loss
    def ratio(log_ratio: Tensor) -> Tensor:
        return log_ratio.exp()

    log_ratio = torch.tensor([[0.0, 1000.0, 0.0]], requires_grad=True)
    ratio(aggregate="token-sum").total({"log_ratio": log_ratio}, torch.tensor([[1, 0, 1]]))[0].backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [[1, 0, 1]]


def test_nan_on_a_trained_token_fails_with_its_place() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
    with pytest.raises(NodeError, match=r"(?s)a trained token is not finite.*nan at row 1, token 1.*columns: x"):
        of("token-mean").total({"x": x}, torch.ones(2, 2))


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_a_trained_token_adds_nothing(mode: Aggregate) -> None:
    full, empty = torch.ones(1, 4, requires_grad=True), torch.ones(1, 4, requires_grad=True)
    parts = [({"x": full}, torch.ones(1, 4)), ({"x": empty}, torch.zeros(1, 4))]
    found = evaluate(of(mode), parts)
    found.backward()
    alone = evaluate(of(mode), parts[:1])
    assert found.item() == alone.item()
    if mode in ("token-mean", "seq-mean-token-mean"):
        assert found.item() == pytest.approx(1.0)
    assert empty.grad is not None
    assert empty.grad.eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_trained_has_a_denominator_of_zero(mode: Aggregate) -> None:
    assert of(mode).denominator(0, 0) == 0
    assert of(mode).total({"x": torch.full((2, 3), math.nan)}, torch.zeros(2, 3))[0].item() == 0


def test_losses_add_up_with_their_weights() -> None:
    x, y, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]]), torch.ones(1, 2)

    @fl.loss
    def other(y: Tensor) -> Tensor:
        return y

    loss = given(aggregate="token-sum") - 0.5 * other() + other() * 0.1
    assert loss.reads == ("x", "y")
    assert loss.total({"x": x, "y": y}, mask)[0].item() == pytest.approx(3 - 15 + 3)
    assert str(loss) == "given() + -0.5 * other() + 0.1 * other(), token-sum"


def test_a_column_of_weights_multiplies_each_token() -> None:
    loss = given(weights="w", aggregate="token-sum")
    x = torch.tensor([[1.0, 2.0, 5.0]], requires_grad=True)
    w = torch.tensor([[0.5, 3.0, math.nan]], requires_grad=True)
    assert loss.reads == ("x", "w")
    value, _ = loss.total({"x": x, "w": w}, torch.tensor([[1, 1, 0]]))
    value.backward()
    assert value.item() == 6.5
    assert x.grad is not None
    assert x.grad.tolist() == [[0.5, 3.0, 0.0]]
    assert w.grad is None


def test_a_number_a_row_is_spread_over_its_tokens() -> None:
    assert of("token-sum").total({"x": torch.tensor([1.0, 2.0])}, torch.tensor([[1, 1], [0, 1]]))[0].item() == 4


def test_metrics_are_sums_over_trained_tokens() -> None:
    _, metrics = losses.entropy().total({"entropy": torch.tensor([[1.0, math.nan, 3.0]])}, torch.tensor([[1, 0, 1]]))
    total, count = metrics["entropy"]
    assert (total.item(), count.item()) == (4.0, 2)


def test_a_loss_that_is_already_averaged_is_refused() -> None:
    @fl.loss
    def averaged(x: Tensor) -> Tensor:
        return x.mean()

    with pytest.raises(NodeError, match=r"(?s)'averaged' does not give one number a token.*its loss is \[\].*\[2, 3\]"):
        averaged().total({"x": torch.ones(2, 3)}, torch.ones(2, 3))


def test_a_divisor_that_is_missing_is_refused_at_declaration() -> None:
    with pytest.raises(WrongType, match=r"(?s)divides by a constant length.*horizon=None.*horizon=max_new_tokens"):
        losses.ppo_clip(aggregate="seq-mean-token-sum-norm")


def test_an_unknown_mode_and_an_unknown_setting_name_the_nearest() -> None:
    with pytest.raises(WrongType, match=r"(?s)unknown aggregation mode.*token-mean"):
        losses.ppo_clip(aggregate="token_mean")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match=r"(?s)'ppo_clip' has no setting 'clip_hi'.*clip_high"):
        losses.ppo_clip(clip_hi=0.2)


def test_two_modes_in_one_sum_are_refused() -> None:
    with pytest.raises(WrongType, match=r"(?s)two terms of one loss have different aggregate.*divides once"):
        losses.ppo_clip(aggregate="token-sum") + losses.entropy(aggregate="token-mean")

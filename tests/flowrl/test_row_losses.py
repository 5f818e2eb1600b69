"""Losses with one number a row: what they are shown, which rows they are about, and what divides their sum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl import losses
from flowrl.errors import NodeError, WrongType
from flowrl.loss import Loss

Part = tuple[dict[str, Tensor], Tensor]


@fl.loss(per="row")
def squared_sum(logprobs: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor | tuple[Tensor, Tensor]]]:
    """The square of a row's sum: no sum of token losses."""
    value = scale * logprobs.sum(-1).square()
    return value, {"scale": scale, "large": (scale, scale > 2)}


def with_partner(side: Tensor, group: Tensor) -> Tensor:
    """Rows that have another one of their prompt on the other side."""
    other = (group[:, None] == group) & (side[:, None] * side < 0)
    return other.any(-1)


@fl.loss(per="row", where=with_partner)
def apart(logprobs: Tensor, side: Tensor, group: Tensor) -> Tensor:
    """Each row's distance to the sum of the others' of its prompt."""
    total = logprobs.sum(-1)
    same = (group[:, None] == group).to(total.dtype)
    return side * (same @ total - total).tanh() * total


def mean(loss: Loss, parts: list[Part]) -> Tensor:
    """A mini-batch in micro-batches, counted as a backend counts it."""
    total, tokens, rows = torch.zeros((), dtype=torch.float64), 0, 0
    for columns, mask in parts:
        total = total + loss.total(columns, mask)[0]
        alive = mask.any(-1)
        if loss.selects_by:
            alive[alive.clone()] = loss.select({name: columns[name][alive] for name in loss.selects_by})
        tokens, rows = tokens + int(mask[alive].sum()), rows + int(alive.sum())
    return total / loss.denominator(tokens, rows)


def batch() -> Part:
    """Four prompts of two rows, nan under the mask; row 3 has no trained token, row 6 no side."""
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(8, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 5, generator=generator) < 0.6
    mask[:, 0] = True
    mask[3] = False
    columns = {
        "logprobs": torch.where(mask, logprobs, math.nan),
        "scale": torch.arange(8, dtype=torch.float64),
        "side": torch.tensor([1.0, -1, 1, -1, -1, 1, 0, 1]),
        "group": torch.arange(8) // 2,
        "x": torch.where(mask, logprobs.sin(), math.nan),
    }
    return columns, mask


def take(part: Part, rows: slice) -> Part:
    return {name: column[rows] for name, column in part[0].items()}, part[1][rows]


def test_a_row_loss_is_averaged_over_rows_with_a_trained_token() -> None:
    columns, mask = batch()
    sums = torch.where(mask, columns["logprobs"], 0).sum(-1)
    wanted = (columns["scale"] * sums**2)[mask.any(-1)].sum() / 7
    loss = squared_sum()
    assert loss.mode == "seq-mean"
    assert not loss.couples
    torch.testing.assert_close(mean(loss, [(columns, mask)]), wanted)
    for size in (1, 2, 4):
        parts = [take((columns, mask), slice(i, i + size)) for i in range(0, 8, size)]
        torch.testing.assert_close(mean(loss, parts), wanted)


def test_metrics_of_rows_count_rows_and_some_of_them_only_where_they_say() -> None:
    columns, mask = batch()
    _, metrics = squared_sum().total(columns, mask)
    assert [float(number) for number in metrics["scale"]] == [28 - 3, 7]
    assert [float(number) for number in metrics["large"]] == [4 + 5 + 6 + 7, 4]


def test_rows_that_a_loss_is_not_about_count_in_nothing() -> None:
    columns, mask = batch()
    loss = apart()
    assert loss.couples
    assert loss.reads == ("logprobs", "side")
    assert loss.selects_by == ("side", "group")
    leaf = columns["logprobs"].clone().requires_grad_()
    found = mean(loss, [({**columns, "logprobs": leaf}, mask)])
    found.backward()
    sums = torch.where(mask, columns["logprobs"], 0).sum(-1).tolist()
    pairs = [(0, 1), (5, 4)]  # row 2 has lost its partner, rows 6 and 7 never were a pair
    wanted = sum(math.tanh(sums[b]) * sums[a] - math.tanh(sums[a]) * sums[b] for a, b in pairs) / 4
    assert found.item() == pytest.approx(wanted, rel=1e-12)
    assert leaf.grad is not None
    assert leaf.grad[[2, 3, 6, 7]].eq(0).all()
    assert leaf.grad[[0, 1, 4, 5]].abs().sum(-1).gt(0).all()
    parts = [take((columns, mask), slice(i, i + 2)) for i in range(0, 8, 2)]
    assert mean(loss, parts).item() == pytest.approx(wanted, rel=1e-12)


def test_who_loses_its_partner_to_another_term_is_left_out_too() -> None:
    def few(scale: Tensor) -> Tensor:
        return scale > 0  # not row 0

    @fl.loss(per="row", where=few)
    def other(scale: Tensor) -> Tensor:
        return scale

    columns, _ = batch()
    loss = apart() + other()
    kept = loss.select({name: columns[name] for name in loss.selects_by})
    assert kept.tolist() == [False, False, True, True, True, True, False, False]


def test_row_and_token_losses_add_up_under_a_mean_over_rows() -> None:
    columns, mask = batch()

    @fl.loss
    def given(x: Tensor) -> Tensor:
        return x

    loss = squared_sum() + 0.5 * given(aggregate="seq-mean-token-mean")
    x = torch.where(mask, columns["x"], 0).sum(-1) / mask.sum(-1).clamp(min=1)
    sums = torch.where(mask, columns["logprobs"], 0).sum(-1)
    wanted = (columns["scale"] * sums**2 + 0.5 * x).sum() / 7
    torch.testing.assert_close(mean(loss, [(columns, mask)]), wanted)
    assert str(loss) == "squared_sum() + 0.5 * given(), seq-mean-token-mean"


def test_weights_of_a_row_loss_are_one_a_row() -> None:
    columns, mask = batch()
    loss = squared_sum(weights="side")
    sums = torch.where(mask, columns["logprobs"], 0).sum(-1)
    wanted = (columns["side"] * columns["scale"] * sums**2).sum() / 7
    torch.testing.assert_close(mean(loss, [(columns, mask)]), wanted)
    with pytest.raises(NodeError, match=r"(?s)its weights, column 'x', is \[7, 5\].*a tensor \[rows\] = \[7\]"):
        squared_sum(weights="x").total(columns, mask)


def test_a_column_with_a_default_may_be_missing() -> None:
    @fl.loss(per="row")
    def with_offset(logprobs: Tensor, offset: Tensor | None = None) -> Tensor:
        return logprobs.sum(-1) + (0 if offset is None else offset)

    loss = with_offset()
    assert loss.optional == {"offset"}
    columns = {"logprobs": torch.ones(2, 3)}
    assert loss.total(columns, torch.ones(2, 3))[0].item() == 6
    assert loss.total({**columns, "offset": torch.tensor([1.0, 2.0])}, torch.ones(2, 3))[0].item() == 9


def test_a_micro_batch_without_a_row_adds_nothing_and_asks_nothing() -> None:
    leaf = torch.full((2, 3), math.nan, requires_grad=True)
    columns = {"logprobs": leaf, "side": torch.zeros(2), "group": torch.arange(2)}
    total, metrics = apart().total(columns, torch.ones(2, 3))
    total.backward()
    assert (total.item(), metrics) == (0, {})
    assert leaf.grad is not None
    assert leaf.grad.eq(0).all()


def test_a_row_s_loss_that_is_not_finite_fails_with_its_place() -> None:
    columns, mask = batch()
    columns["scale"][4] = math.inf
    with pytest.raises(NodeError, match=r"(?s)loss of a trained row is not finite.*inf at row 4.*columns: logprobs, s"):
        squared_sum().total(columns, mask)


def test_a_row_loss_that_gives_a_number_a_token_is_refused() -> None:
    @fl.loss(per="row")
    def tokens(x: Tensor) -> Tensor:
        return x

    with pytest.raises(NodeError, match=r"(?s)'tokens' does not give one number a row.*\[2, 3\].*\[rows\] = \[2\]"):
        tokens().total({"x": torch.ones(2, 3)}, torch.ones(2, 3))

    @fl.loss(per="row", where=lambda x: x.sum())
    def some(x: Tensor) -> Tensor:
        return x

    with pytest.raises(NodeError, match=r"(?s)'some' does not say of each row.*float32 \[\].*bool \[rows\] = \[2\]"):
        some().total({"x": torch.ones(2)}, torch.ones(2, 3))


def test_a_mean_over_tokens_of_a_row_loss_is_refused_at_declaration() -> None:
    with pytest.raises(WrongType, match=r"(?s)'squared_sum' gives one number a row.*'token-mean'.*leave aggregate="):
        squared_sum(aggregate="token-mean")
    with pytest.raises(WrongType, match=r"(?s)and 'sft' one a token.*no aggregate.*sft\(aggregate='seq-mean-token-m"):
        squared_sum() + losses.sft()
    with pytest.raises(WrongType, match=r"(?s)'sft' gives one number a token, and 'seq-mean' does not say"):
        losses.sft(aggregate="seq-mean")
    with pytest.raises(WrongType, match=r"(?s)per= of a loss.*'rows'.*'token' or 'row'"):
        fl.loss(per="rows")  # type: ignore[call-overload]

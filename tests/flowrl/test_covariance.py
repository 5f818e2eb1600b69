"""Tokens of large covariance, and the losses that hold them back, against formulas written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl import advantages, losses
from flowrl.errors import WrongType
from flowrl.runtime import run


def batch(rows: int = 12, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, advantages and a mask with holes; nan outside."""
    torch.manual_seed(0)
    mask = torch.rand(rows, tokens) < 0.6
    logprobs, advantage = -3 * torch.rand(rows, tokens).double(), 2 * torch.randn(rows, tokens).double()
    return torch.where(mask, logprobs, math.nan), torch.where(mask, advantage, math.nan), mask


def covariances(logprobs: Tensor, advantage: Tensor, mask: Tensor) -> dict[tuple[int, int], float]:
    """Of each trained token, by its place."""
    places = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    mean_p = sum(float(logprobs[place]) for place in places) / len(places)
    mean_a = sum(float(advantage[place]) for place in places) / len(places)
    return {place: (float(logprobs[place]) - mean_p) * (float(advantage[place]) - mean_a) for place in places}


def places(marked: Tensor) -> set[tuple[int, int]]:
    return {(i, t) for i, t in marked.nonzero().tolist()}


def test_without_a_range_the_largest_covariances_are_marked() -> None:
    given = batch()
    found = covariances(*given)
    wanted = sorted(found, key=found.__getitem__, reverse=True)[: int(0.1 * len(found))]
    assert len(wanted) > 3
    assert places(losses.high_covariance(*given, share=0.1)) == set(wanted)


def test_within_a_range_some_are_drawn_and_others_with_another_seed() -> None:
    given = batch()
    inside = {place for place, covariance in covariances(*given).items() if 0.5 < covariance < 3}
    assert places(losses.high_covariance(*given, share=1.0, low=0.5, high=3.0)) == inside
    share = 0.5 * len(inside) / int(given[2].sum())
    drawn = [places(losses.high_covariance(*given, share=share, low=0.5, high=3.0, seed=seed)) for seed in range(40)]
    assert all(some < inside and len(some) == len(inside) // 2 for some in drawn)
    for place in inside:  # each is drawn about as often
        assert 8 <= sum(place in some for some in drawn) <= 32


@pytest.mark.parametrize("settings", [{"share": 0.1}, {"share": 0.05, "low": 0.5, "high": 3.0}])
def test_the_marks_depend_neither_on_the_order_of_rows_nor_on_padding(settings: dict[str, Any]) -> None:
    logprobs, advantage, mask = batch()
    wanted = losses.high_covariance(logprobs, advantage, mask, **settings)
    order = torch.randperm(len(mask))
    assert torch.equal(
        losses.high_covariance(logprobs[order], advantage[order], mask[order], **settings), wanted[order]
    )
    for pad in [(0, 3), (3, 0)]:
        wide = [torch.nn.functional.pad(x, pad, value=math.nan) for x in (logprobs, advantage)]
        found = losses.high_covariance(*wide, torch.nn.functional.pad(mask, pad), **settings)
        assert torch.equal(found[:, pad[0] : pad[0] + mask.shape[1]], wanted)


def test_one_token_is_marked_at_least_and_none_where_nothing_is_trained_or_inside() -> None:
    logprobs, advantage, mask = batch()
    assert int(losses.high_covariance(logprobs, advantage, mask, share=1e-6).sum()) == 1
    assert not losses.high_covariance(logprobs, advantage, mask, share=0.5, low=1e6).any()
    assert not losses.high_covariance(logprobs, advantage, torch.zeros_like(mask), share=0.5).any()


def test_a_number_a_row_is_the_advantage_of_its_tokens() -> None:
    logprobs, _, mask = batch()
    per_row = torch.randn(len(mask)).double()
    wide = per_row[:, None].expand(mask.shape)
    found = losses.high_covariance(logprobs, per_row, mask, share=0.1)
    assert torch.equal(found, losses.high_covariance(logprobs, wide, mask, share=0.1))


def gradient(function: Callable[..., Any], marked: Tensor, **settings: Any) -> tuple[Tensor, Tensor, list[float]]:
    """Losses and gradient at three tokens of ratio e**0.1, e**0.5 and e**-0.5, with advantages 1, 2 and -1."""
    old = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64)
    now = torch.tensor([[-0.9, -0.5, -1.5]], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    value, metrics = function(now, old, advantage, marked, **settings)
    (slope,) = torch.autograd.grad(value.sum(), now)
    return value[0].detach(), slope[0], metrics["clip_fraction" if "clip_fraction" in metrics else "ratio"][0].tolist()


def test_clip_cov_is_the_clipped_surrogate_but_for_the_marked_tokens() -> None:
    value, slope, clipped = gradient(losses.clip_cov, torch.tensor([[True, False, False]]))
    assert value.tolist() == pytest.approx([0.0, -2 * 1.2, 0.8])
    assert slope.tolist() == [0.0, 0.0, 0.0]
    assert clipped == [1.0, 1.0, 1.0]
    value, slope, clipped = gradient(losses.clip_cov, torch.tensor([[False, True, True]]))
    assert value.tolist() == pytest.approx([-math.exp(0.1), 0.0, 0.0])
    assert slope.tolist() == pytest.approx([-math.exp(0.1), 0.0, 0.0])
    assert clipped == [0.0, 1.0, 1.0]


def test_kl_cov_is_the_surrogate_and_a_penalty_on_the_marked_tokens() -> None:
    value, slope, ratio = gradient(losses.kl_cov, torch.tensor([[False, True, True]]), coef=0.3)
    assert ratio == pytest.approx([math.exp(0.1), math.exp(0.5), math.exp(-0.5)])
    assert value.tolist() == pytest.approx([-math.exp(0.1), -2 * math.exp(0.5) + 0.15, math.exp(-0.5) + 0.15])
    assert slope.tolist() == pytest.approx([-math.exp(0.1), -2 * math.exp(0.5) + 0.3, math.exp(-0.5) - 0.3])


# In a graph

ROWS = [{"prompt": f"{i}>"} for i in range(8)]


@fl.reward
def remainders(response_ids: list[int]) -> float:
    return sum(int(token) % 7 for token in response_ids) / 10


@fl.graph
def covariant(share: float = 0.25, low: float | None = None, high: float | None = None) -> None:
    policy = fl.Model("tiny", backend="tiny", mesh=fl.Mesh(device="cpu"), optimizer=fl.AdamW(lr=0.02))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=4, max_new_tokens=4)
    advantage = advantages.grpo(samples, remainders(samples))
    marked = losses.high_covariance(samples, advantage, share=share, low=low, high=high)
    fl.update(policy, samples, advantage, marked, loss=losses.clip_cov(), max_tokens=24)


def test_an_update_reads_the_marks_of_the_whole_batch(capsys: pytest.CaptureFixture[str]) -> None:
    run(covariant(), steps=1)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1 ")]
    told = dict(word.split("=") for word in line.split() if "=" in word)
    tokens = int(told["response_tokens"])
    assert float(told["clip_fraction"]) == pytest.approx(int(0.25 * tokens) / tokens, abs=5e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0.0}, "a share of all tokens is marked"),
        ({"low": 5.0, "high": 1.0}, "the marked covariances lie in a range"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_run(settings: dict[str, float], message: str) -> None:
    with pytest.raises(WrongType, match=f"node 'high_covariance': {message}"):
        covariant(**settings)  # type: ignore[arg-type]

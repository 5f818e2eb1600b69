"""Corrections between sampler and trainer against formulas written out here, alone and in a graph that runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl import advantages, correction, losses
from flowrl.errors import UnknownColumn, WrongType
from flowrl.runtime import run


def policies(seed: int = 0, spread: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of a sampler and of a trainer, nan outside a mask with holes and an empty row."""
    torch.manual_seed(seed)
    mask = torch.rand(6, 7) < 0.6
    mask[3] = False
    sampler = -torch.rand(6, 7).double()
    trainer = sampler + spread * torch.randn(6, 7).double()
    return torch.where(mask, sampler, math.nan), torch.where(mask, trainer, math.nan), mask


def ratios(row: int, sampler: Tensor, trainer: Tensor, mask: Tensor) -> list[float]:
    """The trainer's probability over the sampler's of each trained token of a row."""
    return [math.exp(float(trainer[row, t] - sampler[row, t])) for t in range(mask.shape[1]) if mask[row, t]]


def expect_tokens(found: Tensor, mask: Tensor, wanted: Callable[[int], list[float]]) -> None:
    for row in range(len(mask)):
        assert found[row][mask[row]].tolist() == pytest.approx(wanted(row), abs=1e-12)
    assert found[~mask].eq(0).all()


def test_a_token_s_weight_is_its_capped_ratio() -> None:
    given = policies()
    found = correction.truncated_is(*given, cap=1.2)
    assert found.dtype == torch.float64
    assert 0 < int((found == 1.2).sum()) < int(given[2].sum())
    expect_tokens(found, given[2], lambda row: [min(ratio, 1.2) for ratio in ratios(row, *given)])


def test_a_response_s_weight_is_the_capped_product_of_its_ratios() -> None:
    given = policies()
    found = correction.truncated_is(*given, cap=1.5, level="sequence")
    expect_tokens(
        found,
        given[2],
        lambda row: [min(math.prod(ratios(row, *given)), 1.5)] * len(ratios(row, *given)),
    )


def test_icepop_keeps_a_ratio_within_its_range_and_no_other() -> None:
    given = policies()
    found = correction.icepop(*given, low=0.8, high=1.3)
    expect_tokens(found, given[2], lambda row: [r if 0.8 <= r <= 1.3 else 0.0 for r in ratios(row, *given)])


K: dict[str, Callable[[float], float]] = {
    "k1": lambda ratio: 1 / ratio,  # as the ratio that its bounds are: the sampler's probability over the trainer's
    "k2": lambda ratio: 0.5 * math.log(ratio) ** 2,
    "k3": lambda ratio: ratio - 1 - math.log(ratio),
}
OVER_ROWS: dict[tuple[str, str], Callable[[list[float]], float]] = {
    ("seq-sum", "k1"): math.prod,
    ("seq-mean", "k1"): lambda found: math.prod(found) ** (1 / len(found)),
    **{("seq-sum", k): sum for k in ("k2", "k3")},
    **{("seq-mean", k): lambda found: sum(found) / len(found) for k in ("k2", "k3")},
    **{("seq-max", k): max for k in ("k2", "k3")},
}


@pytest.mark.parametrize(("by", "estimator"), [*OVER_ROWS, *(("token", k) for k in K)])
def test_what_is_too_far_from_the_trainer_is_rejected(by: Any, estimator: Any) -> None:
    kept = total = 0
    for seed in range(4):
        given = policies(seed)
        bounds = {"low": 0.8, "high": 1.25} if estimator == "k1" else {"high": 0.12}
        found = correction.reject(*given, by=by, estimator=estimator, **bounds)
        assert found.dtype == torch.bool
        for row in range(6):
            each = [K[estimator](ratio) for ratio in ratios(row, *given)]
            if by != "token":
                each = [OVER_ROWS[by, estimator](each)] * len(each) if each else []
            inside = [bounds.get("low", 0.0) <= x <= bounds["high"] for x in each]
            assert found[row][given[2][row]].tolist() == inside
        assert not found[~given[2]].any()
        kept, total = kept + int(found.sum()), total + int(given[2].sum())
    assert 0 < kept < total


def test_padding_on_either_side_changes_nothing() -> None:
    sampler, trainer, mask = policies()
    for function in (
        lambda *x: correction.truncated_is(*x, level="sequence"),
        correction.icepop,
        lambda *x: correction.reject(*x, by="seq-mean", low=0.9, high=1.1),
    ):
        wanted = function(sampler, trainer, mask)
        for pad in [(0, 3), (3, 0)]:
            wide = [torch.nn.functional.pad(x, pad, value=math.nan) for x in (sampler, trainer)]
            found = function(*wide, torch.nn.functional.pad(mask, pad))
            assert torch.equal(found[:, pad[0] : pad[0] + 7], wanted)


def test_an_impossible_ratio_stays_finite_and_a_log_prob_that_is_not_is_refused() -> None:
    mask = torch.ones(1, 2)
    far, near = torch.tensor([[-900.0, -1.0]]), torch.tensor([[-0.1, -1.0]])
    assert correction.truncated_is(far, near, mask).tolist() == [[2.0, 1.0]]
    assert correction.icepop(far, near, mask).tolist() == [[0.0, 1.0]]
    assert correction.reject(far, near, mask, by="token", low=0.9, high=1.1).tolist() == [[False, True]]
    with pytest.raises(ValueError, match=r"old_logprobs is nan at \[0, 0\]"):
        correction.truncated_is(far, torch.tensor([[math.nan, -1.0]]), mask)


# In a graph

ROWS = [{"prompt": f"{i}>"} for i in range(12)]


@fl.reward
def remainders(response_ids: list[int]) -> float:
    """Varies among the responses of an untrained model, so that each step changes the weights."""
    return sum(int(token) % 7 for token in response_ids) / 10


@fl.graph
def corrected(staleness: int = 0) -> None:
    policy = fl.Model("tiny", backend="tiny", mesh=fl.Mesh(device="cpu"), optimizer=fl.AdamW(lr=0.1))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=4, max_new_tokens=4, staleness=staleness)
    recomputed = fl.logprobs(policy, samples)
    weights = correction.truncated_is(samples, recomputed, cap=2.0)
    kept = correction.reject(samples, recomputed, by="seq-mean", low=0.99, high=1.01)
    advantage = advantages.grpo(samples, remainders(samples))
    loss = losses.ppo_clip(weights="importance_weights")
    fl.update(policy, samples, advantage, recomputed, weights, mask=kept, loss=loss, minibatches=2)


def metrics_of(folder: Path, **settings: Any) -> list[dict[str, float]]:
    run(corrected(**settings), steps=3, run_dir=folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_on_policy_every_weight_is_one_and_nothing_is_rejected(tmp_path: Path) -> None:
    for line in metrics_of(tmp_path):
        assert line["truncated_is/weight"] == pytest.approx(1, abs=1e-5)
        assert line["truncated_is/rejected"] == line["reject/rejected"] == 0


def test_samples_of_an_older_version_are_weighted_and_left_out_of_the_update(tmp_path: Path) -> None:
    first, second, _ = metrics_of(tmp_path, staleness=1)
    assert (first["lag"], second["lag"]) == (0, 1)
    assert first["reject/rejected"] == 0
    assert 0 < second["reject/rejected"] < 1
    assert abs(second["truncated_is/weight"] - 1) > 1e-4
    assert second["tokens"] == pytest.approx(second["response_tokens"] * (1 - second["reject/rejected"]))


def test_a_correction_without_the_trainer_s_log_probs_says_how_to_get_them() -> None:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=0.02))
        correction.icepop(fl.rollout(policy, fl.prompts(ROWS, batch=4), n=4))

    with pytest.raises(UnknownColumn, match="reads column 'old_logprobs'") as error:
        graph()
    assert error.value.fix == "pass fl.logprobs(policy, samples), of the model that is trained"


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (correction.truncated_is, {"cap": 0.0}, "weights are capped at a positive number"),
        (correction.truncated_is, {"level": "sequences"}, "level= has an unknown value"),
        (correction.icepop, {"low": 2.0, "high": 0.5}, "kept weights lie in a range"),
        (correction.reject, {"by": "row", "high": 1.1}, "by= has an unknown value"),
        (correction.reject, {"by": "seq-max", "high": 1.1, "estimator": "k1"}, "estimator= has an unknown value"),
        (correction.reject, {"by": "token", "low": 1.1, "high": 0.9}, "what k1 rejects is not bounded so"),
        (correction.reject, {"by": "token", "low": 0.1, "high": 0.9, "estimator": "k2"}, "what k2 rejects"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_run(
    function: Any, settings: dict[str, Any], message: str
) -> None:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=0.02))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=4)
        function(samples, fl.logprobs(policy, samples), name="here", **settings)

    with pytest.raises(WrongType, match=f"node 'here': {message}") as error:
        graph()
    assert error.value.at is not None
    assert error.value.at.file.endswith("test_correction.py")

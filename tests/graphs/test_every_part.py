"""Every estimator and every policy loss, in a graph that checks and trains on the small backend."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, correction, losses, preferences
from flowrl.runtime import run
from flowrl.stream import Samples, Stream

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
Estimate = Callable[[fl.Model, Samples, Stream], Stream]


@fl.reward
def evenness(response: str) -> float:
    return sum(byte % 2 == 0 for byte in response.encode()) / 4


@fl.reward
def brevity(response: str) -> float:
    return -len(response) / 10


@fl.node(out=fl.Metrics)
def highest(scores: Any) -> float:
    return float(scores.max())


def by_teacher(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
    highest(samples, scores)  # it needs no scores; somebody has to read them
    return advantages.distill(samples, fl.logprobs(fl.Model("teacher", backend="tiny"), samples))


def model(**settings: Any) -> fl.Model:
    return fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-2), **settings)


def trains(folder: Path, estimate: Estimate, loss: fl.Loss, *others: Estimate, **named: Estimate) -> None:
    """Two steps: every row is trained on, and the weights move by finite numbers."""

    @fl.graph
    def graph() -> None:
        policy = model()
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=4, max_new_tokens=4)
        scores = evenness(samples)
        streams = [each(policy, samples, scores) for each in (estimate, *others)]
        keyed = {name: each(policy, samples, scores) for name, each in named.items()}
        fl.update(policy, samples, *streams, loss=loss, **keyed)

    assert run(graph(), steps=2, run_dir=folder).consumed == 2 * 4 * 4
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert math.isfinite(step["loss"])
        assert 0 < step["grad_norm"] < math.inf


ESTIMATORS: dict[str, Estimate] = {
    **{
        name: lambda policy, samples, scores, name=name: getattr(advantages, name)(samples, scores)
        for name in ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_pp_baseline")
    },
    "gdpo": lambda policy, samples, scores: advantages.gdpo(samples, scores, brevity(samples), weights=(1.0, 0.5)),
    "reinforce_pp": lambda policy, samples, scores: advantages.reinforce_pp(
        samples, advantages.token_rewards(samples, scores)
    ),
    "otb": lambda policy, samples, scores: advantages.otb(
        samples, advantages.token_rewards(samples, scores), fl.logit_energy(policy, samples)
    ),
    "distill": by_teacher,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_trains(name: str, tmp_path: Path) -> None:
    trains(tmp_path, ESTIMATORS[name], losses.ppo_clip())


def group_relative(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
    return advantages.grpo(samples, scores)


def best_and_worst(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
    return preferences.best_and_worst(samples, scores)


def reference(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
    return fl.logprobs(policy.frozen(), samples)


POLICY_LOSSES = {
    "ppo_clip": losses.ppo_clip(dual_clip=3.0),
    "policy_gradient": losses.policy_gradient(),
    "gspo": losses.gspo(aggregate="seq-mean-token-mean"),
    "gmpo": losses.gmpo(aggregate="seq-mean-token-mean"),
    "cispo": losses.cispo(),
    "sapo": losses.sapo(),
    "dro": losses.dro(beta=0.1),
    "dppo_tv": losses.dppo_tv(),
    "dppo_kl": losses.dppo_kl(),
}
"""Those that read advantages, and the ratio to the sampler's policy if anything."""


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_trains(name: str, tmp_path: Path) -> None:
    trains(tmp_path, group_relative, POLICY_LOSSES[name] - 0.01 * losses.entropy())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_every_kl_trains_as_a_term(estimator: Any, tmp_path: Path) -> None:
    loss = losses.ppo_clip() + 0.1 * losses.kl(estimator=estimator)
    trains(tmp_path, group_relative, loss, reference)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_every_covariance_loss_trains(name: str, tmp_path: Path) -> None:
    def marked(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
        return losses.high_covariance(samples, advantages.grpo(samples, scores, name="again"), share=0.2)

    trains(tmp_path, group_relative, getattr(losses, name)(), marked)


@pytest.mark.parametrize(
    "correct",
    [
        lambda samples, old: correction.truncated_is(samples, old, cap=2.0),
        lambda samples, old: correction.icepop(samples, old),
    ],
    ids=["truncated_is", "icepop"],
)
def test_every_correction_weighs_a_loss(correct: Callable[..., Stream], tmp_path: Path) -> None:
    def again(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
        return fl.logprobs(policy, samples)

    def weights(policy: fl.Model, samples: Samples, scores: Stream) -> Stream:
        return correct(samples, fl.logprobs(policy, samples, name="once_more"))

    trains(tmp_path, group_relative, losses.ppo_clip(weights="importance_weights"), again, weights)


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo"])
def test_every_preference_loss_trains(name: str, tmp_path: Path) -> None:
    loss = getattr(losses, name)()
    trains(tmp_path, best_and_worst, loss, *([reference] if "ref_logprobs" in loss.reads else []))


def test_no_estimator_and_no_loss_is_left_out() -> None:
    elsewhere = {"gae", "remax", "greedy_baseline", "token_rewards"}  # in ready graphs, which test_graphs.py runs
    assert {*ESTIMATORS, *elsewhere} == set(advantages.__all__)
    here = {*POLICY_LOSSES, "kl", "entropy", "clip_cov", "kl_cov", "high_covariance", "dpo", "simpo", "orpo"}
    elsewhere = {"value_clip", "ppo_lagrangian", "sft", "kto", "distill", "bradley_terry"}
    assert here | elsewhere == set(losses.__all__)

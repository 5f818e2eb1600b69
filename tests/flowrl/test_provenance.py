"""Where log-probs come from, and which of them may be compared."""

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, correction, losses
from flowrl.check import check, notes
from flowrl.graph import Graph
from flowrl.provenance import Provenance, compared, provenance
from flowrl.visualize import to_text

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@fl.node(out="old_logprobs")
def shifted(logprobs: list[float]) -> list[float]:
    return [each + 1.0 for each in logprobs]


@fl.node(out="own_weights")
def own_weights(logprobs: list[float]) -> list[float]:
    return [1.0 for _ in logprobs]


def traced(body: Callable[..., None], *, temperature: float = 1.0, sampler: str = "policy") -> Graph:
    """A graph that samples from `sampler`, and whose `body` trains a policy on it."""

    @fl.graph
    def graph() -> None:
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        teacher = fl.Model("model", name="teacher")
        prompts = fl.prompts(ROWS, batch=8)
        samples = fl.rollout(
            policy if sampler == "policy" else teacher, prompts, n=4, max_new_tokens=8, temperature=temperature
        )
        body(policy, samples, advantages.grpo(samples, exact_match(samples)))

    return graph()


def with_a_reference(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    reference = fl.logprobs(policy.frozen(), samples, name="reference")
    before = fl.logprobs(policy, samples, name="before")
    fl.update(policy, samples, advantage, reference, before, loss=losses.ppo_clip() + losses.kl())


def test_the_provenance_of_a_column_follows_from_the_graph() -> None:
    graph = traced(with_a_reference, temperature=0.6)
    found = {name: provenance(graph, name, graph[name].outputs[-1]) for name in ("reference", "before")}
    assert found["reference"] == Provenance(model="reference", temperature=0.6, version="initial weights")
    assert found["before"] == Provenance(model="policy", temperature=0.6, version="before the update")
    sampled = provenance(graph, "rollout", "logprobs")
    assert sampled == Provenance(model="policy", temperature=0.6, version="as sampled")
    assert sampled.support == "full vocabulary"
    assert provenance(graph, "rollout", "mask") is None
    assert provenance(graph, "exact_match", "scores") is None
    assert compared(graph, graph["update"]) == {
        "old_logprobs": found["before"],
        "ref_logprobs": found["reference"],
        "sampler_logprobs": sampled,
    }


def test_greedy_samples_have_log_probs_at_temperature_1() -> None:
    graph = traced(with_a_reference, temperature=0.0)
    assert {str(each) for each in compared(graph, graph["update"]).values()} == {
        "policy (before the update, temperature 1)",
        "policy (as sampled, temperature 1)",
        "reference (initial weights, temperature 1)",
    }
    assert check(graph) == []


def test_a_drawing_says_what_is_compared() -> None:
    text = " ".join(to_text(traced(with_a_reference, temperature=0.6), width=200, ascii_only=True).split())
    assert (
        "compares old_logprobs: policy (before the update, temperature 0.6); ref_logprobs: reference (initial" in text
    )


def on_policy(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())


def recomputed(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    fl.update(policy, samples, advantage, fl.logprobs(policy, samples), loss=losses.ppo_clip())


def distilled(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    fl.update(policy, samples, advantage, loss=losses.policy_gradient())


def weighed(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    weights = correction.truncated_is(samples, fl.logprobs(policy, samples))
    fl.update(policy, samples, advantage, weights, loss=losses.policy_gradient(weights="importance_weights"))


def weighed_and_recomputed(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    before = fl.logprobs(policy, samples)
    weights = correction.icepop(samples, before)
    loss = losses.ppo_clip(weights="importance_weights")
    fl.update(policy, samples, advantage, before, weights, loss=loss)


def recomputed_twice(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    weights = correction.truncated_is(samples, fl.logprobs(policy, samples))
    loss = losses.ppo_clip(weights="importance_weights")
    fl.update(policy, samples, advantage, fl.logprobs(policy, samples), weights, loss=loss)


def weighed_by_their_own(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    fl.update(policy, samples, advantage, own_weights(samples), loss=losses.ppo_clip(weights="own_weights"))


def narrowed(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
    before = fl.logprobs(policy, samples)
    kept = correction.reject(samples, before, by="token", low=0.5, high=2.0)
    fl.update(policy, samples, advantage, before, mask=kept, loss=losses.ppo_clip())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("body", [on_policy, recomputed, distilled, weighed, weighed_and_recomputed, narrowed])
def test_what_compares_like_with_like_is_right(body: Any, temperature: float) -> None:
    graph = traced(body, temperature=temperature)
    assert check(graph) == []
    assert notes(graph, cores=8) == []


@pytest.mark.parametrize(
    "body", [recomputed, distilled, weighed, weighed_and_recomputed, recomputed_twice, weighed_by_their_own, narrowed]
)
def test_samples_of_another_model_are_trained_on_by_saying_how(body: Any) -> None:
    assert check(traced(body, sampler="teacher")) == []


def test_samples_of_another_model_are_no_samples_of_the_policy_as_they_are() -> None:
    [error] = check(traced(on_policy, sampler="teacher"))
    assert (
        error.found
        == "ppo_clip reads old_logprobs = 'logprobs' of node 'rollout', of teacher (as sampled, temperature 1)"
    )
    assert "fl.logprobs(policy, samples)" in str(error.fix)


def test_log_probs_of_a_function_are_allowed_with_a_note() -> None:
    def renamed(policy: fl.Model, samples: fl.Samples, advantage: fl.Advantages) -> None:
        fl.update(policy, samples, advantage, shifted(samples), loss=losses.ppo_clip())

    graph = traced(renamed)
    assert check(graph) == []
    assert notes(graph, cores=8) == [
        "node 'update': flowrl cannot know of which model and temperature 'old_logprobs' of node 'shifted' is"
    ]

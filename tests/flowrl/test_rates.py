import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import advantages, losses, rates
from flowrl.check import check
from flowrl.errors import RateError
from flowrl.graph import Graph
from flowrl.rates import bounds

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(4)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@fl.node(out="scores")
def again(scores: float) -> float:
    return scores


def build(
    batch: int = 32, n: int = 8, staleness: int = 0, steps: int = 1, filtered: bool = False, chain: int = 0
) -> Graph:
    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        prompts = fl.prompts(ROWS, batch=batch, last="wrap", max_prompt_tokens=100)
        samples: Any = fl.rollout(policy, prompts, n=n, max_new_tokens=10, staleness=staleness)
        scores = exact_match(samples)
        for _ in range(chain):
            scores = again(samples, scores)
        if filtered:
            samples = fl.filter(samples, scores, keep=lambda scores: True, per="group")
        advantage = advantages.gpg(samples, scores)
        fl.update(policy, samples, advantage, loss=losses.ppo_clip(), batch=steps * batch)

    return graph()


def test_the_repetition_vector_counts_firings_of_one_version() -> None:
    assert bounds(build()).repetitions == {
        "prompts": 1,
        "rollout": 32,
        "exact_match": 256,
        "gpg": 1,
        "update": 1,
    }


def test_an_update_of_two_batches_reads_prompts_twice() -> None:
    assert bounds(build(batch=4, n=2, staleness=1, steps=2)).repetitions == {
        "prompts": 2,
        "rollout": 8,
        "exact_match": 16,
        "gpg": 1,
        "update": 1,
    }


def test_an_edge_holds_the_rows_of_staleness_plus_one_versions() -> None:
    edges = bounds(build(staleness=2)).edges
    sampled = edges["rollout", "exact_match"]
    assert (sampled.rows, sampled.unit, sampled.num_tokens) == (3 * 32 * 8, "samples", 3 * 32 * 8 * 10)
    prompts = edges["prompts", "rollout"]
    assert (prompts.rows, prompts.unit, prompts.num_tokens) == (3 * 32, "prompts", 3 * 32 * 100)
    assert edges["exact_match", "gpg"].num_tokens is None
    assert edges["prompts", "exact_match"].num_tokens is None
    assert all(0 < bound.peak <= bound.rows for bound in edges.values())


def test_a_filter_changes_no_rate() -> None:
    plain, filtered = bounds(build()), bounds(build(filtered=True))
    assert filtered.repetitions == {**plain.repetitions, "filter": 32}
    assert filtered.edges["filter", "update"].rows == 32 * 8


def refilled(
    waves: int, n: int = 8, staleness: int = 0, steps: int = 1, batch: int = 32, before: bool = False
) -> Graph:
    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        prompts = fl.prompts(ROWS, batch=batch, last="wrap", max_prompt_tokens=100)
        samples = fl.rollout(policy, prompts, n=n, max_new_tokens=10, staleness=staleness)
        scores = exact_match(samples)
        judged = whole(samples, scores) if before else scores
        kept = fl.filter(samples, judged, keep=lambda scores: True, per="group", refill=waves)
        level = whole(samples, scores, name="level")
        advantage = advantages.gpg(kept, scores)
        fl.update(policy, kept, advantage, level=level, loss=scaled(), batch=steps * batch)

    return graph()


@fl.node(out="scores", per="batch")
def whole(scores: Any) -> Any:
    return scores


@fl.loss
def scaled(logprobs: Any, advantages: Any, level: Any) -> Any:
    return -advantages * logprobs * level


def test_the_longest_step_of_a_refilled_graph_is_the_iteration() -> None:
    found = bounds(refilled(waves=4, staleness=1))
    assert found.repetitions == {
        "prompts": 4,
        "rollout": 4 * 32,
        "exact_match": 4 * 32 * 8,
        "filter": 4 * 32,
        "level": 1,
        "gpg": 1,
        "update": 1,
    }
    rows = {edge: bound.rows for edge, bound in found.edges.items()}
    assert rows["prompts", "rollout"] == 2 * 4 * 32
    assert rows["rollout", "exact_match"] == rows["exact_match", "filter"] == 2 * 4 * 32 * 8
    assert rows["rollout", "update"] == rows["level", "update"] == rows["exact_match", "gpg"] == 2 * 4 * 32 * 8
    assert rows["filter", "update"] == rows["filter", "gpg"] == rows["gpg", "update"] == 2 * 32 * 8


def test_a_filter_that_waits_for_the_step_which_it_fills_deadlocks_and_is_named() -> None:
    with pytest.raises(RateError, match="the bounded queues deadlock") as caught:
        bounds(refilled(waves=2, before=True))
    assert "'filter' waits for 'whole'" in str(caught.value)
    assert "'prompts' waits for 'filter'" in str(caught.value)
    assert bounds(refilled(waves=1, before=True)).repetitions["update"] == 1, "one wave refills nothing"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    waves=st.integers(1, 6), batch=st.integers(1, 9), n=st.integers(1, 5), staleness=st.integers(0, 4),
    steps=st.integers(1, 5),
)  # fmt: skip
def test_the_longest_step_runs_to_its_end_within_the_bounds(
    waves: int, batch: int, n: int, staleness: int, steps: int
) -> None:
    found = bounds(refilled(waves, n, staleness, steps, batch))
    assert found.repetitions["rollout"] == waves * steps * batch
    assert all(bound.peak <= bound.rows for bound in found.edges.values())


def test_queues_too_small_for_a_group_deadlock_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_capacity", lambda origins, source, target: 1)
    with pytest.raises(RateError, match="the bounded queues deadlock") as caught:
        bounds(build())
    assert "'gpg' waits for 'exact_match'" in str(caught.value)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9), n=st.integers(1, 5), staleness=st.integers(0, 4), steps=st.integers(1, 5),
    filtered=st.booleans(),
)  # fmt: skip
def test_one_iteration_runs_to_its_end_within_the_bounds(
    batch: int, n: int, staleness: int, steps: int, filtered: bool
) -> None:
    found = bounds(build(batch, n, staleness, steps, filtered))
    assert found.repetitions["rollout"] == steps * batch
    assert all(bound.peak <= bound.rows for bound in found.edges.values())


def test_a_batch_of_no_whole_steps_lists_the_vector_and_valid_values() -> None:
    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=2)
        scores = exact_match(samples)
        fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip(), batch=6)

    [error] = check(graph(), gpus=0)
    assert isinstance(error, RateError)
    assert "the repetition vector is 3 steps of 'prompts' for 2 versions" in str(error.found)
    assert error.wanted == "a multiple of 4: 4, 8, 12, 16, ..."
    assert error.fix == "batch=8 in 'update', or batch=2 in fl.prompts"


def test_an_evaluation_flows_nothing() -> None:
    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=2)
        fl.update(policy, samples, advantages.grpo(samples, exact_match(samples)), loss=losses.ppo_clip())
        fl.evaluate(policy, fl.prompts(ROWS, batch=3, name="held_out"), exact_match, every=10)

    found = bounds(graph())
    assert "evaluate" not in found.repetitions
    assert not any("evaluate" in edge for edge in found.edges)
    assert check(graph(), gpus=0) == []


def test_hundreds_of_nodes_are_checked_at_once() -> None:
    graph = build(batch=4, chain=500)
    start = time.monotonic()
    assert check(graph, gpus=0) == []
    assert time.monotonic() - start < 2

"""Each action, fired by hand on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import Response, Sampling, Sum
from flowrl.rows import Key, Rows
from flowrl.runtime import rollouts
from flowrl.runtime.events import Block, Firing, Produced
from flowrl.runtime.firing import fire

from .hands import ROWS, Hands, digest, policy

PPO = losses.ppo_clip(clip_low=0.2, clip_high=0.2)


@fl.graph
def grpo(n: int = 2, batch: int = 2, prompts_each: int = 2, last: Any = "drop", epochs: Any = None) -> None:
    model = policy()
    prompts = fl.prompts(ROWS, batch=prompts_each, shuffle=False, last=last, epochs=epochs)
    samples = fl.rollout(model, prompts, n=n, max_new_tokens=5)
    scores = digest(samples)
    fl.update(model, samples, advantages.grpo(samples, scores), loss=PPO, batch=batch)


def sampled(hands: Hands) -> list[Key]:
    """Prompts and samples of the first step, by hand."""
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    return sorted(hands.rows("rollout").keys)


@fl.graph
def remax() -> None:
    model = policy()
    prompts = fl.prompts(ROWS, batch=2, shuffle=False)
    samples = fl.rollout(model, prompts, n=2, greedy=1, max_new_tokens=5)
    scores = digest(samples)
    rewards = advantages.token_rewards(samples, scores)
    advantage = advantages.remax(samples, rewards, advantages.greedy_baseline(samples, scores))
    fl.update(model, samples, advantage, loss=losses.policy_gradient())


def test_a_greedy_response_is_the_baseline_of_its_prompt_and_is_not_trained_on() -> None:
    hands = Hands(remax())
    keys = sampled(hands)
    assert keys == [Key(0, prompt, sample) for prompt in range(2) for sample in range(3)]
    rows = hands.rows("rollout").select(keys)
    assert rows["greedy"].tolist() == [False, False, True] * 2
    assert [bool(mask.any()) for mask in rows["mask"]] == [True, True, False] * 2
    assert hands.fire("digest", keys).metrics["reward"].weight == 4  # of the policy's samples, not of the baselines
    for node in ("token_rewards", "greedy_baseline"):
        hands.fire(node, keys)
    scores = hands.rows("digest").select(keys)["scores"].tolist()
    baseline = hands.rows("greedy_baseline").select(keys)["baseline_scores"].tolist()
    assert baseline == pytest.approx([scores[2]] * 3 + [scores[5]] * 3)
    hands.fire("remax", keys)
    assert hands.fire("update", keys).metrics["rows"] == Sum(4.0, 1.0)


# --- prompts


def test_prompts_are_the_rows_of_a_step() -> None:
    hands = Hands(grpo())
    hands.fire("prompts", step=1)
    rows = hands.rows("prompts")
    assert rows.keys == [Key(1, 0), Key(1, 1)]
    assert rows["prompt"] == ["2+2=", "3+3="]
    assert rows["answer"] == [2, 3]


def test_a_step_takes_as_many_batches_as_its_update() -> None:
    hands = Hands(grpo(batch=4))
    hands.fire("prompts", step=3)
    assert hands.rows("prompts").keys == [Key(3, i) for i in range(4)]
    assert hands.rows("prompts")["answer"] == [0, 1, 2, 3]


@pytest.mark.parametrize("last", ["drop", "short", "wrap"])
def test_a_finite_source_ends(last: str) -> None:
    assert read_all(grpo(last=last, epochs=1), 3) == [[0, 1], [2, 3], None]


@pytest.mark.parametrize(
    ("last", "answers"),
    [
        ("drop", [[0, 1], None]),
        ("short", [[0, 1], [2], None]),
        ("wrap", [[0, 1], [2, 0], None]),
    ],
)
def test_the_last_rows_are_left_out_with_a_word_make_a_short_step_or_are_filled_up(
    last: str, answers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    @fl.graph
    def three() -> None:
        model = policy()
        prompts = fl.prompts(ROWS[:3], batch=1, shuffle=False, last=last, epochs=1)  # type: ignore[arg-type]
        samples = fl.rollout(model, prompts, n=2, max_new_tokens=2)
        fl.update(model, samples, advantages.grpo(samples, digest(samples)), loss=PPO, batch=2)

    assert read_all(three(), len(answers)) == answers
    said = "node 'prompts': 1 row at the end fills no step of 2, and is dropped\n"
    assert capsys.readouterr().err.count(said) == (last == "drop")


def read_all(graph: Any, steps: int) -> list[Any]:
    """Answers of each step; None for a step without prompts."""
    hands, found = Hands(graph), []
    for step in range(steps):
        hands.blocks.clear()
        hands.fire("prompts", step=step)
        found.append(hands.rows("prompts")["answer"] if hands.blocks else None)
    return found


@pytest.mark.parametrize(
    ("last", "waves"),
    [("drop", [[0, 1], [2], None]), ("short", [[0, 1], [2], None]), ("wrap", [[0, 1], [2, 0], None])],
)
def test_a_wave_reads_the_batches_that_it_is_told_and_takes_what_there_is(last: str, waves: list[Any]) -> None:
    @fl.graph
    def three() -> None:
        model = policy()
        prompts = fl.prompts(ROWS[:3], batch=1, shuffle=False, last=last, epochs=1)  # type: ignore[arg-type]
        samples = fl.rollout(model, prompts, n=2, max_new_tokens=2)
        fl.update(model, samples, advantages.grpo(samples, digest(samples)), loss=PPO, batch=2)

    hands, first, found = Hands(three()), 0, []
    for wave in range(len(waves)):
        hands.blocks.clear()
        batches = [2 * wave, 2 * wave + 1]
        hands.fire("prompts", step=7, settings={"batches": batches, "first_prompt": first})
        rows = hands.rows("prompts") if hands.blocks else None
        found.append(None if rows is None else rows["answer"])
        if rows is not None:
            assert rows.keys == [Key(7, first + i) for i in range(len(rows))]
            first += len(rows)
    assert found == waves


# --- rollout, forward


def test_a_rollout_emits_every_column_with_its_tokens_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "EMIT_S", 0.0)  # what each decoding step ends is a block
    hands = Hands(grpo(n=4))
    hands.fire("prompts")
    done = hands.fire("rollout", hands.rows("prompts").keys, version=5)
    blocks = hands.blocks["rollout"]
    rows = hands.rows("rollout")
    assert sorted(rows.keys) == [Key(0, p, s) for p in range(2) for s in range(4)]
    assert len(blocks) <= 1 + max(rows["response_ids"].lengths)
    lengths = rows["response_ids"].lengths
    assert [length for block in blocks for length in block.lengths or ()] == [5 + x for x in lengths]
    for column in ("mask", "logprobs", "versions"):
        assert rows[column].lengths.tolist() == lengths.tolist()
    assert set(rows["versions"].values.tolist()) == {5}
    assert rows["mask"].values.all()
    cut = sum(stop == "length" for stop in rows["stop"])
    assert done.metrics == {
        "samples": (8, 1),
        "response_tokens": (lengths.sum(), 1),
        "response_length": (lengths.sum(), 8),
        "truncated": (cut, 8),
    }


def test_an_empty_response_is_a_row_without_tokens() -> None:
    class Decoder:
        def decode(self, ids: Any) -> str:
            return ""

    response = Response(key=Key(0, 0, 0), ids=[], logprobs=[], stop="stop_string", version=0)
    rows = rollouts.response_rows([response], 0, Decoder(), Sampling())  # type: ignore[arg-type]
    for column in ("response_ids", "mask", "logprobs", "versions"):
        assert rows[column].lengths.tolist() == [0]


def test_the_model_of_a_forward_pass_answers_under_the_nodes_column() -> None:
    @fl.graph
    def scored() -> None:
        model = policy()
        prompts = fl.prompts(ROWS, batch=2)
        samples = fl.rollout(model, prompts, n=2, max_new_tokens=3)
        reference = fl.logprobs(model.frozen(), samples)
        judge = fl.Model("judge", backend="tiny", head="score", mesh=model.mesh)
        advantage = advantages.grpo(samples, fl.score(judge, samples))
        fl.update(model, samples, advantage, reference, loss=PPO + 0.1 * losses.kl())

    hands = Hands(scored())
    keys = sampled(hands)
    hands.fire("logprobs", keys)
    rows = hands.rows("logprobs")
    assert rows.keys == keys
    before = hands.rows("rollout").select(keys)
    assert rows["ref_logprobs"].values == pytest.approx(before["logprobs"].values, abs=1e-5)
    done = hands.fire("score", keys)
    assert hands.rows("score")["scores"].shape == (4,)
    assert done.metrics["reward"] == Sum(float(hands.rows("score")["scores"].sum()), 4)


# --- functions, filters


def test_a_reward_tells_its_sum() -> None:
    hands = Hands(grpo())
    keys = sampled(hands)
    done = hands.fire("digest", keys)
    scores = hands.rows("digest")["scores"]
    assert done.metrics == {"reward": (pytest.approx(scores.sum()), 4)}
    sums = [sum(text.encode()) for text in hands.rows("rollout").select(keys)["response"]]
    assert scores.tolist() == [sums[i] + keys[i].prompt for i in range(4)]


def test_two_rewards_bind_by_keyword_and_tell_their_names() -> None:
    @fl.reward
    def flat(response: str) -> float:
        return 1.0

    @fl.node(out="advantages", per="batch")
    def both(long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
        return 10 * long + short

    @fl.graph
    def two() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=2, max_new_tokens=3)
        fl.update(model, samples, both(samples, long=digest(samples), short=flat(samples)), loss=PPO)

    hands = Hands(two())
    keys = sampled(hands)
    assert set(hands.fire("flat", keys).metrics) == {"reward/flat"}
    assert set(hands.fire("digest", keys).metrics) == {"reward/digest"}
    hands.fire("both", keys)
    long = hands.rows("digest")["scores"]
    assert hands.rows("both")["advantages"].tolist() == (10 * long + 1).tolist()


def test_the_reward_of_a_run_is_what_its_rewards_are_combined_to() -> None:
    @fl.reward
    def flat(response: str) -> float:
        return 1.0

    @fl.node(out=fl.Scores)
    def weighted(long: float, short: float, *, weight: float = 10.0) -> float:
        return long + weight * short

    @fl.graph
    def combined() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=2, max_new_tokens=3)
        scores = weighted(samples, long=digest(samples), short=flat(samples))
        fl.update(model, samples, advantages.grpo(samples, scores), loss=PPO)

    hands = Hands(combined())
    keys = sampled(hands)
    assert set(hands.fire("flat", keys).metrics) == {"reward/flat"}
    assert set(hands.fire("digest", keys).metrics) == {"reward/digest"}
    scores = hands.rows("digest")["scores"] + 10
    assert hands.fire("weighted", keys).metrics == {"reward": (pytest.approx(scores.sum()), len(keys))}
    assert next(name for name, columns in hands.plan.stages["record"].reads if "scores" in columns) == "weighted"


def test_an_estimator_of_several_rewards_gets_them_in_order_and_one_of_token_baselines_its_energies() -> None:
    @fl.reward
    def longest(response_ids: Any) -> float:
        return float(len(response_ids))

    @fl.graph
    def several() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=3, max_new_tokens=5)
        scores = digest(samples), longest(samples)
        advantage = advantages.gdpo(samples, *scores, weights=(1.0, 0.5))
        rewards = advantages.token_rewards(samples, scores[0])
        baseline = advantages.otb(samples, rewards, fl.logit_energy(model, samples))
        fl.update(model, samples, advantage, loss=losses.policy_gradient())
        observe(samples, baseline)

    @fl.node(out=fl.Metrics)
    def observe(advantages: torch.Tensor, returns: torch.Tensor) -> float:
        return float((advantages - returns).sum())

    hands = Hands(several())
    keys = sampled(hands)
    for node in ("digest", "longest", "gdpo", "token_rewards", "logit_energy", "otb"):
        hands.fire(node, keys)
    group = torch.tensor([key.prompt for key in keys])
    first, second = (torch.tensor(hands.rows(node).select(keys)["scores"]) for node in ("digest", "longest"))
    wanted = advantages.gdpo(group, first, second, weights=(1.0, 0.5))
    np.testing.assert_array_equal(hands.rows("gdpo").select(keys)["advantages"], wanted.numpy())
    energy = hands.rows("logit_energy").select(keys)["logit_energy"]
    lengths = hands.rows("rollout").select(keys)["response_ids"].lengths
    assert energy.lengths.tolist() == hands.rows("otb").select(keys)["advantages"].lengths.tolist() == lengths.tolist()
    assert ((energy.values > 0) & (energy.values < 2)).all()
    ends = hands.rows("otb").select(keys)["returns"].values[np.cumsum(lengths) - 1]
    assert ends.tolist() == first.tolist()


def test_metrics_make_no_block() -> None:
    @fl.node(out=fl.Metrics)
    def longest(response: list[str]) -> int:
        return max(map(len, response))

    @fl.graph
    def watched() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2), n=2, max_new_tokens=3)
        longest(samples)
        fl.update(model, samples, advantages.grpo(samples, digest(samples)), loss=PPO)

    hands = Hands(watched())
    done = hands.fire("longest", sampled(hands))
    assert done.metrics == {"longest": (max(map(len, hands.rows("rollout")["response"])), 1)}
    assert hands.events == [done]


def test_a_short_response_that_was_cut_is_truncated_and_the_longest_that_ended_by_itself_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @fl.graph
    def filtered() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=2, max_new_tokens=5)
        kept = fl.filter(samples, keep=lambda stop: stop != "length", reason="overlong")
        fl.update(model, kept, advantages=digest(kept), loss=losses.policy_gradient())

    def answer(prompts: Any, sampling: Any, seed: int) -> Any:
        for prompt in prompts:
            cut, ended = (prompt.key._replace(sample=sample) for sample in range(2))
            yield [Response(key=cut, ids=[7, 8, 9], logprobs=[-1.0] * 3, stop="length", version=0)]
            yield [Response(key=ended, ids=[7, 8, 9, 9, 2], logprobs=[-1.0] * 5, stop="eos", version=0)]

    hands = Hands(filtered())
    [model] = hands.workers["mesh.0"].models.values()
    monkeypatch.setattr(model, "generate", answer)
    hands.fire("prompts")
    done = hands.fire("rollout", hands.rows("prompts").keys)
    keys = sorted(hands.rows("rollout").keys)
    assert done.metrics["truncated"] == (2, 4)
    assert hands.rows("rollout").select(keys)["stop"] == ["length", "eos"] * 2
    hands.fire("filter", keys)
    assert hands.dropped() == dict.fromkeys([keys[0], keys[2]], "overlong")


def test_a_filter_passes_keys_and_drops_with_a_reason() -> None:
    @fl.graph
    def filtered() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2, shuffle=False), n=2, max_new_tokens=3)
        kept = fl.filter(samples, keep=lambda answer: answer > 0, reason="too easy")
        fl.update(model, kept, advantages.grpo(kept, digest(kept)), loss=PPO)

    hands = Hands(filtered())
    keys = sampled(hands)
    hands.fire("filter", keys)
    assert hands.rows("filter").keys == keys[2:]
    assert hands.dropped() == dict.fromkeys(keys[:2], "too easy")


# --- training


def test_an_update_counts_what_it_trained_and_publishes_only_when_told() -> None:
    hands = Hands(grpo())
    keys = sampled(hands)
    hands.fire("digest", keys)
    hands.fire("grpo", keys)
    sums = hands.fire("update", keys, version=0).metrics
    assert sums["tokens"].total == hands.rows("rollout")["response_ids"].lengths.sum()
    assert sums["rows"].total == 4
    [model] = hands.workers["mesh.0"].models.values()
    before = {name: tensor.clone() for name, tensor in model.export_weights()}
    settings = {"denominator": sums["tokens"].total, "publish": False}
    hands.fire("update", action="step", version=1, settings=settings)
    assert model.version == 0
    hands.fire("update", action="step", version=1, settings={"denominator": 0.0, "publish": True})
    assert model.version == 1
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.export_weights())


def test_backward_is_given_old_logprobs_of_the_sampler() -> None:
    hands = Hands(grpo())
    keys = sampled(hands)
    hands.fire("digest", keys)
    hands.fire("grpo", keys)
    seen: list[Rows] = []

    class Spy:
        def backward(self, rows: Rows, *_: Any) -> dict[str, Sum]:
            seen.append(rows)
            return {"tokens": Sum(np.float32(3), torch.tensor(1))}  # type: ignore[arg-type]

    worker = hands.workers["mesh.0"]
    worker.models = dict.fromkeys(worker.models, Spy())  # type: ignore[arg-type]
    done = hands.fire("update", list(reversed(keys)))
    [rows] = seen
    assert rows.keys == list(reversed(keys))
    columns = {"prompt_ids", "response_ids", "mask", "old_logprobs", "advantages"}
    assert set(rows.columns) == {*columns, "sampler_logprobs"}
    expected = hands.rows("rollout").select(rows.keys)["logprobs"]
    assert rows["old_logprobs"].values.tolist() == expected.values.tolist()
    assert rows["sampler_logprobs"].values.tolist() == expected.values.tolist()
    assert [type(number) for number in done.metrics["tokens"]] == [float, float]
    hands.fire("update", keys, settings={"moved": True})
    assert set(seen[-1].columns) == columns


@fl.reward(on_error="drop")
def picky(response: str, answer: int) -> float:
    if answer == 1:
        raise ValueError("one")
    return float(answer)


def test_an_evaluation_scores_held_out_prompts_and_counts_failures_apart() -> None:
    @fl.graph
    def watched() -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2), n=2, max_new_tokens=3)
        fl.update(model, samples, advantages.grpo(samples, digest(samples)), loss=PPO)
        held = fl.prompts(ROWS, batch=4, shuffle=False, name="held")
        fl.evaluate(model, held, picky, every=2)

    hands = Hands(watched())
    hands.fire("held")
    done = hands.fire("evaluate", hands.rows("held").keys, version=2)
    assert done.metrics == {"evaluate": (0 + 2 + 3, 3), "evaluate/failed": (1, 4)}


# --- weights


def test_weights_travel_as_a_copy_and_arrive() -> None:
    @fl.graph
    def apart(other: fl.Mesh = fl.Mesh(dp=1)) -> None:
        model = policy()
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2), n=2, max_new_tokens=3, mesh=other)
        fl.update(model, samples, advantages.grpo(samples, digest(samples)), loss=PPO)

    hands = Hands(apart())
    trainer, replica = hands.workers["mesh.0"], hands.workers["other.0"]
    [name] = trainer.models
    hands.try_to_fire("mesh", action="export", version=1, settings={"model": name})
    [produced, _] = hands.events
    assert isinstance(produced, Produced)
    assert isinstance(produced.block, Block)
    sent = trainer.block(produced.block.number, None, ())
    assert produced.block.num_bytes == sum(tensor.nbytes for tensor in sent.values())
    live = dict(trainer.models[name].export_weights())
    assert all(tensor.data_ptr() != live[key].data_ptr() for key, tensor in sent.items())
    changed = {key: tensor + 1 for key, tensor in sent.items()}
    firing = Firing(9, "x", "import", -1, 1, (), (), 1, {"model": name})
    list(fire(replica, firing, [changed]))
    assert replica.models[name].version == 1
    assert all(torch.equal(tensor, changed[key]) for key, tensor in replica.models[name].export_weights())


def test_a_model_that_was_saved_is_loaded_under_its_version(tmp_path: Path) -> None:
    hands = Hands(grpo())
    [(name, model)] = hands.workers["mesh.0"].models.items()
    hands.fire("mesh", action="save", version=4, settings={"folder": str(tmp_path), "models": [name]})
    folder = tmp_path / "step-000004.partial"
    assert any((folder / name).iterdir())
    fresh = Hands(grpo())
    fresh.fire("mesh", action="load", version=4, settings={"folder": str(folder), "models": [name]})
    loaded = fresh.workers["mesh.0"].models[name]
    assert loaded.version == 4
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(loaded.export_weights(), model.export_weights(), strict=True)
    )

"""Rollouts with a tool on real models: what is recorded, what is trained, and what it depends on."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import Prompt
from flowrl.backends.tiny_source import EOS
from flowrl.rows import Key, Ragged, Rows
from flowrl.visualize import to_string

from .hands import ROWS, Hands, digest

STOPS = tuple("0123456789abcdefghijklmnopqrstuvwxyz")
"""One of them ends a turn of a model that knows nothing before long."""


@fl.tool(on_error="drop", max_failure_rate=1.0)
def count(turns: list[dict[str, str]], answer: int, *, fails_on: int = -1) -> str | None:
    if answer == fails_on:
        raise ValueError("no")
    return f"{answer}," if len(turns) < 5 else None


@fl.reward
def last_turn(turns: list[dict[str, str]], answer: int) -> float:
    return len(turns) + answer / 10


@fl.graph
def talk(backend: str = "tiny", n: int = 3, fails_on: int = -1, batch: int = 4, every: int | None = None) -> None:
    source = "tiny" if backend == "tiny" else "builtin:count_up"
    model = fl.Model(source, backend=backend, optimizer=fl.AdamW(lr=1e-2))
    prompts = fl.prompts(ROWS, batch=batch, shuffle=False)
    tool = count(fails_on=fails_on)
    samples = fl.rollout(model, prompts, n=n, max_new_tokens=40, tool=tool, max_turns=4, stop=STOPS)
    scores = last_turn(samples)
    loss = losses.ppo_clip() - 0.01 * losses.entropy()
    if every:
        held = fl.prompts(ROWS, batch=4, shuffle=False, name="held")
        fl.evaluate(model, held, last_turn, every=every, tool=tool, stop=STOPS, max_turns=4, temperature=1.0)
    fl.update(model, samples, advantages.grpo(samples, scores), loss=loss)


def rolled_out(hands: Hands) -> Rows:
    """The prompts' columns and those of their samples, in order of the keys."""
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    return joined(hands)


def joined(hands: Hands) -> Rows:
    rows = hands.rows("rollout")
    return Rows.join(sorted(rows.keys), [hands.rows("prompts"), rows])


def model_of(hands: Hands) -> Any:
    [model] = hands.workers["mesh.0"].models.values()
    return model


@pytest.mark.parametrize("backend", ["tiny", "hf"])
def test_the_record_of_every_turn_is_exact(backend: str) -> None:
    hands = Hands(talk(backend=backend))
    rows = rolled_out(hands)
    model = model_of(hands)
    found = model.forward(rows, ["logprobs"], 1.0)["logprobs"]
    assert max(len(turns) for turns in rows["turns"]) == 5
    for i, key in enumerate(rows.keys):
        ids, mask, logprobs = (rows[name][i] for name in ("response_ids", "mask", "logprobs"))
        assert len(ids) == len(mask) == len(logprobs) == len(rows["versions"][i]) <= 40
        said = b"".join(m["content"].encode() for m in rows["turns"][i] if m["role"] == "tool")
        assert model.tokenizer.decode(ids[~mask].tolist()) == said.decode()
        assert rows["response"][i] == model.tokenizer.decode(ids.tolist())
        np.testing.assert_allclose(logprobs[mask], found[i][mask], rtol=1e-5, atol=1e-5)
        assert not logprobs[~mask].any(), key
    assert not rows["mask"].values.all()


@pytest.mark.parametrize("backend", ["tiny", "hf"])
def test_on_unchanged_weights_every_ratio_is_one_and_trained_tokens_alone_are_counted(backend: str) -> None:
    hands = Hands(talk(backend=backend))
    rows = rolled_out(hands)
    for name in ("last_turn", "grpo"):
        hands.fire(name, rows.keys)
    sums = hands.fire("update", rows.keys).metrics
    assert sums["tokens"].total == rows["mask"].values.sum() < len(rows["mask"].values)
    assert sums["rows"].total == len(rows)
    for name in ("mismatch_kl", "kl", "clip_fraction"):
        assert sums[name].total == pytest.approx(0, abs=1e-4), name
        assert sums[name].weight == sums["tokens"].total
    entropy = model_of(hands).forward(rows, ["entropy"], 1.0)["entropy"]
    assert sums["entropy"].total == pytest.approx(entropy.values[rows["mask"].values].sum(), rel=1e-4)


@pytest.mark.parametrize("backend", ["tiny", "hf"])
def test_nothing_at_a_tool_s_token_reaches_gradient_or_metrics(backend: str) -> None:
    loss = losses.ppo_clip() + 0.1 * losses.kl() - 0.01 * losses.entropy()
    hands = Hands(talk(backend=backend))
    rows = rolled_out(hands)
    rng = np.random.default_rng(0)
    mask: Ragged = rows["mask"]
    noise = [rng.normal(size=len(mask.values)).astype("float32") for _ in range(3)]
    names = ("old_logprobs", "ref_logprobs", "advantages")
    plain = [rows["logprobs"].values + 0.1 * noise[0], rows["logprobs"].values + 0.1 * noise[1], noise[2]]
    poisoned = [np.where(mask.values, values, np.float32("nan")) for values in plain]
    found = []
    for values in (plain, poisoned):
        columns = {name: Ragged(v, mask.offsets) for name, v in zip(names, values, strict=True)}
        model = model_of(hands)
        sums = model.backward(rows.with_columns(**columns), loss, 1.0, None)
        gradients = [p.grad.clone() for p in model.network.module.parameters() if p.grad is not None]
        model.step(0.0)  # forgets them
        for parameter in model.network.module.parameters():
            parameter.grad = None
        found.append((sums, gradients))
    (sums, gradients), (others, other_gradients) = found
    assert sums == others
    assert gradients
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))


def test_a_conversation_does_not_depend_on_those_that_share_its_rounds() -> None:
    together = rolled_out(Hands(talk()))
    alone = Hands(talk())
    alone.fire("prompts")
    for key in reversed(alone.rows("prompts").keys):
        alone.fire("rollout", [key])
    rows = joined(alone)
    assert rows.keys == together.keys
    for name in ("response_ids", "mask"):
        assert rows[name].values.tolist() == together[name].values.tolist()
    np.testing.assert_allclose(rows["logprobs"].values, together["logprobs"].values, atol=1e-5)
    assert rows["turns"] == together["turns"]


def test_the_first_turn_is_the_response_of_a_rollout_without_a_tool() -> None:
    hands = Hands(talk())
    rows = rolled_out(hands)
    spec: Any = hands.plan.graph["rollout"].spec
    prompts = hands.rows("prompts")
    asked = [Prompt(key=key, ids=ids) for key, ids in zip(prompts.keys, prompts["prompt_ids"], strict=True)]
    plain = {r.key: r for r in chain.from_iterable(model_of(hands).generate(asked, spec.sampling, 7))}
    for i, key in enumerate(rows.keys):
        assert rows["response_ids"][i][: len(plain[key].ids)].tolist() == plain[key].ids


def test_a_greedy_conversation_is_greedy_in_every_turn_and_not_trained() -> None:
    @fl.graph
    def greedy() -> None:
        model = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-2))
        prompts = fl.prompts(ROWS, batch=4, shuffle=False)
        samples = fl.rollout(model, prompts, n=2, greedy=1, max_new_tokens=60, tool=count, max_turns=4, stop=STOPS)
        fl.update(model, samples, advantages.grpo(samples, last_turn(samples)), loss=losses.ppo_clip())

    hands = Hands(greedy())
    with torch.no_grad():  # a model that comes to a stop string by itself: a, b, a, b, ... and at last e
        table = model_of(hands).network.module.last.weight
        for said, following in (("=", "-"), ("-", "!"), ("!", "e"), (",", "-")):
            table[ord(said), ord(following)] = 5.0
    rows = rolled_out(hands)
    for i, key in enumerate(rows.keys):
        assert rows["greedy"][i] == (key.sample == 2)
        if key.sample == 2:
            assert not rows["mask"][i].any()
            assert rows["response"][i] == f"-!e{key.prompt},-!e{key.prompt},-!e"
        else:
            assert rows["mask"][i].any()


def test_counts_tell_the_model_s_tokens_from_the_tool_s() -> None:
    hands = Hands(talk())
    hands.fire("prompts")
    metrics = hands.fire("rollout", hands.rows("prompts").keys).metrics
    rows = hands.rows("rollout")
    mask = rows["mask"].values
    turns = sum((len(turns) + 1) // 2 for turns in rows["turns"])
    assert metrics["response_tokens"] == (mask.sum(), 1)
    assert metrics["tool_tokens"] == ((~mask).sum(), 12)
    assert metrics["response_length"] == (len(mask), 12)
    assert metrics["turns"] == (turns, 12)
    cut_within_a_turn = sum(
        stop == "length" and len(ids) == 40 for stop, ids in zip(rows["stop"], rows["response_ids"], strict=True)
    )
    assert metrics["tool_calls"].total >= turns - cut_within_a_turn
    assert (metrics["tool_failures"], metrics["tool_cut"]) == ((0, 1), (0, 1))
    blocks = hands.blocks["rollout"]
    assert (
        sum(n for block in blocks for n in block.lengths or ())
        == len(mask) + 3 * hands.rows("prompts")["prompt_ids"].lengths.sum()
    )


def test_a_failed_tool_drops_its_rows_with_the_reason_and_no_others() -> None:
    hands = Hands(talk(fails_on=2))
    hands.fire("prompts")
    keys = hands.rows("prompts").keys
    done = hands.fire("rollout", keys)
    assert hands.dropped() == dict.fromkeys([Key(0, 2, s) for s in range(3)], "count failed: ValueError: no")
    assert sorted(hands.rows("rollout").keys) == [Key(0, p, s) for p in (0, 1, 3) for s in range(3)]
    assert done.metrics["tool_failures"] == (3, 1)
    assert done.metrics["samples"] == (9, 1)


@pytest.mark.parametrize("role", ["tool", "user", None])
def test_in_a_chat_the_answer_is_a_message_of_its_role_or_plain_text(role: str | None) -> None:
    @fl.tool(role=role, max_answer_tokens=3, on_too_long="left")
    def speak(turns: list[dict[str, str]]) -> str | None:
        return "long answer" if len(turns) < 3 else None

    @fl.graph
    def chat() -> None:
        model = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-2))
        prompts = fl.prompts(ROWS, batch=2, shuffle=False, chat=True)
        samples = fl.rollout(model, prompts, n=2, max_new_tokens=70, tool=speak, stop=STOPS)
        fl.update(model, samples, advantages.grpo(samples, digest(samples)), loss=losses.ppo_clip())

    hands = Hands(chat())
    rows = rolled_out(hands)
    between = list(b"wer") if role is None else [EOS, *f"\n{role}: wer\nassistant: ".encode()]
    assert any(len(turns) == 3 for turns in rows["turns"])
    for i in range(len(rows)):
        ids, mask = rows["response_ids"][i], rows["mask"][i]
        assert ids[~mask].tolist() == between * (len(rows["turns"][i]) // 2)
        assert [turn["role"] for turn in rows["turns"][i]][1::2] == [role or "tool"] * (len(rows["turns"][i]) // 2)
        if role:
            assert rows["prompt_messages"][i] == [{"role": "user", "content": rows["prompt"][i]}]


def test_an_evaluation_plays_with_the_same_tool_and_counts_its_failures_apart() -> None:
    for fails_on, failed in ((-1, 0), (1, 1)):
        hands = Hands(talk(every=1, fails_on=fails_on))
        hands.fire("held")
        metrics = hands.fire("evaluate", hands.rows("held").keys).metrics
        assert set(metrics) == {"evaluate", "evaluate/failed"}
        assert metrics["evaluate/failed"] == (failed, 4)
        assert metrics["evaluate"].weight == 4 - failed
        assert metrics["evaluate"].mean > 1  # more than one turn


def test_the_picture_shows_the_tool() -> None:
    shown = to_string(talk(every=2), ".txt")
    assert "tool=count max_turns=4 " in shown
    assert shown.count("tool=count") == 2

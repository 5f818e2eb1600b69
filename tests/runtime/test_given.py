"""Responses of the data set: fired by hand, and in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

import flowrl as fl
from flowrl import losses
from flowrl.backends.tiny import TinyModule
from flowrl.backends.tiny_source import BOS, EOS
from flowrl.graph import Graph
from flowrl.rows import Key
from flowrl.runtime import run
from flowrl.seeds import mix

from .hands import Hands, policy

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+3=", "good": "5", "bad": "23", "label": True, "weight": 1},
    {"prompt": "1+1=", "good": "two", "bad": "", "label": False, "weight": -1},
]
FIRST = [Key(0, 0), Key(0, 1)]


def sft_on(rows: Any = ROWS, *, dp: int = 1, prompts: dict[str, Any] | None = None, **settings: Any) -> Graph:
    """Two prompts a step, in order."""

    @fl.graph
    def sft() -> None:
        model = policy(mesh=fl.Mesh(dp=dp))
        asked = fl.prompts(rows, batch=2, shuffle=False, **(prompts or {}))
        samples = fl.responses(model, asked, **{"columns": {"good": 1, "bad": -1}, **settings})
        fl.update(model, samples, loss=losses.sft())

    return sft()


def given(graph: Graph) -> Hands:
    """The rows of the first step."""
    hands = Hands(graph)
    hands.fire("prompts")
    hands.fire("responses", hands.rows("prompts").keys)
    return hands


def refusal(graph: Graph) -> str:
    """What the first step ends with."""
    hands = Hands(graph)
    hands.fire("prompts")
    hands.try_to_fire("responses", FIRST)
    error = hands.failure()
    return f"{error['type']}: {error['problem']} | {error['found']} | {error['fix']}"


# --- rows


def test_each_column_is_a_sample_of_its_prompt() -> None:
    rows = given(sft_on()).rows("responses")
    assert rows.keys == [Key(0, prompt, sample) for prompt in (0, 1) for sample in (0, 1)]
    assert [ids.tolist() for ids in rows["response_ids"]] == [[*b"5", EOS], [*b"23", EOS], [*b"two", EOS], [EOS]]
    assert rows["response"] == ["5", "23", "two", ""]
    assert rows["stop"] == ["eos"] * 4
    assert rows["preference"].tolist() == [1, -1, 1, -1]
    assert all(mask.all() for mask in rows["mask"])
    assert rows["mask"].lengths.tolist() == rows["response_ids"].lengths.tolist()
    assert {"logprobs", "versions"}.isdisjoint(rows.columns)


def test_columns_that_are_not_trained_have_a_mask_of_false() -> None:
    rows = given(sft_on(trained="good")).rows("responses")
    assert [mask.tolist() for mask in rows["mask"]] == [[True] * 2, [False] * 3, [True] * 4, [False]]


@pytest.mark.parametrize(
    ("columns", "preference"),
    [
        ("good", [1, 1]),
        (("bad", "good"), [1, 1, 1, 1]),
        ({"good": 0}, [0, 0]),
        ({"good": "label"}, [1, -1]),
        ({"good": "weight", "bad": 0.5}, [1, 0.5, -1, 0.5]),
    ],
)
def test_the_preference_is_declared_or_stands_in_a_column(columns: Any, preference: list[float]) -> None:
    assert given(sft_on(columns=columns)).rows("responses")["preference"].tolist() == preference


def test_messages_go_through_the_chat_template_behind_their_prompt() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "good": {"role": "assistant", "content": "ho"}}] * 2
    hands = given(sft_on(rows, columns="good"))
    asked, answered = hands.rows("prompts"), hands.rows("responses")
    assert asked["prompt_ids"][0].tolist() == [BOS, *b"user: hi\nassistant: "]
    assert answered["response_ids"][0].tolist() == [*b"ho", EOS]


def test_a_users_text_is_answered_through_the_chat_template_where_asked() -> None:
    asked = [{"prompt": "hi", "good": "ho"}] * 2
    hands = given(sft_on(asked, columns="good", prompts={"chat": True}))
    assert hands.rows("prompts")["prompt_ids"][0].tolist() == [BOS, *b"user: hi\nassistant: "]
    assert hands.rows("responses")["response_ids"][0].tolist() == [*b"ho", EOS]


def test_an_answer_follows_a_prompt_of_ids_and_one_that_was_cut() -> None:
    asked = [{"prompt_ids": [BOS, 65], "good": "x"}, {"prompt_ids": [BOS, 66, 67], "good": "y"}]
    rows = given(sft_on(asked, columns="good")).rows("responses")
    assert [ids.tolist() for ids in rows["response_ids"]] == [[*b"x", EOS], [*b"y", EOS]]
    cut = given(sft_on(columns="good", prompts={"max_prompt_tokens": 2, "on_too_long": "left"}))
    assert [ids.tolist() for ids in cut.rows("prompts")["prompt_ids"]] == [[*b"3="], [*b"1="]]
    assert cut.rows("responses")["response"] == ["5", "two"]


# --- too long, missing, wrong


def test_a_too_long_answer_is_an_error_that_names_its_row() -> None:
    text = refusal(sft_on(max_new_tokens=3))
    assert "node 'responses': row 1 of the list: column 'good': the answer is too long: 4 > 3 tokens" in text
    assert "on_too_long='drop' or 'cut'" in text


@pytest.mark.parametrize("columns", [("good", "bad"), ("bad", "good")])
def test_a_too_long_answer_takes_its_prompt_along(columns: Any) -> None:
    hands = given(sft_on(columns=columns, max_new_tokens=3, on_too_long="drop"))
    assert hands.rows("responses").keys == [Key(0, 0, 0), Key(0, 0, 1)]
    assert hands.dropped() == {Key(0, 1): "an answer is too long"}


def test_a_cut_answer_has_no_end_and_says_so() -> None:
    """Every token that is left is trained: the mask is no guess from where an end stands."""
    hands = Hands(sft_on(max_new_tokens=3, on_too_long="cut"))
    hands.fire("prompts")
    finished = hands.fire("responses", FIRST)
    rows = hands.rows("responses")
    assert rows["response_ids"][2].tolist() == [*b"two"]
    assert rows["mask"][2].tolist() == [True] * 3
    assert rows["stop"] == ["eos", "eos", "length", "eos"]
    assert finished.metrics["truncated"] == (1, 4)
    assert finished.metrics["response_tokens"] == (9, 1)


def test_a_row_without_an_answer_is_what_the_prompts_say() -> None:
    rows = [{**ROWS[0], "bad": None}, *ROWS, *ROWS]
    hands = Hands(sft_on(rows))
    hands.try_to_fire("prompts")
    assert "row 0 of the list has no value in column 'bad'" in hands.failure()["problem"]
    assert given(sft_on(rows, prompts={"on_missing": "drop"})).rows("prompts")["good"] == ["5", "two"]


def test_an_answer_that_is_none_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "good": good}) + "\n" for good in ("x", 7)))
    text = refusal(sft_on(path, columns="good"))
    assert f"{path}:2 (row 1): column 'good': the answer to a text is no text | 7" in text


def test_an_answer_that_the_tokenizer_does_not_know_names_its_row_and_column() -> None:
    text = refusal(sft_on([{"prompt": "a", "good": "b"}, {"prompt": "a", "good": "\ud83d"}], columns="good"))
    assert "DataError: node 'responses': row 1 of the list: column 'good': the answer cannot be tokenized: Unic" in text


def test_a_label_of_0_is_no_bad_answer_that_is_left_out_in_silence() -> None:
    rows = [{"prompt": "a", "good": "b", "label": label} for label in (1, 0)]
    text = refusal(sft_on(rows, columns={"good": "label"}))
    assert "row 1 of the list: column 'label' holds no preference | 0 | false or -1 for a bad answer" in text


def test_a_label_that_is_none_is_refused() -> None:
    text = refusal(sft_on([{"prompt": "a", "good": "b", "label": "yes"}] * 2, columns={"good": "label"}))
    assert "column 'label' holds no preference | 'yes'" in text


def test_a_model_without_room_for_the_answer_is_told_before_it_runs() -> None:
    """The shipped model takes 64 tokens, whatever the graph declares."""

    @fl.graph
    def long() -> None:
        model = fl.Model("builtin:reverse_digits", optimizer=fl.AdamW(lr=1e-3))
        samples = fl.responses(model, fl.prompts([{"prompt": "1>", "good": "1" * 61}], batch=1), columns="good")
        fl.update(model, samples, loss=losses.sft())

    hands = Hands(long())
    hands.fire("prompts")
    hands.try_to_fire("responses", [Key(0, 0)])
    assert "the answer is too long: 62 > 61 tokens" in hands.failure()["problem"]


# --- runs


def lines(path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_sft_is_the_mean_over_answer_tokens_and_their_ends(tmp_path: Path) -> None:
    run(sft_on(columns="good"), steps=1, run_dir=tmp_path, launcher="inline")
    [line] = lines(tmp_path)
    module = TinyModule(mix(*b"tiny") % (1 << 63), "lm")
    nats = []
    for row in ROWS:
        ids = [BOS, *row["prompt"].encode(), *row["good"].encode(), EOS]
        for place in range(1 + len(row["prompt"]), len(ids)):
            logits = module.last.weight[ids[place - 1]] + module.before.weight[ids[place - 2]]
            nats.append(-float(log_softmax(logits.detach(), -1)[ids[place]]))
    assert line["loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert line["tokens"] == len(nats) == 6
    assert line["lag"] == 0
    assert [sample["response"] for sample in lines(tmp_path, "samples.jsonl")] == ["5", "two"]


@fl.node(out=fl.Metrics)
def held_out(old_logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    return {"held_out": -float(old_logprobs[mask].mean()), "held_rows": len(mask)}


def test_what_comes_every_third_step_is_of_the_weights_before_that_steps_update(tmp_path: Path) -> None:
    @fl.graph
    def measured() -> None:
        model = policy()
        train = fl.responses(model, fl.prompts(ROWS, batch=2, shuffle=False), columns="good")
        fl.update(model, train, loss=losses.sft())
        held = fl.responses(model, fl.prompts(ROWS * 2, batch=4, every=3), columns="good", name="held")
        held_out(held, fl.logprobs(model, held))

    run(measured(), steps=7, run_dir=tmp_path, launcher="inline")
    found = lines(tmp_path)
    assert [line["step"] for line in found if "held_out" in line] == [1, 4, 7]
    for line in found:  # the same rows, twice: what the update's own forward pass gives
        if "held_out" in line:
            assert line["held_out"] == pytest.approx(line["loss"], rel=1e-5)
            assert line["held_rows"] == 4
            assert line["samples/held"] == 4
        assert line["samples"] == 2

"""The shipped reward model tells answers from mistakes, through the backend that a graph runs it on."""

from __future__ import annotations

import numpy as np

import flowrl as fl
from flowrl.rows import Key, Ragged, Rows
from flowrl.runtime.ranks import Rank
from flowrl.runtime.registry import load_backend
from flowrl.tasks import ReverseDigits


def test_an_answer_scores_near_one_and_a_mistake_near_zero() -> None:
    model = fl.Model("builtin:reverse_digits_reward", head="score")
    backend = load_backend("hf")(model, Rank(), "cpu")
    encode = backend.tokenizer.encode
    task = ReverseDigits(seed=99)
    rows = [task[i] for i in range(64)]
    wrong = [row["answer"][:2] + str((int(row["answer"][2]) + 1) % 10) + row["answer"][3:] for row in rows]
    prompts = [encode(row["prompt"]) for row in rows] * 2
    responses = [encode(text + "$")[1:] for text in [*(row["answer"] for row in rows), *wrong]]
    columns = {"prompt_ids": Ragged.pack(prompts, "int32"), "response_ids": Ragged.pack(responses, "int32")}
    scores = backend.forward(Rows([Key(0, i, 0) for i in range(128)], columns), ["scores"], 1.0)["scores"]
    assert np.mean(scores[:64] > 0.5) > 0.9
    assert np.mean(scores[64:] < 0.5) > 0.9

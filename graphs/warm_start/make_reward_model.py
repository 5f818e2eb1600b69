"""Make a reward model: ``python -m flowrl.graphs.warm_start.make_reward_model OUT [--seed 0]``.

A Llama of 104,000 parameters whose score of a response to `ReverseDigits` is near 1 when it is the answer and near 0
when it is not. It learns from answers with mistakes put in, as a policy makes them: wrong digits, an end too early, no
end at all. Every character of a response is a case (is all of it right so far?), so that comparing digits is learnt
before counting mistakes. The shipped folder is::

    python -m flowrl.graphs.warm_start.make_reward_model reverse_digits_reward
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification

from flowrl.tasks import ReverseDigits

from .make import ALPHABET, EOS, character_ids, character_tokenizer, machine, one_thread, random_model

STEPS, BATCH, LEARNING_RATE, WARM_UP_STEPS = 8000, 256, 1.5e-3, 50
NUM_HELD_OUT = 4096
WRONG_SHARES = torch.tensor([0.0, 0.1, 0.2, 0.4])
"""Of the digits of a response: one share is drawn for each."""
ENDS_EARLY = LACKS_END = 0.1
"""Shares of responses."""
ZERO = ALPHABET.index("0")


def make(out: Path, *, seed: int = 0) -> dict[str, Any]:
    """Write a model folder with a ``score`` head, tokenizer and ``made_with.json``; returns what the last holds."""
    with one_thread():
        generator = torch.Generator().manual_seed(seed)
        model = _with_score(generator)
        _train(model, _cases(ReverseDigits(seed=seed), generator))
        ids, right = next(_cases(ReverseDigits(seed=seed + 1), generator, batch=NUM_HELD_OUT))
        with torch.no_grad():
            score = _scores(model, ids, right.shape[1])[:, -1]
        accuracy = ((score > 0.5) == (right[:, -1] > 0.5)).double().mean().item()
    record = {"task": "reverse_digits", "seed": seed, "steps": STEPS, "held_out_accuracy": accuracy} | machine()
    model.save_pretrained(out)
    character_tokenizer().save_pretrained(out)
    (out / "made_with.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _with_score(generator: torch.Generator) -> LlamaForSequenceClassification:
    """The random model of `make` with a head of one value, which starts as zeros."""
    language_model = random_model(generator)
    language_model.config.num_labels = 1
    model: LlamaForSequenceClassification = LlamaForSequenceClassification(language_model.config)  # type: ignore[no-untyped-call]
    model.model.load_state_dict(language_model.model.state_dict())
    nn.init.zeros_(model.score.weight)
    return model


def _train(model: LlamaForSequenceClassification, cases: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Regress the score after each character on whether all is right so far."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP_STEPS) * (1.02 - step / STEPS)
        ids, right = next(cases)
        loss = (_scores(model, ids, right.shape[1]) - right).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _scores(model: LlamaForSequenceClassification, ids: Tensor, num_response: int) -> Tensor:
    """[rows, response characters]."""
    hidden = model.model(input_ids=ids, use_cache=False)[0][:, -num_response:]
    scores: Tensor = model.score(hidden)[..., 0]
    return scores


def _cases(task: ReverseDigits, generator: torch.Generator, *, batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """[rows, characters] ids of prompts and responses, and [rows, response characters] float: 1 while all is right."""
    start = 0
    while True:
        rows = [task[start + i] for i in range(batch)]
        start += batch
        prompts = character_ids(["^" + row["prompt"] for row in rows])
        answers = character_ids([row["answer"] + "$" for row in rows])
        responses = _with_mistakes(answers, generator)
        right = (responses == answers).float().cumprod(1)
        yield torch.cat([prompts, responses], 1), right


def _with_mistakes(answers: Tensor, generator: torch.Generator) -> Tensor:
    """Answers with digits replaced by others, ended early, or without an end."""
    rows, length = len(answers), answers.shape[1] - 1
    share = WRONG_SHARES[torch.randint(0, len(WRONG_SHARES), (rows,), generator=generator)]
    wrong = torch.rand(rows, length, generator=generator) < share[:, None]
    other = ZERO + (answers[:, :-1] - ZERO + torch.randint(1, 10, (rows, length), generator=generator)) % 10
    responses = answers.clone()
    responses[:, :-1] = torch.where(wrong, other, answers[:, :-1])
    kind = torch.rand(rows, generator=generator)
    early, place = kind < ENDS_EARLY, torch.randint(0, length, (rows,), generator=generator)
    responses[early.nonzero()[:, 0], place[early]] = EOS
    endless = kind > 1 - LACKS_END
    responses[endless, -1] = ZERO + torch.randint(0, 10, (int(endless.sum()),), generator=generator)
    return responses


def main() -> None:
    """The command line."""
    module = "flowrl.graphs.warm_start.make_reward_model"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Make a reward model.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(make(given.out, seed=given.seed)))


if __name__ == "__main__":
    main()

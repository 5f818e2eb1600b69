"""Supervised training on given answers, beside a cross-entropy of each row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import losses
from flowrl.backends.hf import HFBackend
from flowrl.rows import Key, Ragged, Rows

EXACT = {"gpt2": 1e-10, "llama": 1e-5}
TURNS = [
    ([1, 5, 6], [7, 8, 2], [1, 1, 1]),
    (
        [1, 9],
        [4, 5, 2, 11, 12, 6, 7, 2],
        [1, 1, 1, 0, 0, 1, 1, 1],
    ),  # two turns, and a user between
    ([1, 9, 9, 3], [13, 14, 15, 16], [0, 0, 0, 1]),  # the answer alone, not the work before it
    ([1, 2, 3, 4, 5, 6, 7], [8, 9], [0, 0]),
    ([1, 4], [], []),
    ([1, 5, 6], [20, 2], [1, 1]),  # the prompt of the first row again
]
"""Prompt, response and which of its tokens are trained."""


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("max_tokens", [None, 24, 1])
def test_sft_is_the_cross_entropy_of_what_is_trained(
    name: str, max_tokens: int | None, make_backend: Callable[..., HFBackend]
) -> None:
    backend = make_backend(name, double=True)
    module: Any = backend.network.module
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for prompt, response, trained in TURNS:
        ids = torch.tensor([[*prompt, *response]])
        labels = [-100] * len(prompt) + [i if t else -100 for i, t in zip(response, trained, strict=True)]
        logits = module(input_ids=ids).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        tokens += sum(trained)
    (total / tokens).backward()
    wanted = {parameter: p.grad.clone() for parameter, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    rows = Rows(
        [Key(0, i, 0) for i in range(len(TURNS))],
        {
            "prompt_ids": Ragged.pack([prompt for prompt, _, _ in TURNS], "int32"),
            "response_ids": Ragged.pack([response for _, response, _ in TURNS], "int32"),
            "mask": Ragged.pack([np.array(trained, np.bool_) for _, _, trained in TURNS], "bool"),
        },
    )
    loss = losses.sft()
    metrics = backend.backward(rows, loss, 1.0, max_tokens)
    assert metrics["tokens"].total == tokens
    assert metrics["rows"].total == 4
    denominator = loss.denominator(tokens, 4)
    assert metrics["loss"].total / denominator == pytest.approx(total.item() / tokens, rel=EXACT[name])
    for parameter, p in module.named_parameters():
        torch.testing.assert_close(p.grad / denominator, wanted[parameter], rtol=EXACT[name], atol=EXACT[name])

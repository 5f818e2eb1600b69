"""Losses that compare rows, on a real model: pairs, micro-batches, and a reward model's score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import losses
from flowrl.backends import batch as batch_module
from flowrl.backends.hf import HFBackend
from flowrl.errors import NodeError
from flowrl.loss import Loss
from flowrl.rows import Key, Ragged, Rows

MakeBackend = Callable[..., HFBackend]
SIDES = [[1, -1], [-1, 0, 1], [1, -1], [1], [-1, 1, -1], [0, 0]]
"""By prompt. The rejected row of the third has no trained token, and the fourth has lost its partner."""
PAIRS = [(0, 1), (4, 2), (9, 8), (9, 10)]
WEIGHTS = [2 / 7, 2 / 7, 3 / 7 / 2, 3 / 7 / 2]
"""The mean over seven rows of the mean over each row's pairs."""


def make_rows() -> Rows:
    rng = np.random.default_rng(0)
    keys = [Key(0, prompt, sample) for prompt, sides in enumerate(SIDES) for sample in range(len(sides))]
    prompts = [rng.integers(3, 30, size=3 + prompt).tolist() for prompt in range(len(SIDES))]
    responses = [rng.integers(3, 30, size=rng.integers(1, 7)).tolist() for _ in keys]
    masks = [rng.random(len(response)) < 0.7 for response in responses]
    for row, mask in enumerate(masks):
        mask[-1] = row != 6
    masks[6][:] = False
    return Rows(
        keys,
        {
            "prompt_ids": Ragged.pack([prompts[key.prompt] for key in keys], "int32"),
            "response_ids": Ragged.pack(responses, "int32"),
            "mask": Ragged.pack(masks, "bool"),
            "ref_logprobs": Ragged.pack([rng.normal(-2, 1, len(response)) for response in responses], "float64"),
            "preference": np.array([side for sides in SIDES for side in sides], np.float32),
        },
    )


def gradients(backend: HFBackend) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in backend.network.module.named_parameters() if p.grad is not None}


def backward(backend: HFBackend, loss: Loss, parts: list[Rows], max_tokens: int | None) -> tuple[float, dict[str, Any]]:
    """The mean loss over some passes, whose gradients add up, and the sums of their metrics."""
    backend.network.module.zero_grad()
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in backend.backward(part, loss, 1.0, max_tokens).items():
            sums[name] = sums[name] + value if name in sums else value
    return sums["loss"].total / loss.denominator(sums["tokens"].total, sums["rows"].total), sums


def plainly(backend: HFBackend, rows: Rows, row: int) -> Tensor:
    """The log-ratio of a row's trained tokens, by the model itself."""
    module: Any = backend.network.module
    prompt, response = rows["prompt_ids"][row], rows["response_ids"][row]
    ids = torch.tensor([[*prompt, *response]]).long()
    logprobs = module(input_ids=ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0] - torch.tensor(rows["ref_logprobs"][row])
    return chosen[torch.tensor(rows["mask"][row])].sum()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dpo_s_gradient_is_the_one_that_torch_finds_without_flowrl(name: str, make_backend: MakeBackend) -> None:
    backend = make_backend(name, double=True)
    rows, exact = make_rows(), {"gpt2": 1e-10, "llama": 1e-5}[name]
    total = torch.zeros((), dtype=torch.float64)
    for (chosen, rejected), weight in zip(PAIRS, WEIGHTS, strict=True):
        margin = 0.5 * (plainly(backend, rows, chosen) - plainly(backend, rows, rejected))
        total = total - weight * torch.nn.functional.logsigmoid(margin)
    backend.network.module.zero_grad()
    (7 * total).backward()
    wanted = gradients(backend)
    by_prompt = [[i for i, key in enumerate(rows.keys) if key.prompt == prompt] for prompt in range(len(SIDES))]
    cuts = [[range(len(rows))], by_prompt, [range(5), range(5, len(rows))]]
    for parts in cuts:
        for max_tokens in (None, 40, 1):
            loss, sums = backward(backend, losses.dpo(beta=0.5), [rows.take(list(part)) for part in parts], max_tokens)
            assert loss == pytest.approx(total.item(), rel=exact)
            assert (sums["rows"].total, sums["left_out"]) == (7, (12 - 7, 12))
            assert sums["tokens"].total == sum(int(rows["mask"][i].sum()) for i in (0, 1, 2, 4, 8, 9, 10))
            assert sums["accuracy"].weight == 7
            for parameter, gradient in gradients(backend).items():
                torch.testing.assert_close(gradient, wanted[parameter], rtol=exact, atol=exact)


def test_rows_that_make_no_pair_are_not_read(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "SHARED_SHARE", 0)
    backend = make_backend()
    seen: list[int] = []
    backend.network.module.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(len(args[0]))
    )
    backward(backend, losses.dpo(), [make_rows()], 1)
    assert seen == [2, 2, 3]


def test_a_pass_without_a_pair_trains_nothing(make_backend: MakeBackend) -> None:
    backend = make_backend()
    metrics = backend.backward(make_rows().take([5, 6, 7, 11, 12]), losses.dpo(), 1.0, None)
    assert (metrics["tokens"], metrics["rows"], metrics["loss"]) == ((0, 1), (0, 1), (0, 0))
    assert metrics["left_out"] == (4, 4)
    assert gradients(backend) == {}


def test_a_preference_a_token_is_refused(make_backend: MakeBackend) -> None:
    rows = make_rows()
    with pytest.raises(NodeError, match=r"(?s)column 'preference' has one number a token.*one number a row"):
        make_backend().backward(rows.with_columns(preference=rows["ref_logprobs"]), losses.dpo(), 1.0, None)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_reward_model_is_trained_by_the_score_of_the_last_token(name: str, make_backend: MakeBackend) -> None:
    backend = make_backend(name, double=True, head="score")
    module: Any = backend.network.module
    torch.nn.init.normal_(module.score.weight, generator=torch.Generator().manual_seed(0))
    rows, exact = make_rows(), {"gpt2": 1e-10, "llama": 1e-5}[name]
    margin = np.arange(len(rows), dtype=np.float64) / 10

    def score(row: int) -> Tensor:
        ids = torch.tensor([[*rows["prompt_ids"][row], *rows["response_ids"][row]]]).long()
        value: Tensor = module.score(module.base_model(input_ids=ids)[0])[0, -1, 0]
        return value

    total = torch.zeros((), dtype=torch.float64)
    for (chosen, rejected), weight in zip(PAIRS, WEIGHTS, strict=True):
        difference = score(chosen) - score(rejected) - margin[chosen]
        total = total - weight * torch.nn.functional.logsigmoid(difference)
    module.zero_grad()
    (7 * total).backward()
    wanted = gradients(backend)
    assert wanted["score.weight"].abs().sum() > 0.1
    for max_tokens in (None, 40, 1):
        loss, sums = backward(backend, losses.bradley_terry(), [rows.with_columns(margin=margin)], max_tokens)
        assert loss == pytest.approx(total.item(), rel=exact)
        assert sums["rows"].total == 7
        for parameter, gradient in gradients(backend).items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=exact, atol=exact)
    found = backend.forward(rows, ["scores"], 1.0)["scores"]
    np.testing.assert_allclose(found, [score(row).item() for row in range(len(rows))], rtol=1e-5)
    loss, _ = backward(backend, losses.bradley_terry(), [rows], None)  # without the column, which it can do without
    assert not math.isclose(loss, total.item(), rel_tol=1e-3)


def test_a_reward_model_learns_which_is_better(make_backend: MakeBackend) -> None:
    backend = make_backend(head="score", lr=3e-3)
    rows, loss = make_rows(), losses.bradley_terry()
    history = []
    for _ in range(30):
        metrics = backend.backward(rows, loss, 1.0, None)
        backend.step(loss.denominator(metrics["tokens"].total, metrics["rows"].total), 1.0)
        history.append((metrics["loss"].mean, metrics["accuracy"].mean))
    assert history[0] == pytest.approx((math.log(2), 0.5))  # a new head scores everything 0
    assert history[-1][0] < 0.1
    assert history[-1][1] == 1.0

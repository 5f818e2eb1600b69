"""The tiny backend honours the whole contract, and learns."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl import losses
from flowrl.backend import Backend, Prompt, Response, Sampling
from flowrl.backends.tiny import TinyBackend
from flowrl.backends.tiny_source import BOS, EOS, describe
from flowrl.errors import BackendError
from flowrl.loss import loss
from flowrl.rows import Key, Ragged, Rows

ONE_RANK = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)
MakeRows = Callable[..., Rows]


@loss
def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -logprobs * advantages


def tiny(source: str = "tiny", **settings: Any) -> TinyBackend:
    settings = {"optimizer": fl.AdamW(lr=0.1), **settings}
    return TinyBackend(fl.Model(source, backend="tiny", **settings), ONE_RANK, "cpu")


def ask(backend: Backend, texts: list[str]) -> list[Prompt]:
    return [Prompt(key=Key(0, i), ids=backend.tokenizer.encode(text)) for i, text in enumerate(texts)]


def test_text_and_messages_become_bytes_and_back() -> None:
    tokenizer = TinyBackend.load_tokenizer("tiny")
    assert tokenizer.encode("aé") == [BOS, 97, 195, 169]
    assert tokenizer.decode([97, 195, 169, EOS]) == "aé"
    assert tokenizer.decode([195]) == "\ufffd"
    ids = tokenizer.encode([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user: hi\nassistant: "
    assert ids.count(BOS) == 1


def test_its_gradient_is_the_exact_one(make_rows: MakeRows) -> None:
    backend = tiny()
    prompts = ask(backend, ["1>", "ab"])
    rows = make_rows(
        prompts,
        list(chain.from_iterable(backend.generate(prompts, Sampling(n=2, max_new_tokens=3, ignore_eos=True), 0))),
    )
    backend.backward(rows, reinforce(), 1.0, None)
    last = backend.network.module.last.weight  # type: ignore[union-attr]
    wanted = torch.zeros_like(last)
    before = backend.network.module.before.weight  # type: ignore[union-attr]
    for i, advantage in enumerate(rows["advantages"]):
        ids = [*rows["prompt_ids"][i].tolist(), *rows["response_ids"][i].tolist()]
        for at in range(len(rows["prompt_ids"][i]), len(ids)):
            one, two, target = ids[at - 1], ids[at - 2], ids[at]
            probabilities = (last[one] + before[two]).softmax(-1).detach()
            probabilities[target] -= 1
            wanted[one] += float(advantage) * probabilities
    torch.testing.assert_close(last.grad, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("likely", [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.6])
def test_the_ratio_on_unchanged_weights_is_1(temperature: float, likely: dict[str, float], make_rows: MakeRows) -> None:
    backend = tiny()
    prompts = ask(backend, ["", "1", "a longer one"])
    sampling = Sampling(n=4, max_new_tokens=9, temperature=temperature, **likely)  # type: ignore[arg-type]
    together = list(chain.from_iterable(backend.generate(prompts, sampling, 5)))
    rows = make_rows(prompts, together)
    found = backend.forward(rows, ["logprobs"], temperature)["logprobs"].values
    np.testing.assert_allclose(np.exp(found - rows["old_logprobs"].values), 1, rtol=0, atol=1e-5)
    metrics = backend.backward(rows, losses.ppo_clip(), temperature, None)
    assert metrics["ratio"].mean == pytest.approx(1, abs=1e-5)


def test_sampler_and_trainer_divide_by_one_temperature(make_rows: MakeRows) -> None:
    backend = tiny()
    with torch.no_grad():  # logits [2, 0] for two tokens, whatever stands before, and no chance for another
        backend.network.module.before.weight.zero_()  # type: ignore[union-attr]
        backend.network.module.last.weight.fill_(-1e4)[:, :2] = torch.tensor([2.0, 0.0])  # type: ignore[union-attr]
    prompts = ask(backend, ["1"])
    sampling = Sampling(n=8, max_new_tokens=4, temperature=0.5)
    rows = make_rows(prompts, list(chain.from_iterable(backend.generate(prompts, sampling, 0))))
    first = rows["response_ids"].values == 0
    assert first.any()
    assert rows["old_logprobs"].values[first] == pytest.approx(-0.018150, abs=1e-6)
    trainer = backend.forward(rows, ["logprobs"], 0.5)["logprobs"].values
    assert trainer[first] == pytest.approx(-0.018150, abs=1e-6)
    assert backend.forward(rows, ["logprobs"], 1.0)["logprobs"].values[first] == pytest.approx(-0.126928, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_response_does_not_depend_on_its_batch(temperature: float) -> None:
    backend = tiny()
    prompts = ask(backend, ["", "1", "a longer one"])
    sampling = Sampling(n=4, max_new_tokens=9, temperature=temperature)
    together = list(chain.from_iterable(backend.generate(prompts, sampling, 5)))
    alone = [
        response for prompt in prompts for response in chain.from_iterable(backend.generate([prompt], sampling, 5))
    ]
    assert sorted(together, key=lambda r: r.key) == sorted(alone, key=lambda r: r.key)


def test_it_learns_to_count_up(make_rows: MakeRows) -> None:
    backend = tiny()
    started = time.process_time()

    def reward(response: Response) -> float:
        wanted = "".join(str((response.key.prompt + i) % 10) for i in range(1, 4))
        text = backend.tokenizer.decode(response.ids)
        return sum(a == b for a, b in zip(text.ljust(3), wanted, strict=True)) / 3

    with torch.no_grad():  # digits are likely from the start, as a model that was tuned would find them
        backend.network.module.last.weight[:, 48:58] += 5  # type: ignore[union-attr, operator]
    sampling = Sampling(n=16, max_new_tokens=3, ignore_eos=True)
    for step in range(100):
        prompts = ask(backend, [f"{digit}>" for digit in range(10)])
        responses = sorted(
            chain.from_iterable(backend.generate(prompts, sampling, step)), key=lambda response: response.key
        )
        rewards = np.array([reward(response) for response in responses], np.float32).reshape(10, 16)
        advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
        rows = make_rows(prompts, responses).with_columns(advantages=advantages)
        metrics = backend.backward(rows, reinforce(), 1.0, None)
        backend.step(metrics["tokens"].total, 1.0)
        backend.publish(step + 1)
    assert rewards.mean() > 0.5  # 0.1 at the start
    assert time.process_time() - started < 20  # takes about one; twenty is a fault, not a slow machine
    assert responses[0].version == 99


def test_the_same_source_gives_the_same_weights_and_another_one_others() -> None:
    assert tiny().checksum() == tiny(optimizer=None).checksum()
    assert tiny("another").checksum() != tiny().checksum()


def test_it_is_saved_and_continues_bit_for_bit(tmp_path: Path, make_rows: MakeRows) -> None:
    backend = tiny()
    prompts = ask(backend, ["1>", "2>"])
    rows = make_rows(prompts, list(chain.from_iterable(backend.generate(prompts, Sampling(n=4, max_new_tokens=5), 0))))
    backend.backward(rows, reinforce(), 1.0, None)
    backend.step(10.0)
    backend.publish(1)
    backend.save(tmp_path)
    other = tiny("another")
    other.load(tmp_path)
    for one in (backend, other):
        one.backward(rows, reinforce(), 1.0, None)
        one.step(10.0, 0.1)
    assert backend.checksum() == other.checksum()
    replica = tiny(str(tmp_path), optimizer=None)
    assert replica.import_weights(dict(backend.export_weights()), 2) == backend.checksum()
    with pytest.raises(BackendError, match=r"'last\.weight' is missing"):
        replica.import_weights({}, 3)


def test_a_value_head_computes_values() -> None:
    critic = tiny(head="value")
    columns = {"prompt_ids": Ragged.pack([[BOS]], "int32"), "response_ids": Ragged.pack([[5, 6]], "int32")}
    rows = Rows([Key(0, 0, 0)], columns)
    assert critic.forward(rows, ["values"], 1.0)["values"][0].tolist() == [0.0, 0.0]


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="there is no tiny model"):
        describe(str(tmp_path / "tiny"))


def test_it_needs_no_transformers() -> None:
    code = "import sys, flowrl.backends.tiny; sys.exit('transformers' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0

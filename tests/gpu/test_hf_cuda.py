"""The Hugging Face backend on a CUDA device: the invariants of ``tests/backends`` in float32 and bfloat16."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import flowrl as fl
from flowrl.backend import Prompt, Response, Sampling
from flowrl.backends import batch as batch_module
from flowrl.backends.hf import HFBackend
from flowrl.loss import loss
from flowrl.rows import Key, Ragged, Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALPHABET = "_^$0123456789abcdefghijklmnopqrstuvwxyz>"
LENGTHS = (3, 11, 7, 20)
ONE_RANK = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of a log-prob, in nats, between two ways to compute it: bounds that hold on an H200, not what was measured there."""


@loss
def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Any:
    """TF32 would hide what these tests look for."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    shared: dict[str, Any] = {"vocab_size": len(ALPHABET), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.1, **shared,
    )  # fmt: skip
    gpt2 = GPT2Config(n_embd=256, n_layer=4, n_head=8, n_positions=256, initializer_range=0.1, **shared)
    made = {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2)}
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    for name, model in made.items():
        model.save_pretrained(root / name)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="_", bos_token="^", eos_token="$"
        ).save_pretrained(root / name)
    return {name: root / name for name in made}


def make(folders: dict[str, Path], name: str, dtype: Any, device: str = "cuda", lr: float | None = 1e-3) -> HFBackend:
    optimizer = fl.AdamW(lr=lr, warmup_steps=2) if lr else None
    return HFBackend(fl.Model(str(folders[name]), dtype=dtype, optimizer=optimizer), ONE_RANK, device)


def prompts(num: int = 4) -> list[Prompt]:
    rng = np.random.default_rng(0)
    ids = [[1, *rng.integers(3, 40, LENGTHS[i % 4]).tolist()] for i in range(num)]
    return [Prompt(key=Key(0, i), ids=one) for i, one in enumerate(ids)]


def rows_of(asked: list[Prompt], responses: list[Response]) -> Rows:
    responses = sorted(responses, key=lambda response: response.key)
    ids = {prompt.key: prompt.ids for prompt in asked}
    return Rows(
        [response.key for response in responses],
        {
            "prompt_ids": Ragged.pack([ids[response.key.group] for response in responses], "int32"),
            "response_ids": Ragged.pack([response.ids for response in responses], "int32"),
            "mask": Ragged.pack([[True] * len(response.ids) for response in responses], "bool"),
            "old_logprobs": Ragged.pack([response.logprobs for response in responses], "float32"),
            "advantages": np.random.default_rng(1).normal(size=len(responses)).astype("float32"),
        },
    )


def sample(backend: HFBackend, **settings: Any) -> Rows:
    asked = prompts()
    return rows_of(
        asked,
        list(chain.from_iterable(backend.generate(asked, Sampling(**{"n": 4, "max_new_tokens": 24, **settings}), 0))),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trainer_finds_the_sampler_s_log_probs(name: str, dtype: str, folders: dict[str, Path]) -> None:
    backend = make(folders, name, dtype)
    rows = sample(backend, temperature=0.7, ignore_eos=True)
    found = backend.forward(rows, ["logprobs"], 0.7)["logprobs"].values
    gap = np.abs(found - rows["old_logprobs"].values)
    print(f"{name} {dtype}: log-prob gap mean {gap.mean():.2g} max {gap.max():.2g}")
    assert gap.mean() < TOLERANCE[dtype] / 4
    assert gap.max() < TOLERANCE[dtype] * 4
    sampled_here = rows.with_columns(sampler_logprobs=rows["old_logprobs"])
    metrics = backend.backward(sampled_here, clipped(), 0.7, None)
    assert metrics["mismatch_kl"].mean < TOLERANCE[dtype] ** 2 + 1e-9


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_response_does_not_depend_on_its_batch(name: str, folders: dict[str, Path]) -> None:
    backend = make(folders, name, "float32", lr=None)
    sampling = Sampling(n=4, max_new_tokens=24)
    together = {r.key: r for r in chain.from_iterable(backend.generate(prompts(16), sampling, 3))}
    alone = {r.key: r for prompt in prompts(16) for r in chain.from_iterable(backend.generate([prompt], sampling, 3))}
    same = [together[key].ids == alone[key].ids for key in together]
    assert sum(same) >= len(same) - 1  # a draw within 1e-6 of a border may fall on either side


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cuda_and_cpu_agree(name: str, folders: dict[str, Path]) -> None:
    device, host = make(folders, name, "float32"), make(folders, name, "float32", device="cpu")
    rows = sample(device)
    np.testing.assert_allclose(
        device.forward(rows, ["logprobs", "entropy"], 1.0)["entropy"].values,
        host.forward(rows, ["logprobs", "entropy"], 1.0)["entropy"].values,
        atol=1e-3,
    )
    norms = []
    for backend in (device, host):
        tokens = backend.backward(rows, clipped(), 1.0, 200)["tokens"].total
        norms.append(backend.step(tokens, 1.0)["grad_norm"].total)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_do_not_depend_on_micro_batches_or_shared_prompts(
    dtype: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = []
    for max_tokens, share in ((None, 9), (None, 0), (100, 9), (1, 0)):
        monkeypatch.setattr(batch_module, "SHARED_SHARE", share)
        backend = make(folders, "llama", dtype)
        rows = sample(backend)
        tokens = backend.backward(rows, clipped(), 1.0, max_tokens)["tokens"].total
        norms.append(backend.step(tokens)["grad_norm"].total)
    assert norms == pytest.approx([norms[0]] * 4, rel={"float32": 1e-3, "bfloat16": 5e-2}[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_continues(dtype: str, folders: dict[str, Path], tmp_path: Path) -> None:
    backend, resumed = make(folders, "llama", dtype), make(folders, "llama", dtype)
    rows = sample(backend)

    def train(one: HFBackend) -> None:
        tokens = one.backward(rows, clipped(), 1.0, None)["tokens"].total
        assert one.step(tokens, 1.0)["skipped"].total == 0

    train(backend)
    backend.save(tmp_path)
    resumed.load(tmp_path)
    assert backend.checksum() == resumed.checksum()
    responses = [
        sorted(
            chain.from_iterable(one.generate(prompts(), Sampling(n=2, max_new_tokens=16), 1)),
            key=lambda response: response.key,
        )
        for one in (backend, resumed)
    ]
    assert responses[0] == responses[1]
    train(backend)
    train(resumed)
    for (name, one), (_, other) in zip(backend.export_weights(), resumed.export_weights(), strict=True):
        assert float((one - other).abs().float().mean()) < 1e-5, name  # attention's backward adds in any order


def test_weights_move_between_devices(folders: dict[str, Path]) -> None:
    device, host = make(folders, "llama", "bfloat16"), make(folders, "llama", "bfloat16", device="cpu", lr=None)
    zeroed = {name: torch.zeros_like(tensor) for name, tensor in host.export_weights()}
    host.import_weights(zeroed, 1)
    assert host.import_weights(dict(device.export_weights()), 2) == device.checksum()


def test_generation_keeps_a_pace(folders: dict[str, Path]) -> None:
    backend = make(folders, "llama", "bfloat16", lr=None)
    sampling = Sampling(n=16, max_new_tokens=64, ignore_eos=True)
    list(chain.from_iterable(backend.generate(prompts(16), sampling, 0)))
    torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = sum(len(response.ids) for response in chain.from_iterable(backend.generate(prompts(16), sampling, 1)))
    seconds = time.perf_counter() - start
    print(f"{tokens / seconds:.0f} tokens/s, {1e3 * seconds / 64:.2f} ms a step of {16 * 16} rows")
    assert tokens == 16 * 16 * 64
    assert seconds < 20  # about half a second

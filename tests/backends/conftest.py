"""Small random models in folders, and rows made of what they sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import flowrl as fl
from flowrl.backend import Prompt, Response, Sampling
from flowrl.backends.hf import HFBackend
from flowrl.rows import Key, Ragged, Rows

ALPHABET = "_^$0123456789abcdefghijklmnopqrstuvwxyz>"
PAD, BOS, EOS = 0, 1, 2
ONE_RANK = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", BOS)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", bos_token="^", eos_token="$")


def _models() -> dict[str, Callable[[], PreTrainedModel]]:
    shared = {
        "vocab_size": len(ALPHABET), "initializer_range": 0.3,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    llama = shared | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    gpt2 = shared | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**llama, tie_word_embeddings=True)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**llama, sliding_window=4)),
    }


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama (rotary positions, tied, grouped heads), a GPT-2 (learned positions) and a Mistral (sliding window)."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, make) in enumerate(_models().items()):
        torch.manual_seed(seed)
        make().save_pretrained(root / name)
        _tokenizer().save_pretrained(root / name)
    return {name: root / name for name in _models()}


@pytest.fixture(scope="session")
def make_backend(folders: dict[str, Path]) -> Callable[..., HFBackend]:
    """A backend of one of `folders`; further arguments go to the model."""

    def make(name: str = "llama", *, lr: float | None = 1e-2, double: bool = False, **settings: Any) -> HFBackend:
        optimizer = settings.pop("optimizer", None) or (fl.AdamW(lr=lr) if lr is not None else None)
        source = str(folders.get(name, name))
        backend = HFBackend(fl.Model(source, optimizer=optimizer, **settings), ONE_RANK, "cpu")
        if double:
            backend.network.module.double()
        return backend

    return make


@pytest.fixture(scope="session")
def prompts_of() -> Callable[..., list[Prompt]]:
    """Prompts from texts, through a backend's tokenizer."""

    def make(backend: Any, texts: Sequence[str]) -> list[Prompt]:
        return [Prompt(key=Key(0, i), ids=backend.tokenizer.encode(text)) for i, text in enumerate(texts)]

    return make


@pytest.fixture(scope="session")
def sampled(prompts_of: Callable[..., list[Prompt]]) -> Callable[..., Rows]:
    """Rows that a backend sampled, with every column that a policy loss reads."""

    def sample(backend: Any, texts: Sequence[str], seed: int = 0, **settings: Any) -> Rows:
        prompts = prompts_of(backend, texts)
        sampling = Sampling(**{"n": 2, "max_new_tokens": 6, **settings})
        return rows_of(prompts, list(chain.from_iterable(backend.generate(prompts, sampling, seed))))

    return sample


def rows_of(prompts: Sequence[Prompt], responses: Sequence[Response]) -> Rows:
    responses = sorted(responses, key=lambda response: response.key)
    ids = {prompt.key: prompt.ids for prompt in prompts}
    rng = np.random.default_rng(0)
    return Rows(
        [response.key for response in responses],
        {
            "prompt_ids": Ragged.pack([ids[response.key.group] for response in responses], "int32"),
            "response_ids": Ragged.pack([response.ids for response in responses], "int32"),
            "mask": Ragged.pack([[True] * len(response.ids) for response in responses], "bool"),
            "old_logprobs": Ragged.pack([response.logprobs for response in responses], "float32"),
            "advantages": rng.normal(size=len(responses)).astype("float32"),
        },
    )


@pytest.fixture(scope="session")
def make_rows() -> Callable[[Sequence[Prompt], Sequence[Response]], Rows]:
    return rows_of

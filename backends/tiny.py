"""A real backend on two small tables, for tests of runtimes and for users' tests of graphs.

The model adds two tables: the logits of the next token are ``last[token] + before[token before that]``, over bytes. It
honours the whole contract of `flowrl.backend` with the code that the real backends run; only the network is small. It
learns what a pair of tokens decides, such as counting up.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.backend import Ranks
from flowrl.model import Head, Model
from flowrl.seeds import mix

from .batch import SharedPrompts
from .tiny_source import BOS, CONFIG_FILE, VOCAB_SIZE, TinyTokenizer, find_folder
from .torch_backend import TorchBackend

WEIGHTS_FILE = "model.safetensors"
START_STD = 0.02


class TinyModule(nn.Module):
    """Two tables for the next token, and a third for heads of one value."""

    def __init__(self, seed: int, head: Head) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.last = nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        self.before = nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        for table in (self.last, self.before):
            nn.init.normal_(table.weight, 0.0, START_STD, generator=generator)
        if head != "lm":
            self.score = nn.Embedding(VOCAB_SIZE, 1)
            nn.init.zeros_(self.score.weight)


class TinyNetwork:
    """See `network.Network`. A state is a pair of ids: the last token and the one before it (`BOS` at the start)."""

    vocab_size = VOCAB_SIZE
    max_length: int | None = None
    shares_prompts = False
    cache_bytes = 16

    def __init__(self, module: TinyModule, head: Head) -> None:
        self.module: nn.Module = module
        self._tables = module
        self.head = head

    def states(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """[wanted, 2] int64."""
        before = torch.where(positions > 0, ids[rows, (positions - 1).clamp(min=0)], BOS)
        return torch.stack([ids[rows, positions], before], 1)

    def shared_states(self, shared: SharedPrompts, rows: Tensor, tokens: Tensor) -> Tensor:
        """There is nothing in a prompt to share."""
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        """[wanted, vocabulary]."""
        total: Tensor = self._tables.last(states[:, 0]) + self._tables.before(states[:, 1])
        return total

    def values(self, states: Tensor) -> Tensor:
        """[wanted]."""
        values: Tensor = self._tables.score(states[:, 0])[:, 0]
        return values

    def decoder(self, ids: Tensor, lengths: Tensor, num_samples: int, num_new: int) -> TinyDecoder:
        """Remember the last token of each prompt and the one before it."""
        before = torch.where(lengths > 1, ids[:, -2] if ids.shape[1] > 1 else BOS, BOS)
        return TinyDecoder(self, torch.stack([ids[:, -1], before], 1).repeat_interleave(num_samples, 0))


class TinyDecoder:
    """See `network.Decoder`."""

    def __init__(self, network: TinyNetwork, states: Tensor) -> None:
        self._network, self._states = network, states
        self.logits = network.logits(states)

    def advance(self, ids: Tensor) -> None:
        """Append one id a row."""
        self._states = torch.stack([ids, self._states[:, 0]], 1)
        self.logits = self._network.logits(self._states)

    def select(self, rows: Tensor) -> None:
        """Keep some rows."""
        self._states = self._states[rows]


class TinyBackend(TorchBackend):
    """Its source is ``"tiny"`` or any other name, each with its own start weights, or a folder from `save`."""

    def __init__(self, model: Model, ranks: Ranks, device: str) -> None:
        folder = find_folder(model.source)
        module = TinyModule(mix(*model.source.encode()) % (1 << 63), model.head)
        if folder:
            module.load_state_dict(load_file(folder / WEIGHTS_FILE))
        dtype = getattr(torch, model.dtype)
        super().__init__(model, ranks, TinyNetwork(module.to(device, dtype), model.head), TinyTokenizer())

    @staticmethod
    def load_tokenizer(source: str) -> TinyTokenizer:
        """The same for every tiny model."""
        find_folder(source)
        return TinyTokenizer()

    def _save_model(self, folder: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.export_weights()}, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps({"model_type": "flowrl-tiny", "vocab_size": VOCAB_SIZE}) + "\n")

    def _load_model(self, folder: Path) -> dict[str, Tensor]:
        return load_file(folder / WEIGHTS_FILE)

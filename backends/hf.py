"""Hugging Face models on one device a rank: the backend that needs nothing but torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.backend import Ranks
from flowrl.model import Model

from .hf_network import HFNetwork, load_module, quiet
from .hf_source import find_model
from .hf_tokenizer import HFTokenizer
from .state import named_state
from .torch_backend import TorchBackend


class HFBackend(TorchBackend):
    """A causal language model, or one with a ``value`` or ``score`` head (a linear layer of one output, ``score``).

    Weights, activations and gradients of one token are of the model's dtype; gradients are added up, and the optimizer
    works, in float32 (see `optimizer`). float16 has no loss scaling: sums are not divided before the optimizer, which
    keeps them large, and an overflow is an error.
    """

    tokenizer: HFTokenizer

    def __init__(self, model: Model, ranks: Ranks, device: str) -> None:
        folder = find_model(model.source, weights=True)
        module = load_module(folder, model.head, getattr(torch, model.dtype)).to(device)
        network = HFNetwork(module.eval(), model.head, str(folder))
        super().__init__(model, ranks, network, HFTokenizer(folder))

    @staticmethod
    def load_tokenizer(source: str) -> HFTokenizer:
        """The tokenizer of a model, without its weights."""
        return HFTokenizer(find_model(source))

    def _save_model(self, folder: Path) -> None:
        module: Any = self.network.module
        with quiet():
            module.save_pretrained(folder)
        self.tokenizer.save(folder)

    def _load_model(self, folder: Path) -> dict[str, Tensor]:
        module = load_module(folder, self.model.head, next(self.network.module.parameters()).dtype)
        return named_state(module)

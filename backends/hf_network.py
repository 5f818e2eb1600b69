"""A Hugging Face model as a `Network`: its loading, its hidden states and its KV cache."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.cache_utils import DynamicLayer

from flowrl.errors import BackendError
from flowrl.model import Head

from .hf_source import describe


def load_module(folder: Path, head: Head, dtype: torch.dtype) -> nn.Module:
    """Read a model in a dtype, on the CPU.

    A head of one value that the folder does not hold starts as zeros: the same on every rank, and no value is better
    known than another.

    Raises:
        BackendError: the folder lacks weights, other than those of a ``value`` or ``score`` head.
    """
    factory: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    labels = {} if head == "lm" else {"num_labels": 1}
    with quiet():
        module, info = factory.from_pretrained(folder, dtype=dtype, output_loading_info=True, **labels)
    missing = sorted(info["missing_keys"])
    if head != "lm" and missing == ["score.weight"]:
        nn.init.zeros_(module.score.weight)
        missing = []
    if missing:
        raise BackendError(
            f"model folder {folder} lacks weights of {type(module).__name__}",
            found=f"no {', '.join(missing[:8])}",
            wanted="every weight that the configuration asks for",
        )
    return cast(nn.Module, module)


class HFNetwork:
    """See `network.Network`."""

    def __init__(self, module: nn.Module, head: Head, source: str) -> None:
        self.module, self.head = module, head
        self._any = cast(Any, module)
        self._base: Any = self._any.base_model
        self._config: Any = self._any.config.get_text_config()
        self.vocab_size: int = self._config.vocab_size
        self.max_length = describe(source).max_length
        # transformers renamed the parameter within version 5
        parameters = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        layers = DynamicCache(config=self._config).layers
        self._plain_cache = self._config._attn_implementation == "sdpa" and all(type(x) is DynamicLayer for x in layers)
        self.cache_bytes = _cache_bytes(self._config, next(module.parameters()).element_size())
        if head == "lm":
            self._output: Any = self._any.get_output_embeddings()
            self._softcap: float | None = getattr(self._config, "final_logit_softcapping", None)
            self._scale = _logit_scale(self._config)
            self._check_logits()
        elif not isinstance(getattr(module, "score", None), nn.Linear):
            name = type(module).__name__
            raise BackendError(f"backend 'hf' has no head '{head}' for {name}", wanted="a linear layer 'score'")

    def states(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """[wanted, width]. Padding stands on the right, where the causal mask hides it; no mask or positions needed."""
        hidden: Tensor = self._base(input_ids=ids, use_cache=False)[0]
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows * ids.shape[1] + positions)

    def logits(self, states: Tensor) -> Tensor:
        """[wanted, vocabulary]."""
        logits: Tensor = self._output(states)[..., : self.vocab_size]
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def values(self, states: Tensor) -> Tensor:
        """[wanted] float32."""
        values: Tensor = self._any.score(states)[..., 0]
        return values if values.dtype == torch.float64 else values.float()

    def decoder(self, ids: Tensor, lengths: Tensor, num_samples: int, num_new: int) -> HFDecoder:
        """Read the prompts once."""
        return HFDecoder(self, ids, lengths, num_samples, num_new)

    def read(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """[rows, tokens, width] states of the next tokens, which are added to the cache."""
        remembered = {self._cache_name: cache}
        hidden: Tensor = self._base(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **remembered
        )[0]
        return hidden

    def new_cache(self, num_new: int) -> Any:
        """An empty cache, and whether its layers take ready-made masks."""
        cache = DynamicCache(config=self._config)
        if self._plain_cache:
            cache.layers = [RoomyLayer(num_new) for _ in range(self._config.num_hidden_layers)]
        return cache

    @property
    def plain_cache(self) -> bool:
        """Whether every layer attends to everything before it, by one mask."""
        return self._plain_cache

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Some models do more to their logits than this class knows; find out now, not by a ratio that is off."""
        device = next(self.module.parameters()).device
        ids = torch.arange(min(4, self.vocab_size), device=device)[None]
        wanted = self._any(input_ids=ids, use_cache=False).logits[..., : self.vocab_size].float()
        found = self.logits(self._base(input_ids=ids, use_cache=False)[0]).float()
        if not torch.allclose(found, wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max()), equal_nan=True):
            raise BackendError(
                f"{type(self.module).__name__} changes its logits in a way that backend 'hf' does not know",
                found=f"a difference of {float((found - wanted).abs().max()):.3g}",
                wanted="logits = head(states), scaled or soft-capped",
            )


class HFDecoder:
    """See `network.Decoder`: prompts are padded on the left, under explicit positions and masks."""

    def __init__(self, network: HFNetwork, ids: Tensor, lengths: Tensor, num_samples: int, num_new: int) -> None:
        self._network = network
        self._length = ids.shape[1]
        self._cache: Any = network.new_cache(num_new)
        padding = self._length - lengths
        padded = bool(padding.any())
        columns = torch.arange(self._length, device=ids.device)
        self._positions = (columns - padding[:, None]).clamp(min=0) if padded else columns[None]
        self._real = columns >= padding[:, None] if padded else None
        hidden = network.read(ids, self._positions, self._prompt_mask(), self._cache)
        self.logits = network.logits(hidden[:, -1]).repeat_interleave(num_samples, 0)
        self._cache.batch_repeat_interleave(num_samples)
        self._positions = self._positions[:, -1:] + 1
        if self._real is not None:
            self._positions = self._positions.repeat_interleave(num_samples, 0)
            more = self._real.new_ones(len(ids), num_new)
            self._real = torch.cat([self._real, more], 1).repeat_interleave(num_samples, 0)

    def advance(self, ids: Tensor) -> None:
        """Append one id a row."""
        self._length += 1
        hidden = self._network.read(ids[:, None], self._positions, self._next_mask(), self._cache)
        self.logits = self._network.logits(hidden[:, -1])
        self._positions = self._positions + 1

    def select(self, rows: Tensor) -> None:
        """Keep some rows."""
        self._cache.batch_select_indices(rows)
        if self._real is not None:
            self._real, self._positions = self._real[rows], self._positions[rows]

    def _prompt_mask(self) -> Tensor | None:
        """[prompts, 1, tokens, tokens] where each token sees itself (so that no padding is without sight, and nan) and
        the real ones before it; or [prompts, tokens] for the model to make its own of."""
        if self._real is None or not self._network.plain_cache:
            return self._real
        square = torch.ones(self._length, self._length, dtype=torch.bool, device=self._real.device)
        itself = torch.eye(self._length, dtype=torch.bool, device=self._real.device)
        return (square.tril() & self._real[:, None, None, :]) | itself

    def _next_mask(self) -> Tensor | None:
        if self._real is None:
            return None
        seen = self._real[:, : self._length]
        return seen[:, None, None, :] if self._network.plain_cache else seen


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A cache layer with room for all that will be appended: a step writes in place where its parent copies it all."""

    def __init__(self, num_new: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_new = num_new
        self._length = 0
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [rows, heads, tokens, width]; all keys and values."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._room is None:
            self.device, self.dtype = key_states.device, key_states.dtype
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            keys, values = self._room
            keys[:, :, start : self._length] = key_states
            values[:, :, start : self._length] = value_states
            self.keys, self.values = keys[:, :, : self._length], values[:, :, : self._length]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, and make room."""
        assert self.keys is not None
        assert self.values is not None
        self._room = self._roomy(self.keys, repeats), self._roomy(self.values, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        assert self._room is not None
        self._room = (self._room[0].index_select(0, indices), self._room[1].index_select(0, indices))

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens so far."""
        return self._length

    def _roomy(self, part: Tensor, repeats: int) -> Tensor:
        rows, heads, length, width = part.shape
        room = part.new_empty(rows, repeats, heads, length + self._num_new, width)
        room[:, :, :, :length] = part[:, None]
        return room.view(rows * repeats, heads, length + self._num_new, width)


def _cache_bytes(config: Any, element_size: int) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(width) * element_size


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    scale = getattr(config, "logit_scale", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    assert math.isfinite(scale / scaling)
    return float(scale / scaling)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, and no table of new heads while a model loads: what is missing is checked here."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

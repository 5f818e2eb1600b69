"""KV caches of Hugging Face models: one that grows in place while sampling, and one whose prompts many rows share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .batch import SharedPrompts


class Reader(Protocol):
    """What a decoder needs of `hf_network.HFNetwork`."""

    shares_prompts: bool

    def read(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """[rows, tokens, width] states of the next tokens, which are added to the cache."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[wanted, vocabulary]."""
        ...

    def new_cache(self, num_new: int) -> Any:
        """An empty cache."""
        ...


class HFDecoder:
    """See `network.Decoder`: prompts are padded on the left, under explicit positions and masks."""

    def __init__(self, network: Reader, ids: Tensor, lengths: Tensor, num_samples: int, num_new: int) -> None:
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
        if self._real is None or not self._network.shares_prompts:
            return self._real
        square = torch.ones(self._length, self._length, dtype=torch.bool, device=self._real.device)
        itself = torch.eye(self._length, dtype=torch.bool, device=self._real.device)
        return (square.tril() & self._real[:, None, None, :]) | itself

    def _next_mask(self) -> Tensor | None:
        if self._real is None:
            return None
        seen = self._real[:, : self._length]
        return seen[:, None, None, :] if self._network.shares_prompts else seen


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


class PrefixLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A cache layer that holds prompts at first, and then gives each row its own prompt's keys and values."""

    def __init__(self, shared: SharedPrompts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep [prompts, heads, tokens, width]; or append [rows, heads, tokens, width] to them, for this pass alone."""
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        keys, values = self._shared.to_rows(self.keys), self._shared.to_rows(self.values)
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)

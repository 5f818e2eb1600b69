"""What `TorchBackend` needs of a model: hidden states, what a head makes of them, and a decoder with a memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from flowrl.model import Head

from .batch import SharedPrompts


class Decoder(Protocol):
    """Sequences that grow by one token at a time, under one batch of memory (a KV cache)."""

    logits: Tensor
    """[rows, vocabulary] of the next token."""

    def advance(self, ids: Tensor) -> None:
        """Append one id a row ([rows] int64), and compute the next `logits`."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep the given rows ([kept] int64, rising) and forget the others."""
        ...


class Network(Protocol):
    """One model on one device, dropout off."""

    module: nn.Module
    head: Head
    vocab_size: int
    """Ids below it may be sampled; logits are no wider."""
    max_length: int | None
    """Longest sequence in tokens; None when it has no limit."""
    shares_prompts: bool
    """Whether it has `shared_states`: a prompt is read once, whatever the number of its rows."""
    cache_bytes: int
    """That one token of one row holds in a decoder."""

    def states(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of some tokens.

        Args:
            ids: [rows, tokens] int64, padded on the right with any id.
            rows: [wanted] int64, with
            positions: [wanted] int64: which states are wanted. Padding never reaches the state of a real token.

        Returns:
            [wanted, width].
        """
        ...

    def shared_states(self, shared: SharedPrompts, rows: Tensor, tokens: Tensor) -> Tensor:
        """As `states`, with each prompt read once; only asked for when `shares_prompts`.

        Args:
            rows: [wanted] int64, with
            tokens: [wanted] int64: which response tokens' predecessors are wanted.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[wanted, vocabulary] of the token that follows each state; of a network with head ``lm``."""
        ...

    def values(self, states: Tensor) -> Tensor:
        """[wanted] what a ``value`` or ``score`` head makes of each state."""
        ...

    def decoder(self, ids: Tensor, lengths: Tensor, num_samples: int, num_new: int) -> Decoder:
        """Read some prompts once, and stand ready to continue each of them `num_samples` times.

        Args:
            ids: [prompts, longest] int64, padded on the left with any id.
            lengths: [prompts] int64 real tokens of each.
            num_samples: rows that each prompt gets; they stand together.
            num_new: most tokens that `Decoder.advance` will append.
        """
        ...

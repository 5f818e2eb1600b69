"""What a firing makes: rows as soon as they exist, and last its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.backend import Metrics, Sum
from flowrl.rows import Key


@dataclass(slots=True)
class Emitted:
    """Something that a firing made."""

    content: Any
    """`Rows`, a dict of tensors, or None."""
    dropped: dict[Key, str] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None
    """Tokens of each row (prompt and response)."""


Made = Iterator[Emitted | Metrics]
Parts = Sequence[Any]


class Counts:
    """Sums over the responses of a firing."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.cut = 0

    def add(self, lengths: Sequence[int], stops: Sequence[str]) -> None:
        """Count responses by their tokens and by why each ends."""
        self.samples += len(lengths)
        self.tokens += sum(lengths)
        self.cut += sum(stop == "length" for stop in stops)

    def metrics(self) -> Metrics:
        """As a firing reports them."""
        return {
            "samples": Sum(self.samples, 1),
            "response_tokens": Sum(self.tokens, 1),
            "response_length": Sum(self.tokens, self.samples),
            "truncated": Sum(self.cut, self.samples),
        }

"""Count on from a digit: ``7>`` asks for ``890123``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.seeds import mix


@dataclass(frozen=True, kw_only=True, slots=True)
class CountUp:
    """Rows ``{"prompt": "3>", "answer": "456789"}`` without end, 9 followed by 0; row i is a function of (seed, i)."""

    length: int = 6
    """Digits of each answer."""
    seed: int = 0
    """Of the first digits."""
    columns: ClassVar[tuple[str, ...]] = ("prompt", "answer")

    def __getitem__(self, row: int) -> dict[str, str]:
        first = mix(self.seed, row) % 10
        return {"prompt": f"{first}>", "answer": "".join(str((first + i) % 10) for i in range(1, self.length + 1))}

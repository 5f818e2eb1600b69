"""Write a number backwards: ``12345>`` asks for ``54321``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.seeds import mix


@dataclass(frozen=True, kw_only=True, slots=True)
class ReverseDigits:
    """Rows ``{"prompt": "12345>", "answer": "54321"}`` without end; row i is a function of (seed, i)."""

    digits: int = 5
    """Of each number, leading zeros included."""
    seed: int = 0
    """Of the numbers."""
    columns: ClassVar[tuple[str, ...]] = ("prompt", "answer")

    def __getitem__(self, row: int) -> dict[str, str]:
        number = f"{mix(self.seed, row) % 10**self.digits:0{self.digits}d}"
        return {"prompt": f"{number}>", "answer": number[::-1]}

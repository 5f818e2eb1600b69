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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReverseDigitsPairs:
    """Rows ``{"prompt": "12345>", "chosen": "54321", "rejected": "54821"}`` without end: one digit is wrong.

    Row i is a function of (seed, i), and asks what row i of `ReverseDigits` asks.
    """

    digits: int = 5
    """Of each number, leading zeros included."""
    seed: int = 0
    """Of the numbers and the mistakes."""
    columns: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    def __getitem__(self, row: int) -> dict[str, str]:
        right = ReverseDigits(digits=self.digits, seed=self.seed)[row]
        answer = right["answer"]
        place = mix(self.seed, row, 1) % self.digits
        wrong = (int(answer[place]) + 1 + mix(self.seed, row, 2) % 9) % 10
        return {
            "prompt": right["prompt"],
            "chosen": answer,
            "rejected": f"{answer[:place]}{wrong}{answer[place + 1 :]}",
        }

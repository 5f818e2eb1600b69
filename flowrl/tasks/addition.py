"""Add two numbers: ``12+34=`` asks for ``046``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.seeds import mix


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """Rows ``{"prompt": "12+34=", "answer": "046"}`` without end; row i is a function of (seed, i)."""

    digits: int = 2
    """Of each summand, leading zeros included; the answer has one more."""
    seed: int = 0
    """Of the summands."""
    columns: ClassVar[tuple[str, ...]] = ("prompt", "answer")

    def __getitem__(self, row: int) -> dict[str, str]:
        left, right = (mix(self.seed, row, side) % 10**self.digits for side in (0, 1))
        prompt = f"{left:0{self.digits}d}+{right:0{self.digits}d}="
        return {"prompt": prompt, "answer": f"{left + right:0{self.digits + 1}d}"}

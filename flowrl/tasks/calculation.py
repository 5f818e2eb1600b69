"""Calculate in two steps, with a pocket calculator: ``12+34*5>`` asks for ``182``.

A conversation that gets there, what the calculator says in brackets: ``34*5=[170,]12+170=[182,]182``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from flowrl.seeds import mix

_OPERATION = re.compile(r"(\d{1,4})([+*])(\d{1,4})=")


@dataclass(frozen=True, kw_only=True, slots=True)
class Calculation:
    """Rows ``{"prompt": "12+34*5>", "answer": "182"}`` without end; row i is a function of (seed, i)."""

    seed: int = 0
    """Of the numbers, which are such that every result has three digits."""
    columns: ClassVar[tuple[str, ...]] = ("prompt", "answer")

    def __getitem__(self, row: int) -> dict[str, str]:
        a, b, c = (low + mix(self.seed, row, i) % count for i, (low, count) in enumerate(((10, 90), (25, 75), (4, 6))))
        return {"prompt": f"{a}+{b}*{c}>", "answer": str(a + b * c)}


def calculator(response: str) -> str | None:
    """What a pocket calculator says to a turn that ends in ``=``: the result of one operation, as ``"170,"``.

    It knows + and * of two numbers of four digits at most, and says ``"?,"`` to all else. None to a turn without ``=``.
    """
    if not response.endswith("="):
        return None
    match = _OPERATION.fullmatch(response)
    if match is None:
        return "?,"
    left, right = int(match[1]), int(match[3])
    return f"{left + right if match[2] == '+' else left * right},"


def calculate(prompt: str) -> tuple[str, ...]:
    """The turns of somebody who knows the calculator, and not that * goes before +.

    Half of the prompts are calculated as they should be, and half from left to right. Which is a hash of the prompt:
    what imitates such turns does both, and has to find out which one is right.
    """
    a, b, c = map(int, re.findall(r"\d+", prompt))
    if mix(*prompt.encode()) % 2 == 0:
        return f"{a}+{b}=", f"{a + b}*{c}=", str((a + b) * c)
    return f"{b}*{c}=", f"{a}+{b * c}=", str(a + b * c)

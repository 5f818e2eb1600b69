"""Small tasks that need no data: rows without end, a function of (seed, row number), and verifiers for the answers.

::

    prompts = fl.prompts(ReverseDigits(digits=5), batch=32)     # or fl.prompts("builtin:reverse_digits", batch=32)
    scores = fl.reward(exact_match)(samples)
"""

from __future__ import annotations

from collections.abc import Callable

from .addition import Addition
from .calculation import Calculation, calculate, calculator
from .count_up import CountUp
from .reverse_digits import ReverseDigits, ReverseDigitsPairs
from .verify import exact_match, share_correct

Task = type[Addition] | type[Calculation] | type[CountUp] | type[ReverseDigits] | type[ReverseDigitsPairs]
TASKS: dict[str, Task] = {
    "addition": Addition,
    "calculation": Calculation,
    "count_up": CountUp,
    "reverse_digits": ReverseDigits,
    "reverse_digits_pairs": ReverseDigitsPairs,
}
"""By the name behind ``builtin:``."""
TOOLS: dict[str, Callable[[str], str | None]] = {"calculation": calculator}
"""What answers the turns of a task that is solved in several."""
DEMONSTRATIONS: dict[str, Callable[[str], tuple[str, ...]]] = {"calculation": calculate}
"""Turns that a model may begin such a task by imitating, by the prompt."""

__all__ = [
    "DEMONSTRATIONS",
    "TASKS",
    "TOOLS",
    "Addition",
    "Calculation",
    "CountUp",
    "ReverseDigits",
    "ReverseDigitsPairs",
    "calculator",
    "exact_match",
    "share_correct",
]

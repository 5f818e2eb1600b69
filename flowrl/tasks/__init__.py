"""Small tasks that need no data: rows without end, a function of (seed, row number), and verifiers for the answers.

::

    prompts = fl.prompts(ReverseDigits(digits=5), batch=32)     # or fl.prompts("builtin:reverse_digits", batch=32)
    scores = fl.reward(exact_match)(samples)
"""

from __future__ import annotations

from .addition import Addition
from .count_up import CountUp
from .reverse_digits import ReverseDigits, ReverseDigitsPairs
from .verify import exact_match, share_correct

TASKS: dict[str, type[Addition] | type[CountUp] | type[ReverseDigits] | type[ReverseDigitsPairs]] = {
    "addition": Addition,
    "count_up": CountUp,
    "reverse_digits": ReverseDigits,
    "reverse_digits_pairs": ReverseDigitsPairs,
}
"""By the name behind ``builtin:``."""

__all__ = ["TASKS", "Addition", "CountUp", "ReverseDigits", "ReverseDigitsPairs", "exact_match", "share_correct"]

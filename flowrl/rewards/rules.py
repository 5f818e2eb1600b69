"""Rewards by rule, on the text of a response and the answer of its row."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from flowrl.errors import WrongType
from flowrl.functions import reward
from flowrl.tasks import gsm8k, verify

THINK_THEN_ANSWER = (
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*"
)
"""Each tag once, in this order, with nothing outside them (DeepSeek-AI 2025, arXiv:2501.12948)."""


def _check_pattern(columns: Sequence[str], *, pattern: str | None = None, **settings: object) -> None:
    """Refuse a pattern that is none, before the run."""
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise WrongType(
            "pattern is no regular expression",
            found=f"{pattern!r}: {error}",
            wanted="a regular expression of Python's re",
            fix="escape special characters, and write it as a raw string: r'...'",
        ) from error


@reward(check=_check_pattern)
def exact_match(response: str, answer: str, *, pattern: str | None = None) -> float:
    r"""1 if the response is the answer, white space around either aside; else 0.

    Args:
        pattern: compare what this regular expression captures (its first group, or else all of it) where it matches
            last, as ``r"<answer>(.*?)</answer>"``; a response without a match is wrong. ``.`` is any character.

    Raises:
        TypeError: the answer is no text, to which no response could be equal.
    """
    if not isinstance(answer, str):
        raise TypeError(f"exact_match compares text, and the answer is {answer!r}: rewards.numeric_match reads numbers")
    found = response if pattern is None else _captured(pattern, response)
    return verify.exact_match(found, answer) if found is not None else 0.0


share_correct = reward(verify.share_correct)


def _check_tolerance(columns: Sequence[str], *, tolerance: float = 0.0) -> None:
    if not 0 <= tolerance < math.inf:
        raise WrongType(
            "no number is near enough, or each is",
            found=f"tolerance={tolerance}",
            wanted="0 <= tolerance < infinity",
            fix="tolerance=0.01, for one",
        )


numeric_match = reward(check=_check_tolerance)(gsm8k.numeric_match)


@reward(check=_check_pattern)
def regex_match(response: str, *, pattern: str) -> float:
    """1 if a regular expression matches somewhere in the response, else 0; ``.`` is any character."""
    return float(re.search(pattern, response, re.DOTALL) is not None)


@reward(check=_check_pattern)
def format_match(response: str, *, pattern: str = THINK_THEN_ANSWER) -> float:
    """1 if the whole response has a form, else 0; ``.`` is any character.

    Args:
        pattern: a regular expression; when left out, ``<think>...</think><answer>...</answer>``.
    """
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)


def _captured(pattern: str, text: str) -> str | None:
    found: re.Match[str] | None = None
    for match in re.finditer(pattern, text, re.DOTALL):
        found = match
    return None if found is None else found[1 if found.re.groups else 0]

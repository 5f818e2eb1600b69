"""Equality of mathematical expressions, by the package math-verify (extra ``math``)."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from flowrl.errors import PackageError
from flowrl.functions import reward

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def check_math_verify() -> None:
    """Find out whether expressions can be compared here.

    Raises:
        PackageError: they cannot.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise PackageError(
            "math_equal needs the package math-verify",
            found="it is not installed",
            wanted="math-verify, version 0.9 or newer",
            fix="pip install 'flowrl[math]'",
        )


@reward(timeout=30.0, on_error="drop", needs=check_math_verify)
def math_equal(response: str, answer: str) -> float:
    r"""1 if the expression that the response ends in equals that of the answer, else 0.

    ``\boxed{1/2}``, ``$\frac{2}{4}$`` and ``0.5`` are equal. A response without an expression is wrong. A comparison
    that fails or takes too long is no 0: the row is dropped, as declared.

    Args:
        response: its expression stands in ``$...$``, ``\(...\)``, ``\[...\]`` or ``\boxed{...}``; a mere number may
            stand alone.
        answer: an expression in LaTeX, or a text that holds one so delimited.

    Raises:
        PackageError: math-verify is not installed.
        ValueError: the answer holds no expression. That is a fault of the data, not a wrong response.
    """
    math_verify = _math_verify()
    gold = answer if any(mark in answer for mark in _DELIMITERS) else f"\\boxed{{{answer}}}"
    wanted = math_verify.parse(gold, parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the answer holds no expression: {answer!r}")
    found = math_verify.parse(response, parsing_timeout=None)
    # its own limits in time would take the alarm from the one that this function is called under
    return float(math_verify.verify(wanted, found, timeout_seconds=None, raise_on_error=True))


def _math_verify() -> Any:
    check_math_verify()
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it is called without its own limits
    return math_verify

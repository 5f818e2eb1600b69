"""Verify answers to GSM8K (Cobbe et al. 2021, arXiv:2110.14168), whose solutions end in ``#### 1,234``."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(
    # a minus behind a digit or a bracket is a subtraction, as in 10-3; one apart from its number that, or a list's mark
    r"(?:(?<![\w)%.])(?P<sign>[-\u2212])(?!\s))?"
    r"\$?\s?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))"  # commas in threes, or none; nothing before the point of .5
    r"(?P<fraction>\.\d+)?"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\w))?"
)
_MARK = "####"


def final_number(text: str) -> Decimal | None:
    """The number that a solution ends in; None if there is none.

    That is the first one behind the last ``####``, or, without that mark, the last one of the text. Currency signs and
    commas between thousands are read over: ``-$1,234.50`` is -1234.5.
    """
    _, mark, end = text.rpartition(_MARK)
    numbers = list(_NUMBER.finditer(end))
    if not numbers:
        return None
    match = numbers[0] if mark else numbers[-1]
    digits = match["digits"].replace(",", "") or "0"
    value = Decimal(digits + (match["fraction"] or "") + (match["exponent"] or ""))
    return -value if match["sign"] else value


def numeric_match(response: str, answer: str | int | float, *, tolerance: float = 0.0) -> float:
    """1 if the response ends in the answer's number (``72`` = ``72.0``), else 0.

    Args:
        tolerance: largest difference between the two numbers that is none, >= 0.

    Raises:
        ValueError: the answer itself holds no number. That is a fault of the data, not a wrong response.
    """
    wanted = _number_of(answer)
    if wanted is None or not wanted.is_finite():
        raise ValueError(f"the answer holds no number: {answer!r}")
    found = final_number(response)
    return float(found is not None and abs(found - wanted) <= Decimal(str(tolerance)))


def _number_of(answer: object) -> Decimal | None:
    if isinstance(answer, str):
        return final_number(answer)
    number = isinstance(answer, (int, float, Decimal)) and not isinstance(answer, bool)
    return Decimal(str(answer)) if number else None

"""Ready rewards: called on values, or declared as nodes (``rewards.exact_match(samples)``).

Each gives one number a response, most of them 1 for right and 0 for wrong. What cannot be judged is an exception and
no 0: an answer of the data set that holds no number, a program that no sandbox could run. A node of one's own may call
any of them::

    @fl.reward
    def correct(response: str, final_answer: str) -> float:
        return rewards.numeric_match(response, final_answer, tolerance=0.01)

Several rewards are one by `weighted_sum`, or a function of one's own under ``@fl.node(out=fl.Scores)``.
"""

from .code import extract_code, runs_code
from .combined import weighted_sum
from .length import length_error, overlong
from .rules import exact_match, format_match, numeric_match, regex_match, share_correct
from .symbolic import math_equal

__all__ = [
    "exact_match",
    "extract_code",
    "format_match",
    "length_error",
    "math_equal",
    "numeric_match",
    "overlong",
    "regex_match",
    "runs_code",
    "share_correct",
    "weighted_sum",
]

"""Verifiers: plain functions from a response and its answer to a score in 0 .. 1."""

from __future__ import annotations


def exact_match(response: str, answer: str) -> float:
    """1 if the response is the answer, white space around either aside; else 0."""
    return float(response.strip() == answer.strip())


def share_correct(response: str, answer: str) -> float:
    """The share of characters that are right, position by position.

    The longer of the two texts is the whole, so that neither stopping early nor going on pays.
    """
    longest = max(len(response), len(answer))
    return sum(a == b for a, b in zip(response, answer, strict=False)) / longest if longest else 1.0

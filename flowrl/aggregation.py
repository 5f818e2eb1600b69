"""How the losses of tokens and of rows become one number: an unnormalised sum, and what divides it once.

A loss that gives one number a token is summed over tokens as its mode says. One that gives one number a row has only
its mean over rows: ``seq-mean``, or as a term beside per-token terms under any mode that averages over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import WrongType, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

Per = Literal["token", "row"]
"""What a loss function gives one number for."""
Aggregate = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean"
]
OVER_ROWS = tuple(mode for mode in get_args(Aggregate) if mode.startswith("seq-mean"))
"""Modes whose denominator is a number of rows."""
EMPTY = 1e-8
"""Added to a row's token count before it divides: a row without tokens gives 0; in float32 it changes no count."""


def check_aggregate(aggregate: Aggregate | None, horizon: int | None, terms: Sequence[tuple[str, Per]]) -> None:
    """Refuse a mode that does not exist, lacks its horizon, or cannot hold the terms (name, what it is per).

    Raises:
        WrongType: with the modes that can.
    """
    if aggregate is not None and aggregate not in get_args(Aggregate):
        raise WrongType(
            "a loss has an unknown aggregation mode",
            found=repr(aggregate),
            wanted=", ".join(get_args(Aggregate)),
            fix=did_you_mean(str(aggregate), get_args(Aggregate)),
        )
    if aggregate == "seq-mean-token-sum-norm" and not (isinstance(horizon, int) and horizon > 0):
        raise WrongType(
            "aggregation 'seq-mean-token-sum-norm' divides by a constant length",
            found=f"horizon={horizon}",
            wanted="horizon=N tokens, the same for every row",
            fix="give the longest response length: horizon=max_new_tokens",
        )
    of_tokens = [name for name, per in terms if per == "token"]
    of_rows = [name for name, per in terms if per == "row"]
    if of_rows and (aggregate or ("token-mean" if of_tokens else "seq-mean")) not in OVER_ROWS:
        beside = f", and '{of_tokens[0]}' one a token" if of_tokens else ""
        raise WrongType(
            f"loss '{of_rows[0]}' gives one number a row{beside}: their sum has no mean over tokens",
            found=f"aggregate={aggregate!r}" if aggregate else "no aggregate, which for tokens is 'token-mean'",
            wanted="'seq-mean'" if not of_tokens else " or ".join(repr(mode) for mode in OVER_ROWS[:-1]),
            fix=f"{of_tokens[0]}(aggregate='seq-mean-token-mean')" if of_tokens else "leave aggregate= out",
        )
    if aggregate == "seq-mean" and of_tokens:
        raise WrongType(
            f"loss '{of_tokens[0]}' gives one number a token, and 'seq-mean' does not say what becomes of a row's",
            found="aggregate='seq-mean'",
            wanted=" or ".join(repr(mode) for mode in OVER_ROWS[:-1]),
            fix=f"{of_tokens[0]}(aggregate='seq-mean-token-mean')",
        )


def numerator(aggregate: str, horizon: int | None, per_token: Tensor, mask: Tensor) -> Tensor:
    """The unnormalised sum of losses [rows, tokens], which are 0 where the mask is."""
    if aggregate == "seq-mean-token-mean":
        return (per_token.sum(-1) / (mask.sum(-1).to(per_token.dtype) + EMPTY)).sum()
    if aggregate == "seq-mean-token-sum-norm":
        assert horizon is not None
        return per_token.sum() / horizon
    return per_token.sum()


def denominator(aggregate: str, tokens: float, rows: float) -> float:
    """What divides the sum of all numerators of a mini-batch; 0 when nothing is trained."""
    if not tokens:
        return 0.0
    if aggregate == "token-mean":
        return tokens
    return 1.0 if aggregate == "token-sum" else rows


def one(name: str, left: Any, right: Any) -> Any:
    """The setting of a sum of two losses, of which one at most says it, or both the same.

    Raises:
        WrongType: they differ.
    """
    if left is not None and right is not None and left != right:
        raise WrongType(
            f"two terms of one loss have different {name}",
            found=f"{left!r} and {right!r}",
            wanted="one for the whole sum: the denominator divides once",
        )
    return left if left is not None else right

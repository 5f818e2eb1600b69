"""One value for each response token: the check that every edge makes.

Rows carry ids and lengths, never padding, so a response of no tokens is an empty slice and stays one; nothing is cut
from the end of a longer sequence by a negative length, where ``x[-0:]`` would be all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ResultError
from .rows import Ragged, Rows

if TYPE_CHECKING:
    import numpy as np
else:
    from ._lazy import lazy

    np = lazy("numpy")

TOKEN_COLUMNS = ("mask", "logprobs", "ref_logprobs", "old_logprobs", "values", "rewards", "advantages", "returns")
"""Columns of one value a response token, when they are ragged."""


def check_token_lengths(rows: Rows, *, node: str | None = None) -> None:
    """Check that each ragged column of `TOKEN_COLUMNS` is as long as ``response_ids``, row by row.

    Args:
        rows: any rows; without a ragged ``response_ids`` there is nothing to compare with.
        node: who wrote them, for the message.

    Raises:
        ResultError: a row's lengths differ; names the column, the row and both lengths.
    """
    response = rows.columns.get("response_ids")
    if not isinstance(response, Ragged):
        return
    for name in TOKEN_COLUMNS:
        column = rows.columns.get(name)
        if isinstance(column, Ragged) and not np.array_equal(column.offsets, response.offsets):
            row = int(np.flatnonzero(column.lengths != response.lengths)[0])
            raise ResultError(
                f"column '{name}' of {rows.keys[row]} has not one value for each response token",
                node=node,
                found=f"{column.lengths[row]} values",
                wanted=f"{response.lengths[row]}, the length of response_ids",
            )

"""Ragged columns of one or of k numbers a token: packed, taken, joined and measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import NodeError
from flowrl.rows import Key, Ragged, Rows

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=6)
WIDTHS = st.sampled_from([(), (1,), (3,)])


def tables(lengths: list[int], width: tuple[int, ...]) -> list[Any]:
    """One array a row, no two of whose numbers are equal."""
    counted = np.arange(sum(lengths) * int(np.prod(width, initial=1)), dtype=np.int32).reshape(sum(lengths), *width)
    return np.split(counted, np.cumsum(lengths)[:-1])


def rows_of(column: Ragged, first: int = 0) -> Rows:
    return Rows([Key(0, first + row, 0) for row in range(len(column))], {"x": column})


def listed(column: Ragged) -> list[Any]:
    return [row.tolist() for row in column]


@given(LENGTHS, WIDTHS)
def test_packed_rows_are_those_that_were_given(lengths: list[int], width: tuple[int, ...]) -> None:
    given_rows = tables(lengths, width)
    column = Ragged.pack(given_rows, "int32")
    assert listed(column) == [row.tolist() for row in given_rows]
    assert column.values.shape == (sum(lengths), *width)
    assert column.lengths.tolist() == lengths
    assert rows_of(column).num_bytes == column.values.nbytes + column.offsets.nbytes
    assert listed(Ragged.pack([row.tolist() for row in given_rows], "int32")) == listed(column)


@given(LENGTHS, WIDTHS, st.data())
def test_taken_rows_keep_their_tables(lengths: list[int], width: tuple[int, ...], data: st.DataObject) -> None:
    given_rows = tables(lengths, width)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    taken = Ragged.pack(given_rows, "int32").take(wanted)
    assert listed(taken) == [given_rows[row].tolist() for row in wanted]
    assert taken.values.shape[1:] == width


@given(LENGTHS, WIDTHS, st.integers(0, 6))
def test_parts_put_together_are_the_whole(lengths: list[int], width: tuple[int, ...], cut: int) -> None:
    whole = Ragged.pack(tables(lengths, width), "int32")
    cut = min(cut, len(lengths))
    parts = [rows_of(whole.take(range(cut))), rows_of(whole.take(range(cut, len(lengths))), cut)]
    for found in (Rows.concat(parts), Rows.join(rows_of(whole).keys, parts)):
        assert found.keys == rows_of(whole).keys
        assert listed(found["x"]) == listed(whole)
        assert found["x"].values.dtype == whole.values.dtype


def test_an_empty_row_has_no_width_of_its_own() -> None:
    column = Ragged.pack([[], [[1, 2]], np.zeros((0, 5))], "int32")
    assert listed(column) == [[], [[1, 2]], []]
    assert Ragged.pack([[], np.zeros((0, 5))], "int32").values.shape == (0, 5)
    empty, filled = Ragged.pack([[]], "int32"), Ragged.pack([[[1, 2]]], "int32")
    assert listed(Rows.concat([rows_of(empty), rows_of(filled, 1)])["x"]) == [[], [[1, 2]]]


@pytest.mark.parametrize("other", [[7, 7], [[7], [7]], [[7, 7, 7]]])
def test_a_row_of_another_width_is_never_repeated_into_shape(other: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"among rows \[tokens, 2\]"):
        Ragged.pack([[[1, 2]], other], "int32")


def test_parts_of_different_widths_are_refused_by_column() -> None:
    parts = [rows_of(Ragged.pack([[[1, 2]]], "int32")), rows_of(Ragged.pack([[[1, 2, 3]]], "int32"), 1)]
    with pytest.raises(NodeError, match=r"(?s)column 'x' has not the same.*\[tokens, 2\] and \[tokens, 3\]"):
        Rows.concat(parts)

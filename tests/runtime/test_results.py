"""Columns made of what functions return."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flowrl as fl
from flowrl.errors import ResultError
from flowrl.rows import Key, Ragged
from flowrl.runtime.results import check_row, check_rows, collect, response_lengths

from .call_cases import KEYS, bare, declare


@fl.node(out="x")
def note(response: str) -> Any:
    return response


@fl.node(out="rewards")
def tokens(response: str) -> Any:
    return response


@fl.node(out=("teacher_ids", "teacher_logprobs"))
def teach(response: str) -> Any:
    return response


NOTE, TOKENS, TEACH = declare(note), declare(tokens), declare(teach)


def column(*values: Any) -> Any:
    """An ordinary column of what a function gave for each row."""
    return collect(NOTE, "x", [check_row(NOTE, value, Key(0, 0, i), None)[0] for i, value in enumerate(values)])


def test_int_stays_int_and_text_stays_text() -> None:
    assert column(72, 7) == [72, 7]
    assert [type(value) for value in column(72, "72")] == [int, str]
    assert column(True, False).dtype == np.bool_
    assert column(1.0, 2.5).dtype == np.float64
    assert [type(value) for value in column(1, 2.5, True)] == [int, float, bool]


def test_numbers_of_libraries_become_pythons() -> None:
    class Level(enum.IntEnum):
        LOW = 3

    found = column(np.int64(1), torch.tensor(2), Level.LOW, np.str_("a"))
    assert found == [1, 2, 3, "a"]
    assert [type(value) for value in found] == [int, int, int, str]


def test_plain_structures_travel() -> None:
    assert column({"a": [1, None]}, {"a": (2, np.float32(1))}) == [{"a": [1, None]}, {"a": [2, 1.0]}]


def test_arrays_of_each_row_make_a_ragged_column_that_holds_them_all() -> None:
    found = column(np.array([1, 2], np.int32), np.array([0.5], np.float64), np.zeros(0, np.int32))
    assert isinstance(found, Ragged)
    assert [row.tolist() for row in found] == [[1.0, 2.0], [0.5], []]


@pytest.mark.parametrize(
    "value",
    [None, {1}, object(), (x for x in "a"), 1 << 63, {1: 2}, np.zeros((2, 2, 2)), np.array(["a"]), [object()], 1j],
)
def test_a_value_that_does_not_travel_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(ResultError, match=r"(?s)function 'note' of node 'judge' gave .* for step 1 prompt 0 sample 0"):
        column(value)


def test_tables_of_each_row_make_a_ragged_column_of_their_width() -> None:
    found = column(np.array([[1, 2], [3, 4]]), torch.tensor([[0.5, 1.5]]), np.zeros((0, 2)))
    assert isinstance(found, Ragged)
    assert [row.tolist() for row in found] == [[[1.0, 2.0], [3.0, 4.0]], [[0.5, 1.5]], []]
    with pytest.raises(ResultError, match=r"(?s)rows of different widths for 'x'.*\[tokens, 2\] and \[tokens, 3\]"):
        column(np.zeros((1, 2)), np.zeros((4, 3)))
    with pytest.raises(ResultError, match=r"(?s)different widths.*\[tokens\] and \[tokens, 3\]"):
        column(np.zeros(3), np.zeros((4, 3)))


def test_arrays_and_numbers_do_not_mix() -> None:
    with pytest.raises(ResultError, match=r"(?s)gave two kinds of 'x'.*arrays for 1 of 2 rows"):
        column(np.ones(2), 1.0)
    values = [check_row(TOKENS, value, KEYS[0], None)[0] for value in ([1.0, 2.0], 0.5)]
    with pytest.raises(ResultError, match="two kinds of 'rewards'"):
        collect(TOKENS, "rewards", values)


def test_a_long_value_is_shortened_in_the_error() -> None:
    with pytest.raises(ResultError) as error:
        column({"a": {object()}, "b": "x" * 500})
    assert len(str(error.value)) < 600


def test_only_columns_of_response_tokens_tell_lengths() -> None:
    prompt, mask = Ragged.pack([[1, 2]], "int32"), Ragged.pack([[1]], "bool")
    assert response_lengths(NOTE, {"prompt_ids": prompt}) is None
    assert response_lengths(NOTE, {"features": prompt, "scores": np.ones(1)}) is None
    assert response_lengths(NOTE, {"prompt_ids": prompt, "mask": mask}).tolist() == [1]  # type: ignore[union-attr]
    assert response_lengths(bare(NOTE, {"m": "mask"}), {"m": mask}).tolist() == [1]  # type: ignore[union-attr]


def test_a_padded_ordinary_column_is_cut_too_and_a_list_is_not() -> None:
    lengths = np.array([1, 2, 0])
    [cut] = check_rows(NOTE, np.arange(6).reshape(3, 2), KEYS, lengths)
    assert [row.tolist() for row in cut] == [[0], [2, 3], []]
    [whole] = check_rows(NOTE, list(np.arange(9).reshape(3, 3)), KEYS, lengths)
    assert [len(row) for row in whole] == [3, 3, 3]


def test_a_list_of_rows_must_fit_the_responses() -> None:
    with pytest.raises(ResultError, match="'rewards' that fits no response"):
        check_rows(TOKENS, [[1.0], [1.0], []], KEYS, np.array([1, 2, 0]))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_finite_numbers_come_through_unchanged(values: list[float]) -> None:
    keys = [Key(0, 0, i) for i in range(len(values))]
    for given_as in (values, np.array(values, np.float32), torch.tensor(values)):
        [found] = check_rows(TOKENS, given_as, keys, None)
        assert collect(TOKENS, "rewards", found).tolist() == values


def teacher(ids: Any, logprobs: Any, length: int | None = 2) -> list[Any]:
    """What a teacher of the user's own gives for one row."""
    return check_row(TEACH, (ids, logprobs), KEYS[0], length)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_teacher_of_ones_own_gives_tables_of_ids_and_logprobs(kind: Any) -> None:
    ids, logprobs = teacher(kind([[3, 1], [2, 7]]), kind([[-0.5, -1.5], [-0.25, -2.0]]))
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert ids.tolist() == [[3, 1], [2, 7]]
    assert logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]


def test_a_response_without_tokens_leaves_the_width_to_the_other_rows() -> None:
    rows = [teacher([[3, 1]], [[-0.5, -1.5]], 1), teacher([], [], 0)]
    found = collect(TEACH, "teacher_ids", [row[0] for row in rows])
    assert found.values.tolist() == [[3, 1]]
    assert found.lengths.tolist() == [1, 0]


GOOD = [[-0.5, -1.5], [-0.25, -2.0]]


@pytest.mark.parametrize(
    ("ids", "logprobs", "what"),
    [
        ([[3, 1], [2, 7]], [[-0.5, -1.5], [-0.25, np.nan]], "nan at token 1 of step 1 prompt 0 sample 0"),
        ([[3, 1], [2, 7]], [-0.5, -1.5], r"\[tokens, k\] numbers"),
        ([[3, 1], [2, 7]], -0.5, "k numbers a response token"),
        ([[3, 1], [2, 7]], [[-0.5, -1.5]], "1 values of 'teacher_logprobs'"),
        ([[3, 1], [2, 7]], [[-0.5], [-0.5, -1.5]], "k numbers a response token"),
        ([[3, 1], [2, 7]], np.zeros((2, 0)), r"\[tokens, k\] numbers"),
        ([[3.0, 1.0], [2.0, 7.0]], GOOD, r"\[tokens, k\] integers"),
        ([[3, 1], [-2, 7]], GOOD, "-2 at token 1 .*wanted: token ids"),
        ([[3, 1 << 32], [2, 7]], GOOD, "4294967296 at token 0 .*wanted: token ids"),
    ],
)
def test_a_teachers_wrong_table_is_refused_where_it_is_made(ids: Any, logprobs: Any, what: str) -> None:
    with pytest.raises(ResultError, match=f"(?s){what}"):
        teacher(ids, logprobs)


def test_padded_tables_of_several_rows_are_cut_to_the_responses() -> None:
    lengths = np.array([1, 2])
    ids, logprobs = check_rows(TEACH, (torch.arange(12).view(2, 2, 3), torch.zeros(2, 2, 3)), KEYS[:2], lengths)
    assert [row.tolist() for row in ids] == [[[0, 1, 2]], [[6, 7, 8], [9, 10, 11]]]
    assert [row.shape for row in logprobs] == [(1, 3), (2, 3)]
    with pytest.raises(ResultError, match=r"(?s)shape \[2, 4, 3\].*\[2, 2, k\], \[rows, tokens, k\]"):
        check_rows(TEACH, (torch.zeros(2, 2, 3).long(), torch.zeros(2, 4, 3)), KEYS[:2], lengths)

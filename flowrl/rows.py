"""Rows on a stream: columns by name, ragged and never padded, each row under a key.

A *key* is ``(step, prompt, sample)``, stable for the whole run. A prompt itself has ``sample = -1``: it is the row
that all samples of its group share. `Rows` is what every node gets and gives; a column is one of

* a numpy array [rows]: one number a row,
* a `Ragged`: one array of numbers a row, [tokens] or [tokens, k], stored as packed values + offsets,
* a list [rows] of str, or of plain Python values (what msgpack carries).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import NodeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from ._lazy import lazy

    np = lazy("numpy")

PROMPT = -1
"""The sample number of a prompt's own row."""
GROUP = "group"
"""Not a column: a function of several rows may name it to get [rows] int, equal for rows that answer one prompt."""


class Key(NamedTuple):
    """What a row is called, from its first node to its last."""

    step: int
    prompt: int
    sample: int = PROMPT

    @property
    def group(self) -> Key:
        """The key of the prompt that this row answers."""
        return Key(self.step, self.prompt)

    def __str__(self) -> str:
        sample = "" if self.sample == PROMPT else f" sample {self.sample}"
        return f"step {self.step + 1} prompt {self.prompt}{sample}"  # steps count from 1 in what a person reads


def pack_keys(keys: Iterable[Key]) -> array[int]:
    """[3 x rows] int32: the numbers of all keys, one after the other.

    Raises:
        TypeError, OverflowError: a number is no 32-bit integer.
    """
    return array("i", chain.from_iterable(keys))


def unpack_keys(numbers: Iterable[int]) -> list[Key]:
    """The keys of `pack_keys`."""
    each = iter(numbers)
    new = tuple.__new__  # a third of the cost of calling Key, and a firing has hundreds
    return [new(Key, key) for key in zip(each, each, each, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """One array of numbers a row: ``values[offsets[i]:offsets[i + 1]]`` is row i."""

    values: NDArray[Any]
    """[sum of lengths] packed values, or [sum of lengths, k] of a column with k numbers a token."""
    offsets: NDArray[np.int64]
    """[rows + 1] int64, from 0 to ``len(values)``, never falling."""

    @classmethod
    def pack(cls, arrays: Sequence[Any], dtype: str) -> Ragged:
        """Pack one array a row, each of any length (0 included).

        Raises:
            ValueError: one row is [tokens, k] and another, that is not empty, is not.
        """
        lengths = np.fromiter((len(array) for array in arrays), np.int64, len(arrays))
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        width = _width_of(arrays)
        values = np.empty((int(offsets[-1]), *width), dtype)
        bounds = offsets.tolist()
        for row, start, end in zip(arrays, bounds[:-1], bounds[1:], strict=True):
            if start < end:
                if width and np.shape(row)[1:] != width:  # an assignment would repeat some of these in silence
                    raise ValueError(f"a row of shape {np.shape(row)} among rows [tokens, {width[0]}]")
                values[start:end] = row
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] int64."""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int]) -> Ragged:
        """The given rows, in the given order."""
        wanted = np.asarray(rows, np.int64)
        lengths = self.lengths[wanted]
        offsets = np.zeros(len(wanted) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1]) + np.repeat(self.offsets[wanted] - offsets[:-1], lengths)
        return Ragged(self.values[positions], offsets)


def _width_of(arrays: Sequence[Any]) -> tuple[int, ...]:
    """(k,) of rows [tokens, k], () of rows [tokens]."""
    first = next((array for array in arrays if len(array)), None)
    if first is None:  # an empty array still has its width, an empty list has none
        first = next((array for array in arrays if len(np.shape(array)) > 1), ())
        return np.shape(first)[1:]
    return np.shape(first[0])


Column = Any
"""numpy array [rows] | Ragged | list [rows]. (An alias of Any: numpy stays unloaded until a row exists.)"""


class Rows:
    """Columns of equal height under keys. Immutable by convention: operations give new `Rows` that share columns.

    Args:
        keys: one key a row, no two equal.
        columns: by name, each with ``len(keys)`` entries.
    """

    __slots__ = ("columns", "keys")

    def __init__(self, keys: Sequence[Key], columns: dict[str, Column]) -> None:
        self.keys = list(keys)
        self.columns = columns
        for name, column in columns.items():
            assert len(column) == len(self.keys), f"column {name!r} has {len(column)} entries for {len(self.keys)} rows"

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows: {', '.join(self.columns)})"

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns; text and Python values count by a cheap estimate."""
        return sum(_num_bytes(column) for column in self.columns.values())

    def take(self, rows: Sequence[int]) -> Rows:
        """The rows at the given positions, in the given order."""
        if len(rows) == len(self) and all(row == i for i, row in enumerate(rows)):
            return self
        keys = [self.keys[row] for row in rows]
        return Rows(keys, {name: _take(column, rows) for name, column in self.columns.items()})

    def select(self, keys: Iterable[Key]) -> Rows:
        """The rows under the given keys, in the given order; KeyError for a key that is not here."""
        position = {key: row for row, key in enumerate(self.keys)}
        return self.take([position[key] for key in keys])

    def project(self, columns: Iterable[str]) -> Rows:
        """The given columns only."""
        return Rows(self.keys, {name: self.columns[name] for name in columns})

    def with_columns(self, **columns: Column) -> Rows:
        """These rows with columns added or replaced."""
        return Rows(self.keys, {**self.columns, **columns})

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """All rows of parts that have the same columns.

        Raises:
            NodeError: a token has k numbers of a column in one part, and not k in another.
        """
        if len(parts) == 1:
            return parts[0]
        keys = [key for part in parts for key in part.keys]
        names = list(parts[0].columns) if parts else []
        return Rows(keys, {name: _concat(name, [part.columns[name] for part in parts]) for name in names})

    @staticmethod
    def join(keys: Sequence[Key], parts: Sequence[Rows]) -> Rows:
        """Gather columns that lie in several parts into rows under `keys`.

        Parts may hold different columns, different rows, or both; a column of a prompt's row (``sample = -1``) goes to
        each of the prompt's samples.

        Raises:
            KeyError: a key has no value in a column that another key has.
        """
        by_columns: dict[tuple[str, ...], list[Rows]] = {}
        for part in parts:
            if len(part):
                by_columns.setdefault(tuple(part.columns), []).append(part)
        joined: dict[str, Column] = {}
        for same in by_columns.values():
            table = Rows.concat(same)
            position = {key: row for row, key in enumerate(table.keys)}
            rows = [position[key] if key in position else position[key.group] for key in keys]
            joined.update(table.take(rows).columns)
        return Rows(keys, joined)


def _take(column: Column, rows: Sequence[int]) -> Column:
    if isinstance(column, Ragged):
        return column.take(rows)
    if isinstance(column, list):
        return [column[row] for row in rows]
    return column[np.asarray(rows, np.int64)]


def _concat(name: str, columns: Sequence[Column]) -> Column:
    if isinstance(columns[0], Ragged):
        offsets = np.concatenate([[0], *(column.lengths for column in columns)]).cumsum()
        packed = [column.values for column in columns]
        if len({values.shape[1:] for values in packed}) > 1:
            packed = _of_one_width(name, packed)
        return Ragged(np.concatenate(packed), offsets.astype(np.int64))
    if isinstance(columns[0], list):
        return [value for column in columns for value in column]
    return np.concatenate(columns)


def _of_one_width(name: str, packed: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Those that hold a token: a part without any may not know the width of its column."""
    filled = [values for values in packed if len(values)] or packed[:1]
    shapes = sorted({values.shape[1:] for values in filled})
    if len(shapes) > 1:
        raise NodeError(
            f"column '{name}' has not the same number of values for every token",
            found=" and ".join(f"[tokens{''.join(f', {size}' for size in shape)}]" for shape in shapes),
            wanted="[tokens, k] with one k for the whole run",
        )
    return filled


def _num_bytes(column: Column) -> int:
    if isinstance(column, Ragged):
        return int(column.values.nbytes + column.offsets.nbytes)
    if isinstance(column, list):
        return sum(len(value) if isinstance(value, str) else 16 for value in column)
    return int(column.nbytes)

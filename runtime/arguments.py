"""Arguments of a node's function from columns: a row's values, or the tensors and lists of several rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.columns import positional, slots
from flowrl.rows import GROUP, Column, Key, Ragged

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


class Arguments:
    """A function, and a column [rows] for each of its parameters that is bound.

    The pseudo-column ``group`` is filled here when the function names it. Parameters are filled by position as far as
    they are bound without a gap; one that is not bound keeps its default, also before a ``/`` or a ``*name``.

    Args:
        keys: of the rows.
        columns: by parameter.
        settings: keyword-only arguments, the same for every call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        keys: Sequence[Key],
        columns: Mapping[str, Column],
        settings: Mapping[str, Any],
    ) -> None:
        self.function = function
        self.settings = settings
        self.num_rows = len(keys)
        parameters = positional(function)
        self.names_group = any(parameter.name == GROUP for parameter in parameters)
        named = dict(columns)
        if self.names_group:
            named[GROUP] = np.fromiter((key.prompt for key in keys), np.int64, len(keys))
        unnamed = [p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) and bool(slots(p, named)) for p in parameters]
        num_forced = len(unnamed) - unnamed[::-1].index(True) if True in unnamed else 0
        self._positional: list[Column] = []
        for number, parameter in enumerate(parameters):
            bound = slots(parameter, named)
            if not bound and number >= num_forced:
                break
            self._positional += [named.pop(slot) for slot in bound] or [_Constant(parameter.default)]
        self._named = named

    def by_row(self) -> Callable[[int], Any]:
        """A function of a row's position that calls for that row, with Python values and read-only arrays of tokens."""
        function, settings = self.function, self.settings
        ordered = self._zipped(self._positional)
        if not self._named:
            return lambda row: function(*ordered[row], **settings)
        names, others = tuple(self._named), self._zipped(self._named.values())
        return lambda row: function(*ordered[row], **dict(zip(names, others[row], strict=True)), **settings)

    def by_rows(self) -> Callable[[Sequence[int]], Any]:
        """A function of rows' positions that calls for those together.

        It is given tensors, [rows] or, padded at the right with 0, [rows, tokens] or [rows, tokens, k], and lists of
        what no tensor holds.
        Each column becomes a tensor once, however many calls take their rows of it.
        """
        function, settings = self.function, self.settings
        ordered = [_taker(column) for column in self._positional]
        named = {name: _taker(column) for name, column in self._named.items()}

        def call(rows: Sequence[int]) -> Any:
            given = [take(rows) for take in ordered]
            return function(*given, **{name: take(rows) for name, take in named.items()}, **settings)

        return call

    def _zipped(self, columns: Iterable[Column]) -> list[tuple[Any, ...]]:
        found = list(zip(*(_values(column) for column in columns), strict=False))
        return found or [()] * self.num_rows


class _Constant:
    """The default of a parameter that is not bound, for each row."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _values(column: Column) -> Iterable[Any]:
    """A value a row."""
    if isinstance(column, _Constant):
        return repeat(column.value)
    if isinstance(column, Ragged):
        values = column.values.view()
        values.flags.writeable = False  # other readers share it
        return Ragged(values, column.offsets)
    values = column.tolist() if isinstance(column, np.ndarray) else column
    assert isinstance(values, list)
    return values


def _taker(column: Column) -> Callable[[Sequence[int]], Any]:
    """A function of rows' positions that gives their part of a column as an argument."""
    if isinstance(column, _Constant):
        return lambda rows: column.value
    if isinstance(column, Ragged):
        padded, lengths = _pad(column), column.lengths
        return lambda rows: _pick(padded, rows)[:, : int(lengths[rows].max())]
    if isinstance(column, np.ndarray):
        tensor = torch.tensor(column)
        return lambda rows: _pick(tensor, rows)
    return lambda rows: _list_or_tensor([column[row] for row in rows])


def _pick(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor, without a copy where they lie side by side."""
    first, last = rows[0], rows[-1]
    if last - first == len(rows) - 1 and (isinstance(rows, range) or list(rows) == list(range(first, last + 1))):
        return tensor[first : last + 1]
    return tensor[torch.tensor(list(rows))]


def _pad(column: Ragged) -> Tensor:
    """[rows, longest] or [rows, longest, k], padded at the right with 0."""
    lengths = column.lengths
    padded = np.zeros((len(lengths), int(lengths.max(initial=0)), *column.values.shape[1:]), column.values.dtype)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = column.values
    return torch.from_numpy(padded)


def _list_or_tensor(values: list[Any]) -> Any:
    if not all(type(value) in (int, float) for value in values):
        return values
    numbers = np.asarray(values)
    return torch.from_numpy(numbers) if numbers.dtype.kind in "if" else values  # an int of more than 64 bits stays one

"""Open whatever a user gives as prompts, as rows by number.

| given | rows | read |
|---|---|---|
| path to .jsonl, .json, .parquet | finite | whole file, once, into memory |
| list or tuple of dicts | finite | as it is |
| `datasets.Dataset`, or any object with ``__len__`` and ``__getitem__`` | finite | row by row, when needed |
| object with ``__getitem__`` alone, or a function ``index -> dict`` | unbounded | row by row, when needed |
| iterable of dicts (generator, `datasets.IterableDataset`) | finite | once, into memory, at most `MAX_ITERABLE_ROWS` |
| ``"builtin:NAME"`` | unbounded | a task of `flowrl.tasks`, its rows a function of a seed |

A row is a dict by column name. Values keep their Python types; a column that a row lacks reads as None.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError, did_you_mean

MAX_ITERABLE_ROWS = 1_000_000
"""An iterable is held in memory, and one that never ends would fill it."""
_BUILTIN = "builtin:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Rows by number; reading one twice gives the same row, if the user's object does."""

    name: str
    """What messages call it: the path, or the kind of object."""
    columns: tuple[str, ...]
    """Of all rows, where they were all read at opening; of row 0 otherwise."""
    num_rows: int | None
    """None: unbounded."""
    get: Callable[[int], object]
    """The row as the user's object gives it."""
    lines: Sequence[int] | None = None
    """Line of each row in its file, from 1."""
    origin: Callable[[int], str] | None = None
    """Where a row of a source that is made of another one stands."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The row, as a dict of its own.

        Raises:
            IndexError: there is no such row.
            DataError: the user's object raised, or gave no dict.
        """
        if row < 0 or (self.num_rows is not None and row >= self.num_rows):
            raise IndexError(row)
        try:
            value = self.get(row)
        except DataError:  # it says itself what is wrong
            raise
        except Exception as error:
            problem = f"{self.place(row)} cannot be read: {type(error).__name__}: {error}"
            raise DataError(problem, fix="a source gives a dict for each row number from 0") from error
        return _checked(value, self.place(row))

    def place(self, row: int) -> str:
        """Where a row stands, for messages: ``train.jsonl:5 (row 3)`` or ``row 3 of the list``."""
        if self.origin is not None:
            return self.origin(row)
        return f"{self.name}:{self.lines[row]} (row {row})" if self.lines else f"row {row} of {self.name}"


def open_source(source: object, *, seed: int = 0) -> Source:
    """Open a path, a data set, a list, an iterable, a random-access object or a function; see the module's table.

    Args:
        seed: of the rows of a built-in task; all else has rows of its own.

    Raises:
        DataError: it cannot be read, has no rows, or a row is no dict.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, str) and source.startswith(_BUILTIN):
        return _open_builtin(source, seed)
    if isinstance(source, str | os.PathLike):
        return _open_file(Path(os.fspath(source)).expanduser())
    _refuse_lookalikes(source)
    name = _name_of(source)
    if isinstance(source, list | tuple):
        return _of_rows(name, source)
    if hasattr(source, "__getitem__") and not _is_stream(source):
        return _of_random_access(name, source)
    if isinstance(source, Iterable):
        return _of_iterable(name, source)
    if callable(source):
        return _with_first_row(name, source, None, None)
    raise DataError(f"{name} is no source of prompts", found=type(source).__name__, wanted=_WANTED)


_WANTED = "a path, a data set, a list of dicts, an object with __getitem__, or a function index -> dict"


def _is_stream(source: object) -> bool:
    """Iterated, never indexed by row: `datasets.IterableDataset`, whose ``[...]`` takes the name of a column."""
    return isinstance(source, Iterable) and not hasattr(source, "__len__")


def _refuse_lookalikes(source: object) -> None:
    """Objects that have the methods of a source, but mean something else."""
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, itertools.islice(source, 8)))
        name = type(source).__name__
        raise DataError(f"a {name} is no source of prompts", found=f"keys {keys}", fix="give one of its values")
    if isinstance(source, type):
        raise DataError(f"{source.__name__} is a class, not a source", fix=f"give an instance: {source.__name__}()")
    if isinstance(source, bytes | bytearray):
        raise DataError("bytes are no source of prompts", wanted=_WANTED)


def _name_of(source: object) -> str:
    function = getattr(source, "__qualname__", None) if callable(source) else None
    return f"function {function}" if function else f"the {type(source).__name__}"


def _checked(value: object, place: str) -> dict[str, Any]:
    """A copy of a row that is a dict with text keys."""
    if not isinstance(value, Mapping):
        raise DataError(f"{place} is no object with named columns", found=f"{type(value).__name__}: {_short(value)}")
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise DataError(f"{place}: a column's name must be text", found=repr(wrong[0]))
    return dict(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_rows(name: str, rows: Sequence[object], lines: Sequence[int] | None = None) -> Source:
    """Rows in memory; all are looked at, so that columns are those of every row."""
    if not rows:
        raise DataError(f"{name} has no rows")
    source = Source(name=name, columns=(), num_rows=len(rows), get=rows.__getitem__, lines=lines)
    columns = dict.fromkeys(column for row in range(len(rows)) for column in source[row])
    return Source(name=name, columns=tuple(columns), num_rows=len(rows), get=rows.__getitem__, lines=lines)


def _of_iterable(name: str, rows: Iterable[object]) -> Source:
    kept = list(itertools.islice(rows, MAX_ITERABLE_ROWS + 1))
    if len(kept) > MAX_ITERABLE_ROWS:
        raise DataError(
            f"{name} gave more than {MAX_ITERABLE_ROWS:,} rows, and an iterable is read into memory once",
            fix="give an object with __getitem__, or a function index -> dict",
        )
    return _of_rows(name, kept)


def _of_random_access(name: str, rows: Any) -> Source:
    num_rows = len(rows) if hasattr(rows, "__len__") else None
    if num_rows == 0:
        raise DataError(f"{name} has no rows")
    columns = getattr(rows, "column_names", None) or getattr(rows, "columns", None)
    known = tuple(columns) if isinstance(columns, list | tuple) else None
    return _with_first_row(name, rows.__getitem__, num_rows, known)


def _with_first_row(
    name: str, get: Callable[[int], object], num_rows: int | None, columns: tuple[str, ...] | None
) -> Source:
    """A source that is read when needed; row 0 is read now, so that an unusable object is found before a run starts."""
    first = Source(name=name, columns=(), num_rows=num_rows, get=get)[0]
    return Source(name=name, columns=columns or tuple(first), num_rows=num_rows, get=get)


def _open_builtin(name: str, seed: int) -> Source:
    from .tasks import TASKS

    task = name.removeprefix(_BUILTIN)
    if task not in TASKS:
        wanted = ", ".join(_BUILTIN + known for known in TASKS)
        raise DataError(f"no task is called {name!r}", wanted=wanted, fix=did_you_mean(task, TASKS))
    return _of_random_access(name, TASKS[task](seed=seed))


def _open_file(path: Path) -> Source:
    readers = {".jsonl": _open_jsonl, ".json": _open_json, ".parquet": _open_parquet}
    if not path.is_file():
        raise _missing(path)
    if path.suffix not in readers:
        kinds = ", ".join(readers)
        csv = "datasets.load_dataset('csv', data_files=..., split='train') reads it: give what that gives"
        fix = csv if path.suffix == ".csv" else f"write it as one of {kinds}"
        raise DataError(f"{path}: unknown kind of file", found=path.suffix or "no suffix", wanted=kinds, fix=fix)
    if path.stat().st_size == 0:
        raise DataError(f"{path} has no rows", found="an empty file")
    return readers[path.suffix](path)


def _missing(path: Path) -> DataError:
    if path.is_dir():
        return DataError(f"{path} is a folder, not a file of prompts")
    if not path.parent.is_dir():
        fix = None if path.suffix else "a data set of the Hugging Face hub: give datasets.load_dataset(...) itself"
        return DataError(f"no file {path}: there is no folder {path.parent}", fix=fix)
    names = sorted(other.name for other in path.parent.iterdir() if other.is_file())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return DataError(f"no file {path}", fix=f"did you mean {' or '.join(map(repr, near))}?" if near else None)


def _open_jsonl(path: Path) -> Source:
    """One JSON object a line; blank lines are passed over."""
    rows: list[object] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decoded(line, f"{path}:{number}", first=number == 1)
            if text.strip():
                rows.append(_parsed(text.rstrip(), f"{path}:{number}"))
                lines.append(number)
    return _of_rows(str(path), rows, lines)


def _open_json(path: Path) -> Source:
    """A JSON array of objects."""
    text = _decoded(path.read_bytes(), str(path), first=True)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        fix = "one object a line is .jsonl: rename the file" if error.msg == "Extra data" else None
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}", fix=fix) from None
    if not isinstance(rows, list):
        raise DataError(f"{path} holds no list of rows", found=type(rows).__name__, wanted="[{...}, {...}]")
    return _of_rows(str(path), rows)


def _decoded(line: bytes, place: str, *, first: bool) -> str:
    try:
        return line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text at byte {error.start}") from None


def _parsed(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{place}: not JSON at column {error.colno}: {error.msg}"
        raise DataError(problem, found=text if len(text) <= 60 else f"{text[:57]}...") from None


def _open_parquet(path: Path) -> Source:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{path} needs the pyarrow package", fix="pip install 'flowrl[data]'") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows")

    def get(row: int) -> object:
        return table.slice(row, 1).to_pylist()[0]

    return Source(name=str(path), columns=tuple(table.column_names), num_rows=table.num_rows, get=get)

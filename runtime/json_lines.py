"""Lines of JSON that every reader takes: never ``NaN``, never half a line in the middle of a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


def to_plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite are None, numpy values become Python's, paths text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, neither of which is imported here
        return to_plain(value.tolist())
    return str(value)


def dump(value: Any, *, indent: int | None = None) -> bytes:
    """JSON in UTF-8. A lone surrogate, which UTF-8 does not have, is written as ``?``."""
    if indent is None:
        try:
            return _encode(value).encode("utf-8", "replace")
        except (TypeError, ValueError):  # a number that is not finite, or a value of numpy's
            return _encode(to_plain(value)).encode("utf-8", "replace")
    text = json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "replace")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class JsonLines:
    """Appends objects to a file, each in one write: a reader sees whole lines, a kill loses at most the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        self._file.write(dump(record) + b"\n")

    def write_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append objects in one write."""
        lines = memoryview(b"".join(dump(record) + b"\n" for record in records))
        while lines:  # a write may take less than it is given
            lines = lines[self._file.write(lines) or 0 :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, without a last line that a kill cut off; none when there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def rewind(path: Path, step: int) -> None:
    """Drop the records of `step` and later, which a resumed run writes again, and a line that was cut off.

    The file is replaced in one rename: a kill in between leaves the old one.
    """
    if not path.exists():
        return
    kept = path.with_name(path.name + ".tmp")
    with kept.open("wb") as file:
        for record in read(path):
            if record["step"] < step:
                file.write(dump(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either old or new, never half."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(content)
    aside.replace(path)

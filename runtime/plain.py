"""Plain values: what msgpack carries and gives back equal in value and type.

msgpack itself changes some types on the way without a word (a tuple comes back as a list, a bytearray as bytes,
np.float64 as float) and refuses others with an error that names no place. So values are walked before they are packed,
and the error names the path to the value that cannot travel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from flowrl.errors import WireError

MAX_DEPTH = 64
"""Levels of lists and dicts in one value. msgpack's own stack ends at 1,024; no honest row comes near this."""

_WIDEST_INT = 1 << 64
_LOWEST_INT = -(1 << 63)


class Fault(NamedTuple):
    """The first value that cannot travel."""

    path: str
    """How to reach it: ``['scores'][3]``; empty for the value itself."""
    found: str
    fix: str


def find_fault(value: object, path: str = "", depth: int = 0) -> Fault | None:
    """The first thing in `value` that would not come back equal in value and type, or None."""
    kind = type(value)
    if kind is str:
        return None if _is_unicode(value) else Fault(path, f"the text {value!r} with a lone surrogate", _FIX_TEXT)  # type: ignore[arg-type]
    if value is None or kind is float or kind is bool or kind is bytes:
        return None
    if kind is int:
        fits = _LOWEST_INT <= value < _WIDEST_INT  # type: ignore[operator]
        return None if fits else Fault(path, f"an int of {value.bit_length()} bits", "write it as str")  # type: ignore[attr-defined]
    if depth == MAX_DEPTH:
        return Fault(path, f"more than {MAX_DEPTH} levels of nesting", "flatten it")
    if kind is list:
        return _fault_in_list(value, path, depth)  # type: ignore[arg-type]
    if kind is dict:
        return _fault_in_dict(value, path, depth)  # type: ignore[arg-type]
    return Fault(path, f"{_article(kind)} ({value!r:.80})", _fix(kind))


def pack(value: object, *, what: str, blame: object = None) -> bytes:
    """The msgpack bytes of a plain value; the fast way, which walks `value` only when msgpack refuses it.

    Meant for flowrl's own messages: unlike `find_fault` it lets a bytearray pass, which comes back as bytes.

    Args:
        what: names the value in an error.
        blame: the part of `value` that the user gave, where that is not all of it; paths begin there.

    Raises:
        WireError: a value that msgpack does not carry, with its path.
    """
    try:
        return msgpack.packb(value, strict_types=True)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as error:
        fault = find_fault(value if blame is None else blame) or Fault("", str(error), _FIX_TYPE)
        raise fault_error(fault, what) from None


def unpack(data: bytes | memoryview) -> Any:
    """The value that `data` holds.

    Raises:
        ValueError: not msgpack, or an extension type. No hook runs: nothing in a message can name code.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=False, ext_hook=_refuse_extension, timestamp=2)
    except (msgpack.exceptions.UnpackException, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"not msgpack: {error}") from None


def carried_text(text: str, limit: int) -> str:
    """A user's text as it can travel: a lone surrogate as its escape, and of a longer text its beginning and end."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters left out ... {text[-half:]}"
    return text if _is_unicode(text) else text.encode("utf-8", "backslashreplace").decode()


def fault_error(fault: Fault, what: str) -> WireError:
    """The error of a fault in the thing called `what`."""
    return WireError(
        f"{what}{fault.path} cannot travel: it is {fault.found}",
        found=fault.found,
        wanted="None, bool, int, float, str, bytes, or lists and str-keyed dicts of these",
        fix=fault.fix,
    )


_FIX_TYPE = "turn it into a plain Python value"
_FIX_TEXT = "clean the text: text.encode('utf-8', 'replace').decode()"


def _fix(kind: type) -> str:
    if kind in (tuple, set, frozenset):
        return "make it a list"
    if kind.__module__ == "numpy":
        return "turn it into a plain Python value with .item() or .tolist()"
    if kind.__module__.partition(".")[0] == "torch":
        return "give the whole column as one numpy array, or call .tolist()"
    return _FIX_TYPE


def _fault_in_list(values: list[object], path: str, depth: int) -> Fault | None:
    for position, item in enumerate(values):
        kind = type(item)
        if kind is float or (kind is str and item.isascii()):  # type: ignore[attr-defined]
            continue
        if fault := find_fault(item, f"{path}[{position}]", depth + 1):
            return fault
    return None


def _fault_in_dict(values: dict[object, object], path: str, depth: int) -> Fault | None:
    for key, item in values.items():
        if type(key) is not str:
            return Fault(path, f"a dict with the key {key!r:.80} of type {_name(type(key))}", "make every key a str")
        if not _is_unicode(key):
            return Fault(path, f"a dict with the key {key!r}, a lone surrogate", _FIX_TEXT)
        kind = type(item)
        if kind is float or (kind is str and item.isascii()):  # type: ignore[attr-defined]
            continue
        if fault := find_fault(item, f"{path}[{key!r}]", depth + 1):
            return fault
    return None


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _article(kind: type) -> str:
    return f"a value of type {_name(kind)}"


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")

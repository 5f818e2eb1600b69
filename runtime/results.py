"""What a node function may return, and how it becomes a column: a wrong count or a value that is no number is an error.

Nothing is broadcast, cast from text, or replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import ResultError
from flowrl.graph import FilterSpec, FunctionSpec, Node
from flowrl.rows import Column, Key, Ragged

from .plain import carried_text
from .timeout import function_name

NUMBERS: Mapping[str, str] = {
    "scores": "float32",
    "advantages": "float32",
    "rewards": "float32",
    "returns": "float32",
    "values": "float32",
    "old_logprobs": "float32",
    "ref_logprobs": "float32",
    "logit_energy": "float32",
    "importance_weights": "float32",
    "mask": "bool",
    "teacher_ids": "int32",
    "teacher_logprobs": "float32",
}
"""Columns whose values must be finite numbers, with their type: one a token, or (but for those below) one a row."""
WIDE = frozenset({"teacher_ids", "teacher_logprobs"})
"""Columns of k values a token."""
NEVER_A_ROWS = frozenset({"mask", *WIDE})
"""Columns that have no one value for a row."""
PER_TOKEN = frozenset({"response_ids", "logprobs", "versions", *NUMBERS}) - {"scores"}
"""Columns that have a value a response token, when they are ragged."""
LARGEST = float(np.finfo(np.float32).max)
"""A larger float would be infinite in its column."""
MAX_SHOWN = 80
"""Characters of a value in an error."""

Values = list[Any]
"""One value a row: numbers, arrays [tokens] or [tokens, k], or plain Python values."""


def response_lengths(node: Node, columns: Mapping[str, Column]) -> NDArray[np.int64] | None:
    """[rows] response tokens, from any column that a function reads which has a value a response token."""
    names = {binding.parameter: binding.column for binding in node.bindings}
    for parameter, column in columns.items():
        if isinstance(column, Ragged) and names.get(parameter, parameter) in PER_TOKEN:
            return column.lengths
    return None


def check_row(node: Node, result: Any, key: Key, length: int | None) -> Values:
    """What one call for one row gave: a value for each output.

    Args:
        length: response tokens of the row, if known.
    """
    if len(node.outputs) == 1:
        return [_value(node, node.outputs[0], result, key, length)]
    if not isinstance(result, tuple) or len(result) != len(node.outputs):
        raise _wrong_value(node, result, f"a tuple of {len(node.outputs)}: {', '.join(node.outputs)}", f"for {key}")
    return [_value(node, name, value, key, length) for name, value in zip(node.outputs, result, strict=True)]


def check_rows(node: Node, result: Any, keys: Sequence[Key], lengths: NDArray[np.int64] | None) -> list[Values]:
    """What one call for several rows gave: for each output a value a row.

    Args:
        lengths: [rows] response tokens, if known: [rows, tokens] and [rows, tokens, k] results are padded, and are cut
            to them.
    """
    outputs = (result,) if len(node.outputs) == 1 else result
    if not isinstance(outputs, tuple) or len(outputs) != len(node.outputs):
        raise _wrong_value(node, result, f"a tuple of {len(node.outputs)}: {', '.join(node.outputs)}", _rows(keys))
    return [_output(node, name, output, keys, lengths) for name, output in zip(node.outputs, outputs, strict=True)]


def check_metrics(node: Node, result: Any) -> dict[str, float]:
    """Numbers of a whole batch by name."""
    found = result if isinstance(result, dict) else {node.name: result}
    return {str(name): _number(node, value, f"for metric '{name}'") for name, value in found.items()}


def check_verdict(node: Node, verdict: Any, key: Key) -> bool:
    """What a filter says of a row, or of a group: one truth value. Nothing, and text, is none."""
    found = verdict
    if hasattr(verdict, "item") and math.prod(np.shape(verdict)) == 1:
        found = verdict.item()
    if isinstance(found, bool | int | float) and not math.isnan(found):
        return bool(found)
    what, where = ("row", f"for {key}") if node.per == "row" else ("group", f"for the group of {key.group}")
    raise _wrong_value(node, verdict, f"one truth value a {what}", where)


def collect(node: Node, name: str, values: Values) -> Column:
    """The right home for the values of a column: an array, a ragged array, or a list."""
    num_arrays = sum(isinstance(value, np.ndarray) for value in values)
    if num_arrays == len(values):
        _check_widths(node, name, values)
        return Ragged.pack(values, np.result_type(*{value.dtype for value in values}).str)
    if num_arrays:
        found = f"arrays for {num_arrays} of {len(values)} rows, one value for the others"
        raise _wrong(node, f"two kinds of '{name}'", found, "the same kind for every row")
    if name in NUMBERS:
        return np.asarray(values, NUMBERS[name])
    for kind in (float, bool):
        if all(type(value) is kind for value in values):
            return np.asarray(values, kind)
    return values


def _check_widths(node: Node, name: str, arrays: Values) -> None:
    shapes = sorted({array.shape[1:] for array in arrays if len(array)})
    if len(shapes) > 1:
        found = " and ".join(f"[tokens{''.join(f', {size}' for size in shape)}]" for shape in shapes)
        raise _wrong(node, f"rows of different widths for '{name}'", found, "[tokens, k] with one k for all rows")


# --- several rows ---------------------------------------------------------------------------------------------------


def _output(node: Node, name: str, output: Any, keys: Sequence[Key], lengths: NDArray[np.int64] | None) -> Values:
    values = _to_numpy(output)
    wanted = f"{len(keys)} values of '{name}', one a row"
    shape = values.shape if isinstance(values, np.ndarray) else None
    if shape == () or isinstance(values, str | bytes) or not isinstance(values, np.ndarray | Sequence):
        raise _wrong_value(node, output, wanted, _rows(keys))
    most = 1 if name == "scores" else 2 if name in NUMBERS and name not in WIDE else 3
    if shape is not None and len(shape) > most:
        raise _wrong(node, f"an array of {len(shape)} dimensions", f"shape {list(shape)} {_rows(keys)}", wanted)
    if len(values) != len(keys):
        count = f"{len(values)} value{'s' * (len(values) != 1)}"
        raise _wrong(node, f"{count} for {len(keys)} rows", f"{count} {_rows(keys)}", wanted)
    if isinstance(values, np.ndarray):
        if values.ndim > 1 and lengths is not None:
            return _cut(node, name, values, keys, lengths)
        if values.ndim == 1 and values.dtype.kind in "biuf":
            if name in NUMBERS and name not in NEVER_A_ROWS and _all_finite(values):
                return list(values.astype(np.float32, copy=False).tolist())
            values = values.tolist()
    known = [None] * len(keys) if lengths is None else lengths.tolist()
    each = zip(values, keys, known, strict=True)
    return [_value(node, name, value, key, length) for value, key, length in each]


def _cut(node: Node, name: str, values: NDArray[Any], keys: Sequence[Key], lengths: NDArray[np.int64]) -> Values:
    """Rows of a padded [rows, tokens] or [rows, tokens, k] array, without the padding."""
    longest = int(lengths.max())
    if values.shape[1] != longest:
        k = ", k" if values.ndim > 2 else ""
        found, wanted = f"shape {list(values.shape)} {_rows(keys)}", f"[{len(keys)}, {longest}{k}], [rows, tokens{k}]"
        raise _wrong(node, f"'{name}' that fits no response", found, f"{wanted}, or a list of one array a row")
    rows = [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]
    num_axes = 3 if name in WIDE else 2
    floats = NUMBERS.get(name) == "float32" and values.dtype.kind == "f"
    if floats and values.ndim == num_axes and _all_finite(values):
        return [row.astype(np.float32, copy=False) for row in rows]
    return [_value(node, name, row, key, len(row)) for row, key in zip(rows, keys, strict=True)]


def _all_finite(values: NDArray[Any]) -> bool:
    return bool((np.abs(values) <= LARGEST).all())


# --- one value ------------------------------------------------------------------------------------------------------


def _value(node: Node, name: str, value: Any, key: Key, length: int | None) -> Any:
    if name not in NUMBERS:
        is_tool = isinstance(node.spec, FunctionSpec) and node.spec.role == "tool"
        return _answer(node, value, key) if is_tool else _plain(node, value, f"for {key}")
    if type(value) is float and -LARGEST <= value <= LARGEST and name not in NEVER_A_ROWS:  # nearly every reward
        return value
    array = _table(value) if name in WIDE else _array(value)
    if array is not None and name != "scores":
        return _tokens(node, name, array, key, length)
    if name in NEVER_A_ROWS:
        what = "a truth value" if name == "mask" else "k numbers"
        raise _wrong_value(node, value, f"{what} a response token", f"for {key}")
    return _number(node, value, f"for {key}")


def _answer(node: Node, value: Any, key: Key) -> str | None:
    """What a tool says."""
    if value is not None and not isinstance(value, str):
        raise _wrong_value(node, value, "text, or None when the turn calls no tool", f"for {key}")
    if value is not None and value != carried_text(value, len(value)):
        raise _wrong_value(node, value, "text without a lone surrogate", f"for {key}")
    return value


def _tokens(node: Node, name: str, array: NDArray[Any], key: Key, length: int | None) -> NDArray[Any]:
    """One number a response token, or k of them."""
    if not array.size and not length and name in WIDE:
        return np.zeros(0, NUMBERS[name])  # a response without tokens: k is that of the other rows
    shape, num_axes = ("[tokens, k]", 2) if name in WIDE else ("[tokens]", 1)
    kinds, numbers = ("iu", "integers") if name == "teacher_ids" else ("biuf", "numbers")
    if array.ndim != num_axes or array.dtype.kind not in kinds or 0 in array.shape[1:]:
        found = f"shape {list(array.shape)}, {array.dtype} for {key}"
        raise _wrong(node, f"an array of {array.ndim} dimensions", found, f"{shape} {numbers}")
    if length is not None and len(array) != length:
        found = f"{len(array)} values of '{name}' for {key}"
        raise _wrong(node, f"'{name}' that fits no response", found, f"{length}, one a response token")
    allowed, wanted = _allowed(name, array)
    if not allowed.all():
        token = int(np.nonzero(~allowed)[0][0])
        raise _wrong_value(node, array[~allowed][0].item(), wanted, f"at token {token} of {key}")
    return array.astype(NUMBERS[name], copy=False)


def _allowed(name: str, array: NDArray[Any]) -> tuple[NDArray[np.bool_], str]:
    """Which values a column may hold, and what they are called."""
    if name == "mask":
        return np.isin(array, (0, 1)), "truth values"
    if name == "teacher_ids":
        return (array >= 0) & (array < 1 << 31), "token ids"
    return np.abs(array) <= LARGEST, "finite numbers"


def _number(node: Node, value: Any, where: str) -> float:
    found = value.item() if hasattr(value, "item") and np.shape(value) == () else value
    if isinstance(found, bool | int | float) and -LARGEST <= found <= LARGEST:
        return float(found)
    raise _wrong_value(node, value, "a finite number (int, float or bool)", where)


def _plain(node: Node, value: Any, where: str) -> Any:
    """A value of an ordinary column: an array of numbers [tokens] or [tokens, k], or what a message carries."""
    if type(value) in (str, int, float, bool) and (type(value) is not int or abs(value) < 1 << 63):
        return value
    if value is None:
        raise _wrong_value(node, None, "a value; to leave a row out, use fl.filter or on_error='drop'", where)
    found = _to_numpy(value)
    if (
        isinstance(found, np.ndarray)
        and found.dtype.kind in "biuf"
        and found.ndim in (1, 2)
        and 0 not in found.shape[1:]
    ):
        return found
    return _carried(node, found, where)


def _carried(node: Node, value: Any, where: str) -> Any:
    """Plain Python values, of exact types; tuples become lists, as on the wire."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if value is None or isinstance(value, bool | bytes | float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and abs(value) < 1 << 63:
        return int(value)
    if isinstance(value, list | tuple):
        return [_carried(node, item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _carried(node, item, where) for name, item in value.items()}
    raise _wrong_value(
        node, value, "a number of 64 bits, text, an array [tokens] or [tokens, k], or lists and dicts", where
    )


def _array(value: Any) -> NDArray[Any] | None:
    """A value that holds several numbers as an array; None for any other."""
    if isinstance(value, list | tuple):
        return np.asarray(value) if all(isinstance(item, bool | int | float | np.number) for item in value) else None
    found = _to_numpy(value)
    return found if isinstance(found, np.ndarray) and found.ndim else None


def _table(value: Any) -> NDArray[Any] | None:
    """A value that holds k numbers a token as an array; None for any other."""
    if isinstance(value, list | tuple):
        try:
            return np.asarray([_to_numpy(row) for row in value])
        except ValueError:  # rows of different lengths
            return None
    return _array(value)


def _to_numpy(value: Any) -> Any:
    """A torch tensor as an array; any other value as it is. torch is not imported for that."""
    if not (type(value).__module__.startswith("torch") and hasattr(value, "detach")):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()


# --- errors ---------------------------------------------------------------------------------------------------------


def _wrong_value(node: Node, value: Any, wanted: str, where: str) -> ResultError:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        what = str(value)
    else:
        what = f"a value of type {type(value).__name__}"
    text = repr(value)
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return _wrong(node, what, f"{shown} {where}", wanted)


def _wrong(node: Node, what: str, found: str, wanted: str) -> ResultError:
    """`what` is the same for all rows that are wrong in one way: dropped rows are counted by it."""
    kind = "filter" if isinstance(node.spec, FilterSpec) else "node"
    return ResultError(
        f"function '{function_name(node)}' of {kind} '{node.name}' gave {what}",
        at=node.at,
        node=node.name,
        found=found,
        wanted=wanted,
        fix=_FIX.get(getattr(node.spec, "role", "filter"), _FIX["node"]),
    )


_FIX = {
    "filter": "return True or False",
    "tool": "return str(...), or None; a call that may fail is declared with on_error='tell' or 'drop'",
    "node": "return a value a row; a call that may fail is declared with on_error='drop': it is never scored 0",
}
"""By the role of the function."""


def _rows(keys: Sequence[Key]) -> str:
    return f"for {keys[0]}" if len(keys) == 1 else f"for {len(keys)} rows from {keys[0]} on"

"""What a node function may return, and how it becomes a column: a wrong count or a value that is no number is an error.

Nothing is broadcast, cast from text, or replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.errors import ResultError
from flowrl.graph import FunctionSpec, Node
from flowrl.rows import Column, Key, Ragged

NUMBERS = frozenset({"scores", "advantages", "rewards", "returns", "values", "old_logprobs", "ref_logprobs"})
"""Columns whose values must be finite numbers: one a row, or one a token."""


def check_row(node: Node, result: Any, key: Key) -> list[list[Any]]:
    """What one call for one row gave: a list of one value for each output."""
    if len(node.outputs) == 1:
        return [[_value(node, node.outputs[0], result, key)]]
    if not isinstance(result, tuple) or len(result) != len(node.outputs):
        raise _wrong(node, repr(result), f"a tuple of {len(node.outputs)}: {', '.join(node.outputs)}")
    return [[_value(node, name, value, key)] for name, value in zip(node.outputs, result, strict=True)]


def check_group(node: Node, result: Any, keys: Sequence[Key], lengths: Sequence[int] | None) -> list[list[Any]]:
    """What one call for several rows gave: a list of one value a row for each output.

    Args:
        lengths: response tokens of each row, to cut the padding of [rows, tokens] results.
    """
    outputs = (result,) if len(node.outputs) == 1 else result
    if not isinstance(outputs, tuple) or len(outputs) != len(node.outputs):
        raise _wrong(node, type(result).__name__, f"a tuple of {len(node.outputs)}: {', '.join(node.outputs)}")
    found = []
    for name, output in zip(node.outputs, outputs, strict=True):
        values = _one_a_row(node, name, output, len(keys))
        if lengths is not None and np.ndim(values[0] if values else 0) == 1:
            values = [value[:length] for value, length in zip(values, lengths, strict=True)]
        found.append([_value(node, name, value, key) for value, key in zip(values, keys, strict=True)])
    return found


def check_metrics(node: Node, result: Any) -> dict[str, float]:
    """Numbers of a whole batch by name."""
    found = result if isinstance(result, dict) else {node.name: result}
    return {str(name): _number(node, value, f"'{name}'") for name, value in found.items()}


def collect(values: list[Any], name: str) -> Column:
    """The right home for values of one column: an array, a ragged array, or a list."""
    if values and all(isinstance(value, np.ndarray) and value.ndim == 1 for value in values):
        return Ragged.pack(values, values[0].dtype.str)
    if name in NUMBERS:
        return np.asarray(values, np.float32)
    if all(type(value) is float for value in values):
        return np.asarray(values, np.float64)
    if all(type(value) is bool for value in values):
        return np.asarray(values, np.bool_)
    return values


def _one_a_row(node: Node, name: str, output: Any, num_rows: int) -> list[Any]:
    wanted = f"{num_rows} values of '{name}', one a row"
    if type(output).__module__.startswith("torch"):
        output = output.detach().cpu().numpy()
    if isinstance(output, str | bytes | dict) or not hasattr(output, "__len__") or np.shape(output) == ():
        raise _wrong(node, f"{type(output).__name__} {output!r}", wanted)
    if name == "scores" and isinstance(output, np.ndarray) and output.ndim != 1:
        raise _wrong(node, f"an array of shape {output.shape}", wanted)
    if len(output) != num_rows:
        raise _wrong(node, f"{len(output)} values", wanted)
    return list(output)


def _value(node: Node, name: str, value: Any, key: Key) -> Any:
    if name not in NUMBERS:
        return _plain(node, value, key)
    if type(value) is float and math.isfinite(value):  # nearly every reward
        return value
    if np.ndim(value) == 0:
        return _number(node, value, str(key))
    if name == "scores" or not isinstance(value, np.ndarray):
        raise _wrong(node, f"{value!r} for {key}", "a finite number")
    if not np.isfinite(value).all():
        raise _wrong(node, f"{value[~np.isfinite(value)][0]} for {key}", "finite numbers")
    return value.astype(np.float32, copy=False)


def _number(node: Node, value: Any, what: str) -> float:
    if type(value).__module__.startswith(("torch", "numpy")) and np.ndim(value) == 0:
        value = value.item()
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise _wrong(node, f"{value!r} for {what}", "a finite number (int, float or bool)")


def _plain(node: Node, value: Any, key: Key) -> Any:
    if value is None:
        raise _wrong(node, f"None for {key}", "a value; to leave a row out, use fl.filter or on_error='drop'")
    if type(value).__module__.startswith("torch"):
        value = value.detach().cpu().numpy()
    return value.item() if isinstance(value, np.generic) or (np.shape(value) == () and hasattr(value, "item")) else value


def _wrong(node: Node, found: str, wanted: str) -> ResultError:
    function = node.spec.function.__name__ if isinstance(node.spec, FunctionSpec) else node.name
    return ResultError(
        f"function '{function}' of node '{node.name}' gave a wrong result",
        at=node.at,
        node=node.name,
        found=found,
        wanted=wanted,
        fix="return a number a row; a call that may fail is declared with on_error='drop', it is never scored 0",
    )

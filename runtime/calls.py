"""Calling a user's function: arguments from columns, a limit in time, and outputs as columns.

A call that raises, runs out of time or gives no number has *failed*. A failed call is never a score of 0: it ends the run,
or drops its rows with the reason, as its node declares.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.columns import GROUP, positional
from flowrl.errors import ResultError
from flowrl.graph import FilterSpec, FunctionSpec, Node
from flowrl.rows import Column, Key, Ragged, Rows

from .results import check_group, check_metrics, check_row, collect
from .timeout import TimeLimit

BACK_OFF_S = 0.1
"""Pause before the first retry; each further one doubles it."""


@dataclass(slots=True)
class Called:
    """What came of calling a node's function for some rows."""

    rows: Rows | None = None
    """Rows whose call went well, with the node's outputs; None when there are none."""
    dropped: dict[Key, str] = field(default_factory=dict)
    """The other rows, with the reason."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers of a metric node."""


def call_function(node: Node, spec: FunctionSpec, keys: Sequence[Key], arguments: Mapping[str, Column]) -> Called:
    """Call a node's function for rows: once a row, once a group, or once.

    Args:
        keys: of the rows, in order.
        arguments: a column [rows] for each parameter that is bound.

    Raises:
        ResultError, DeadlineError, Exception: a call failed for good and the node has ``on_error="fail"``.
    """
    call = _row_caller(spec.function, arguments, spec.settings) if node.per == "row" else None
    done: list[Key] = []
    outputs: list[list[Any]] = [[] for _ in node.outputs]
    called = Called()
    with TimeLimit(node, spec.timeout_s) as limit:
        for part in _parts(node, keys):
            part_keys = [keys[row] for row in part]
            if node.per == "group" and len(part) < spec.min_group:
                reason = f"{node.name} needs {spec.min_group} samples of a prompt; {len(part)} are left"
                called.dropped.update(dict.fromkeys(part_keys, reason))
                continue
            try:
                found = _attempt(node, spec, limit, call, part, part_keys, arguments)
            except Exception as error:
                if spec.on_error == "fail":
                    raise
                reason = f"{node.name} failed: {type(error).__name__}: {getattr(error, 'problem', error)}"
                called.dropped.update(dict.fromkeys(part_keys, reason))
                continue
            if isinstance(found, dict):
                called.values.update(found)
                continue
            done += part_keys
            for output, values in zip(outputs, found, strict=True):
                output += values
    if done and node.outputs:
        called.rows = Rows(done, {name: collect(output, name) for name, output in zip(node.outputs, outputs, strict=True)})
    return called


def call_filter(node: Node, spec: FilterSpec, keys: Sequence[Key], arguments: Mapping[str, Column]) -> Called:
    """Ask a filter about rows, or groups; `Called.rows` holds the keys that pass."""
    call = _row_caller(spec.keep, arguments, {}) if node.per == "row" else None
    kept: list[Key] = []
    called = Called()
    for part in _parts(node, keys):
        part_keys = [keys[row] for row in part]
        verdict = call(part[0]) if call else _call_many(spec.keep, {}, part, part_keys, arguments)
        if _verdict(node, verdict):
            kept += part_keys
        else:
            called.dropped.update(dict.fromkeys(part_keys, spec.reason))
    called.rows = Rows(kept, {}) if kept else None
    return called


def _parts(node: Node, keys: Sequence[Key]) -> list[Sequence[int]]:
    """Positions of the rows of each call."""
    if node.per == "row":
        return [(row,) for row in range(len(keys))]
    if node.per == "batch":
        return [range(len(keys))]
    groups: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key.group, []).append(row)
    return list(groups.values())


def _attempt(
    node: Node,
    spec: FunctionSpec,
    limit: TimeLimit,
    call: Callable[[int], Any] | None,
    part: Sequence[int],
    keys: Sequence[Key],
    arguments: Mapping[str, Column],
) -> Any:
    """One list of values for each output, or a metric node's numbers; tried again as often as the node allows."""
    for attempt in range(spec.retries + 1):
        try:
            limit.begin(keys[0])
            try:
                result = call(part[0]) if call else _call_many(spec.function, spec.settings, part, keys, arguments)
            finally:
                limit.end()
            if spec.role == "metric":
                return check_metrics(node, result)
            if call:
                return check_row(node, result, keys[0])
            return check_group(node, result, keys, _response_lengths(arguments, part))
        except Exception:
            if attempt == spec.retries:
                raise
            time.sleep(BACK_OFF_S * 2**attempt)
    raise AssertionError("unreachable")


# --- arguments ------------------------------------------------------------------------------------------------------


def _row_caller(
    function: Callable[..., Any], arguments: Mapping[str, Column], settings: Mapping[str, Any]
) -> Callable[[int], Any]:
    """A function of a row's position. Rows see Python values; arrays of tokens stay arrays."""
    names = list(arguments)
    columns = [column.tolist() if isinstance(column, np.ndarray) else column for column in arguments.values()]
    leading = [parameter.name for parameter in positional(function)][: len(names)]
    if leading == names:
        return lambda row: function(*[column[row] for column in columns], **settings)
    return lambda row: function(**{name: column[row] for name, column in zip(names, columns, strict=True)}, **settings)


def _call_many(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    part: Sequence[int],
    keys: Sequence[Key],
    arguments: Mapping[str, Column],
) -> Any:
    """Call a function of a group or a batch: tensors, and lists of what no tensor holds."""
    given = {name: _tensor(column, part) for name, column in arguments.items()}
    if GROUP in inspect.signature(function).parameters:
        import torch

        given[GROUP] = torch.tensor([key.prompt for key in keys])
    only_by_position = [p.name for p in positional(function) if p.kind is p.POSITIONAL_ONLY]
    ordered = [given.pop(name) for name in only_by_position]
    return function(*ordered, **given, **settings)


def _tensor(column: Column, part: Sequence[int]) -> Any:
    """[rows], or [rows, tokens] padded at the right with 0; a list for text and other Python values."""
    if isinstance(column, list):
        values = [column[row] for row in part]
        if not all(type(value) in (int, float) for value in values):
            return values
        column, part = np.asarray(values), range(len(values))
    import torch

    if isinstance(column, Ragged):
        rows = [torch.tensor(column[row]) for row in part]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return torch.tensor(column[list(part)])


def _response_lengths(arguments: Mapping[str, Column], part: Sequence[int]) -> list[int] | None:
    """Response tokens of each row, from any column that has one value a response token."""
    for name, column in arguments.items():
        if isinstance(column, Ragged) and name != "prompt_ids":
            lengths = column.lengths
            return [int(lengths[row]) for row in part]
    return None


def _verdict(node: Node, verdict: Any) -> bool:
    try:
        return bool(verdict)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ResultError(
            f"filter '{node.name}' gives no verdict",
            at=node.at,
            node=node.name,
            found=repr(verdict),
            wanted=f"one truth value for {'a row' if node.per == 'row' else 'a group'}",
        ) from error

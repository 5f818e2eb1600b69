"""Calling a user's function: in parts, in time, as often as declared; outputs become columns, failures reasons.

A call that raises, runs out of time or gives no number has *failed*. A failed call is never a score of 0: it ends the
run, or drops its rows with the reason, as its node declares.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import FlowrlError, NodeError
from flowrl.graph import FilterSpec, FunctionSpec, Node
from flowrl.rows import Column, Key, Rows

from .arguments import Arguments
from .plain import carried_text
from .results import Values, check_metrics, check_row, check_rows, check_verdict, collect, response_lengths
from .timeout import TimeLimit, function_name

log = logging.getLogger("flowrl.calls")
BACK_OFF_S = 0.1
"""Pause before the first retry; each further one doubles it."""
MAX_BACK_OFF_S = 10.0
"""Longest pause: more would look like a hung worker."""
MAX_REASON = 200
"""Characters of an exception in the reason of a dropped row."""
FAILED = " failed: "
"""Between who has failed and why, in a reason."""
FAILURES = (Exception, SystemExit)
"""What a function may raise; one that calls ``sys.exit`` has failed, it does not end its worker."""

Part = Sequence[int]
"""Positions of the rows of one call."""


@dataclass(slots=True)
class Called:
    """What came of calling a node's function for some rows."""

    rows: Rows | None = None
    """Rows whose call went well, with the node's outputs; None when there are none."""
    dropped: dict[Key, str] = field(default_factory=dict)
    """The other rows, with the reason."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers of a metric node."""


def call_function(node: Node, spec: FunctionSpec, keys: Sequence[Key], columns: Mapping[str, Column]) -> Called:
    """Call a node's function for rows: once a row, once a group, or once.

    A function per group that names the pseudo-column ``group`` is called once for all groups. When that call fails each
    group gets its own, so that only the group that is wrong fails.

    Args:
        keys: of the rows, in order.
        columns: a column [rows] for each parameter that is bound.

    Raises:
        ResultError, DeadlineError: a call gave a wrong result, or none in time, and the node has ``on_error="fail"``.
        NodeError: one raised anything else.
    """
    if not keys:
        return Called()
    with TimeLimit(node, spec.timeout_s) as limit:
        calls = _Calls(node, spec, keys, columns, limit)
        if spec.role == "metric":
            calls.metric()
        elif node.per == "row":
            calls.by_row()
        else:
            calls.by_group()
        return calls.called()


def call_filter(node: Node, spec: FilterSpec, keys: Sequence[Key], columns: Mapping[str, Column]) -> Called:
    """Ask a filter about rows, or groups; `Called.rows` holds the keys that pass.

    Raises:
        ResultError: it gave no verdict.
        NodeError: it raised.
    """
    called = Called()
    if not keys:
        return called
    arguments = Arguments(spec.keep, keys, columns, {})
    ask: Callable[[Any], Any] = arguments.by_row() if node.per == "row" else arguments.by_rows()
    parts: Sequence[Any] = range(len(keys)) if node.per == "row" else list(_groups(keys).values())
    kept: list[Key] = []
    for part in parts:
        members = [keys[part]] if node.per == "row" else [keys[row] for row in part]
        try:
            verdict = ask(part)
        except FAILURES as error:
            raise _raised(node, error, members[0], 1) from error
        if check_verdict(node, verdict, members[0]):
            kept += members
        else:
            called.dropped.update(dict.fromkeys(members, spec.reason))
    called.rows = Rows(kept, {}) if kept else None
    return called


class _Calls:
    """The calls of one firing, and what has come of them."""

    def __init__(
        self, node: Node, spec: FunctionSpec, keys: Sequence[Key], columns: Mapping[str, Column], limit: TimeLimit
    ) -> None:
        self.node = node
        self.spec = spec
        self.keys = keys
        self.limit = limit
        self.arguments = Arguments(spec.function, keys, columns, spec.settings)
        self.lengths = response_lengths(node, columns)
        self._done: list[Key] = []
        self._outputs: list[Values] = [[] for _ in node.outputs]
        self._called = Called()

    def called(self) -> Called:
        """All of it."""
        if self._done and self.node.outputs:
            named = zip(self.node.outputs, self._outputs, strict=True)
            self._called.rows = Rows(self._done, {name: collect(self.node, name, values) for name, values in named})
        return self._called

    def by_row(self) -> None:
        """One call a row."""
        node, keys, limit, function = self.node, self.keys, self.limit, self.arguments.by_row()
        lengths = [None] * len(keys) if self.lengths is None else self.lengths.tolist()

        def once(row: int) -> Values:
            return check_row(node, limit.call(keys[row], function, row), keys[row], lengths[row])

        found = [(row, self._settle((row,), once, row)) for row in range(len(keys))]
        good = [(row, values) for row, values in found if values is not None]
        self._done = [keys[row] for row, _ in good]
        self._outputs = [[values[i] for _, values in good] for i in range(len(node.outputs))]

    def by_group(self) -> None:
        """One call a group, or one for all of them; groups that drops have left too small are dropped too."""
        function = self.arguments.by_rows()

        def once(part: Part) -> list[Values]:
            members = [self.keys[row] for row in part]
            lengths = None if self.lengths is None else self.lengths[part]
            return check_rows(self.node, self.limit.call(members[0], function, part), members, lengths)

        groups = self._large_groups()
        everything = _all_of(groups)
        if self.node.per == "batch" and groups:
            groups = [everything]
        elif self.arguments.names_group and len(groups) > 1:
            try:
                self._keep(everything, once(everything))
                groups = []
            except FAILURES:  # one of the groups is at fault: called by itself, it will say so
                pass
        for part in groups:
            found = self._settle(part, once, part)
            if found is not None:
                self._keep(part, found)

    def metric(self) -> None:
        """One call for all rows, that gives numbers of the whole batch."""
        function = self.arguments.by_rows()

        def once(part: Part) -> dict[str, float]:
            return check_metrics(self.node, self.limit.call(self.keys[0], function, part))

        part = range(len(self.keys))
        self._called.values = self._settle(part, once, part) or {}
        for reason in set(self._called.dropped.values()):  # a metric is a mere reader: its rows go on without it
            log.warning("%s", reason)
        self._called.dropped.clear()

    def _large_groups(self) -> list[Part]:
        groups = _groups(self.keys).values()
        least = self.spec.min_group
        for part in groups:
            if len(part) < least:
                reason = f"{self.node.name} needs {least} samples of a prompt; {len(part)} left"
                self._called.dropped.update((self.keys[row], reason) for row in part)
        return [part for part in groups if len(part) >= least]

    def _keep(self, part: Part, found: list[Values]) -> None:
        self._done += [self.keys[row] for row in part]
        for output, values in zip(self._outputs, found, strict=True):
            output += values

    def _settle(self, part: Part, once: Callable[[Any], Any], argument: Any) -> Any:
        """What a call gives, tried as often as the node allows; None when its rows are dropped."""
        retries = 0
        while True:
            try:
                return once(argument)
            except FAILURES as error:
                if retries == self.spec.retries:
                    return self._give_up(part, error)
            time.sleep(min(BACK_OFF_S * 2**retries, MAX_BACK_OFF_S))
            retries += 1

    def _give_up(self, part: Part, error: BaseException) -> None:
        keys = [self.keys[row] for row in part]
        if self.spec.on_error == "fail":
            if isinstance(error, FlowrlError):
                error.node, error.at = error.node or self.node.name, error.at or self.node.at
                raise error
            raise _raised(self.node, error, keys[0], self.spec.retries + 1) from error
        what = error.problem if isinstance(error, FlowrlError) else _one_line(error)
        who = function_name(self.node) if self.spec.role == "tool" else self.node.name
        self._called.dropped.update(dict.fromkeys(keys, f"{who}{FAILED}{what}"))


def _groups(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Positions of the rows of each prompt."""
    groups: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key.group, []).append(row)
    return groups


def _all_of(groups: Sequence[Part]) -> list[int]:
    """Positions of the rows of some groups, in order."""
    return sorted(row for part in groups for row in part)


def message_of(error: BaseException) -> str:
    """What an exception says, also one whose own ``__str__`` fails."""
    try:
        return str(error)
    except Exception as wrong:
        return f"(its __str__ raised {type(wrong).__name__})"


def _one_line(error: BaseException) -> str:
    lines = message_of(error).splitlines() or [""]
    return carried_text(f"{type(error).__name__}: {lines[0]}"[:MAX_REASON].rstrip(": "), MAX_REASON)


def _raised(node: Node, error: BaseException, key: Key, calls: int) -> NodeError:
    """A user's exception, with its traceback from the user's own function on."""
    kind = "filter" if isinstance(node.spec, FilterSpec) else "node"
    return NodeError(
        f"function '{function_name(node)}' of {kind} '{node.name}' raised {_one_line(error)}",
        at=node.at,
        node=node.name,
        found=f"in the call for {key}" + (f", {calls} times" if calls > 1 else ""),
        wanted="a result",
        fix="filter must answer for every row"
        if kind == "filter"
        else "make it answer for every row, or drop such rows with on_error='drop'",
        traceback=_own_traceback(error),
    )


def _own_traceback(error: BaseException) -> str:
    """Python's text for an exception, without the frames that lead from this module to the function."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None and at.tb_frame.f_globals.get("__name__", "") in _OURS:
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()


_OURS = {__name__, Arguments.__module__, TimeLimit.__module__}

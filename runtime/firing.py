"""Executing a firing on a worker.

`fire` is a generator: each `Produced` says that rows lie here under a block's number, for `Worker.block` to hand out;
the last event is `Finished` or `Failed`. A user's exception becomes a `Failed` with its own traceback.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from flowrl.backend import Metrics, metric_of
from flowrl.errors import FlowrlError

from .actions import ACTIONS
from .calls import message_of
from .events import Event, Failed, Finished, Firing, Produced
from .plain import carried_text
from .worker import Content, Worker

MAX_TOLD = 20_000
"""Characters of an error's parts, its traceback among them: a message that holds a data set helps nobody."""


def fire(worker: Worker, firing: Firing, parts: Sequence[Content]) -> Iterator[Event]:
    """Execute a firing.

    Args:
        parts: the content of each of its inputs, in their order.
    """
    metrics: Metrics = {}
    compute_s = 0.0
    begun = time.perf_counter()
    try:
        for emitted in ACTIONS[firing.action](worker, firing, parts):
            if isinstance(emitted, dict):
                metrics = emitted
                continue
            compute_s += time.perf_counter() - begun
            made = emitted.content
            block = None if made is None else worker.keep(firing.node, made, emitted.lengths)
            yield Produced(worker.name, firing.id, firing.attempt, block, emitted.dropped)
            begun = time.perf_counter()  # what the driver did meanwhile is not the node's
    except Exception as error:
        yield Failed(worker.name, firing.id, firing.attempt, describe_error(error))
        return
    compute_s += time.perf_counter() - begun
    sums = {name: metric_of([_plain(part) for part in metric]) for name, metric in metrics.items()}
    yield Finished(worker.name, firing.id, firing.attempt, sums, compute_s)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain values: its type, message, the parts of a `FlowrlError`, and a traceback.

    That of a `NodeError` is the one it brings along: a user's own, without our frames.
    """
    told: dict[str, Any] = {
        "type": type(error).__name__,
        "problem": f"{type(error).__name__}: {message_of(error)}",
        "at": None,
        "found": None,
        "wanted": None,
        "fix": None,
        "traceback": getattr(error, "traceback", "") or "".join(traceback.format_exception(error)).rstrip(),
        "ours": isinstance(error, FlowrlError),
    }
    if isinstance(error, FlowrlError):
        parts = {"at": error.at, "found": error.found, "wanted": error.wanted, "fix": error.fix}
        told |= {name: None if value is None else str(value) for name, value in parts.items()}
        told["problem"] = error.problem
    return {name: carried_text(value, MAX_TOLD) if isinstance(value, str) else value for name, value in told.items()}


def _plain(number: Any) -> int | float:
    """A number as a message carries it; numpy's and torch's become Python's."""
    return number if type(number) in (int, float) else float(number)

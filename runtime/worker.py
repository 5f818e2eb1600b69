"""One rank: holds models and blocks, and fires nodes. It knows no sockets: its driver brings inputs and takes events.

`Worker.fire` is a generator: each `Produced` says that rows lie here under a block's number, for `Worker.block` to hand
out; the last event is `Finished` or `Failed`. A user's exception becomes a `Failed` with its own traceback.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.backend import Backend, BackendFactory, Metrics, Sum
from flowrl.data import PromptReader
from flowrl.errors import FlowrlError
from flowrl.rows import Column, Rows

from .actions import ACTIONS, Emitted
from .calls import message_of
from .events import Block, Event, Failed, Finished, Firing, Produced
from .plain import carried_text
from .plan import Plan, Pool
from .ranks import Rank
from .record import Recorder

MAX_TOLD = 20_000
"""Characters of an error's parts, its traceback among them: a message that holds a data set helps nobody."""
Content = Any
"""`Rows`, or a dict of named tensors in a weight sync."""


@dataclass(kw_only=True, slots=True)
class Worker:
    """A rank's state."""

    name: str
    plan: Plan
    pool: Pool
    rank: Rank
    device: str
    seed: int
    load_backend: Callable[[str], BackendFactory]
    """By name, for the models of this pool and the tokenizers of its prompts."""
    recorder: Recorder | None = None
    """Writes samples; on the host only."""
    models: dict[str, Backend] = field(default_factory=dict)
    readers: dict[str, PromptReader] = field(default_factory=dict)
    blocks: dict[int, Content] = field(default_factory=dict)
    makers: dict[int, str] = field(default_factory=dict)
    """The node that made each block, for errors."""
    _next_block: int = 0

    def load(self) -> None:
        """Load the pool's models."""
        for name in self.pool.models:
            model = self.plan.graph.models[name]
            self.models[name] = self.load_backend(model.backend)(model, self.rank, self.device)

    def fire(self, firing: Firing, parts: Sequence[Content]) -> Iterator[Event]:
        """Execute a firing.

        Args:
            parts: the content of each of its inputs, in their order.
        """
        metrics: Metrics = {}
        compute_s = 0.0
        begun = time.perf_counter()
        try:
            for emitted in ACTIONS[firing.action](self, firing, parts):
                if isinstance(emitted, dict):
                    metrics = emitted
                    continue
                compute_s += time.perf_counter() - begun
                yield self._produced(firing, emitted)
                begun = time.perf_counter()  # what the driver did meanwhile is not the node's
        except Exception as error:
            yield Failed(self.name, firing.id, firing.attempt, describe_error(error))
            return
        compute_s += time.perf_counter() - begun
        sums = {name: Sum(_plain(total), _plain(weight)) for name, (total, weight) in metrics.items()}
        yield Finished(self.name, firing.id, firing.attempt, sums, compute_s)

    def block(self, number: int, rows: Sequence[int] | None, columns: Sequence[str]) -> Content:
        """Part of a block that lies here; tensors are given whole."""
        content = self.blocks[number]
        if not isinstance(content, Rows):
            return content
        part = content.project(columns)
        return part if rows is None else part.take(rows)

    def free(self, numbers: Sequence[int]) -> None:
        """Forget blocks."""
        for number in numbers:
            self.blocks.pop(number, None)
            self.makers.pop(number, None)

    def arguments(self, firing: Firing, parts: Sequence[Content]) -> dict[str, Column]:
        """Columns [rows of the firing, in its order] for each parameter that the node binds."""
        by_source: dict[str, list[Rows]] = {}
        for each, part in zip(firing.inputs, parts, strict=True):
            by_source.setdefault(each.source, []).append(part)
        tables = {source: Rows.join(firing.keys, found) for source, found in by_source.items()}
        bindings = self.plan.graph[firing.node].bindings
        return {b.parameter: tables[b.source].columns[b.column] for b in bindings}

    def model_of(self, firing: Firing) -> Backend:
        """The model that a node runs."""
        model = self.plan.graph[firing.node].model
        assert model is not None
        return self.models[model.name]

    def _produced(self, firing: Firing, emitted: Emitted) -> Produced:
        block = None
        if emitted.content is not None:
            self._next_block += 1
            self.makers[self._next_block] = firing.node
            self.blocks[self._next_block] = emitted.content
            block = _describe_block(self.name, self._next_block, emitted)
        return Produced(self.name, firing.id, firing.attempt, block, emitted.dropped)


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


def _describe_block(worker: str, number: int, emitted: Emitted) -> Block:
    content = emitted.content
    if isinstance(content, Rows):
        keys, columns = tuple(content.keys), tuple(content.columns)
        return Block(worker, number, keys, columns, content.num_bytes, emitted.lengths)
    return Block(worker, number, (), (), sum(tensor.numel() * tensor.element_size() for tensor in content.values()))


def _plain(number: Any) -> int | float:
    """A number as a message carries it; numpy's and torch's become Python's."""
    return number if type(number) in (int, float) else float(number)

"""One rank: holds models and blocks, and fires nodes. It knows no sockets; whoever drives it brings inputs and takes events.

`Worker.fire` is a generator: each `Produced` says that rows lie here under a block's number, for `Worker.block` to hand out;
the last event is `Finished` or `Failed`. A user's exception becomes a `Failed` with its own traceback.
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
from .events import Block, Event, Failed, Finished, Firing, Input, Produced
from .plan import Plan, Pool
from .ranks import Rank
from .record import Recorder

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
        begun = time.perf_counter()
        try:
            for emitted in ACTIONS[firing.action](self, firing, parts):
                if isinstance(emitted, dict):
                    metrics = emitted
                else:
                    yield self._produced(firing, emitted)
        except Exception as error:
            yield Failed(self.name, firing.id, firing.attempt, describe_error(error))
            return
        compute_s = time.perf_counter() - begun
        yield Finished(self.name, firing.id, firing.attempt, {n: Sum(*s) for n, s in metrics.items()}, compute_s)

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
            self.blocks[self._next_block] = emitted.content
            rows = emitted.content if isinstance(emitted.content, Rows) else None
            block = Block(
                worker=self.name,
                number=self._next_block,
                keys=tuple(rows.keys) if rows is not None else (),
                columns=tuple(rows.columns) if rows is not None else (),
                num_bytes=rows.num_bytes if rows is not None else 0,
                lengths=emitted.lengths,
            )
        return Produced(self.name, firing.id, firing.attempt, block, emitted.dropped)


def inputs_here(worker: str, firing: Firing) -> list[tuple[int, Input]]:
    """Inputs of a firing whose blocks lie with the worker itself, with their positions."""
    return [(index, each) for index, each in enumerate(firing.inputs) if each.worker == worker]


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain values: its type, message, the parts of a `FlowrlError`, and Python's traceback."""
    ours = isinstance(error, FlowrlError)
    return {
        "type": type(error).__name__,
        "problem": error.problem if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}",
        "at": str(error.at) if isinstance(error, FlowrlError) and error.at else None,
        "found": None if not isinstance(error, FlowrlError) or error.found is None else str(error.found),
        "wanted": None if not isinstance(error, FlowrlError) or error.wanted is None else str(error.wanted),
        "fix": error.fix if isinstance(error, FlowrlError) else None,
        "traceback": "".join(traceback.format_exception(error)).rstrip(),
        "ours": ours,
    }


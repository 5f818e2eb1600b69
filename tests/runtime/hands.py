"""Workers of a small graph, driven by hand: no scheduler, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import flowrl as fl
from flowrl.graph import Graph
from flowrl.rows import Key, Rows
from flowrl.runtime.events import Block, Event, Failed, Finished, Firing, Input, Produced
from flowrl.runtime.firing import fire
from flowrl.runtime.plan import HOST, compile_plan
from flowrl.runtime.ranks import place
from flowrl.runtime.record import Recorder
from flowrl.runtime.registry import load_backend
from flowrl.runtime.worker import Worker


class Hands:
    """All workers of a graph, and the blocks that they have made."""

    def __init__(self, graph: Graph, lines: Any = None) -> None:
        self.plan = compile_plan(graph)
        self.blocks: dict[str, list[Block]] = {}
        self.events: list[Event] = []
        self._ids = count(1)
        self.workers: dict[str, Worker] = {}
        for pool in self.plan.pools.values():
            for index, name in enumerate(pool.workers):
                self.workers[name] = Worker(
                    name=name,
                    plan=self.plan,
                    pool=pool,
                    rank=place(pool, index),
                    device="cpu",
                    seed=7,
                    load_backend=load_backend,
                    recorder=Recorder(self.plan, lines) if pool.name == HOST else None,
                )
                self.workers[name].load()

    def fire(self, node: str, keys: Sequence[Key] = (), **parts: Any) -> Finished:
        """Fire a node of the plan with all that was made so far; the firing has to end well."""
        last = self.try_to_fire(node, keys, **parts)
        assert isinstance(last, Finished), last
        return last

    def try_to_fire(self, node: str, keys: Sequence[Key] = (), *, action: Any = None, **parts: Any) -> Event:
        """Fire a node; the last event."""
        stage = self.plan.stages.get(node)
        pool = self.plan.pools[stage.pool if stage else node]
        worker = self.workers[pool.workers[0]]
        inputs = self._inputs(stage.reads, keys) if stage and keys else ()
        step = parts.pop("step", 0)
        firing = Firing(next(self._ids), node, action or (stage and stage.action), step, 1, tuple(keys), inputs)
        return self.drive(worker, replace(firing, **parts))

    def drive(self, worker: Worker, firing: Firing) -> Event:
        """Let a worker execute a firing."""
        found = [self.workers[i.worker].block(i.number, i.rows, i.columns) for i in firing.inputs]
        self.events = list(fire(worker, firing, found))
        for event in self.events:
            if isinstance(event, Produced) and event.block is not None:
                self.blocks.setdefault(firing.node, []).append(event.block)
        return self.events[-1]

    def failure(self) -> dict[str, Any]:
        """How the last firing failed."""
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last.error

    def dropped(self) -> dict[Key, str]:
        """Rows that the last firing dropped."""
        return {k: v for event in self.events if isinstance(event, Produced) for k, v in event.dropped.items()}

    def rows(self, node: str) -> Rows:
        """All rows of a node."""
        return Rows.concat([self.workers[b.worker].block(b.number, None, b.columns) for b in self.blocks[node]])

    def _inputs(self, reads: Sequence[tuple[str, tuple[str, ...]]], keys: Sequence[Key]) -> tuple[Input, ...]:
        wanted = {*keys, *(key.group for key in keys)}
        found = []
        for source, columns in reads:
            for block in self.blocks.get(source, ()):
                rows = tuple(row for row, key in enumerate(block.keys) if key in wanted)
                if rows:
                    found.append(Input(source, block.worker, block.number, rows, columns))
        return tuple(found)


ROWS = [{"prompt": f"{i}+{i}=", "answer": i} for i in range(4)]


@fl.reward
def digest(response: str, answer: int) -> float:
    return sum(response.encode()) + answer


def policy(**settings: Any) -> fl.Model:
    return fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-2), **settings)

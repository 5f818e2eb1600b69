"""Evaluations: held-out prompts that stay for the whole run, and the versions that they are asked of.

The weights change only once an evaluation of them has ended, so that it sees exactly its version. Version v belongs to
the line of the step that made it, v - 1; the untrained version 0 to that of the first step, as ``NODE/start``.
"""

from __future__ import annotations

from collections import Counter

from flowrl.backend import Metrics
from flowrl.graph import EvaluateSpec
from flowrl.rows import Key

from .course import Course, Options
from .events import Block, Firing, Warn
from .orders import Orders
from .plan import Plan, Stage
from .progress import StepRows, parts
from .weights import Weights


class Evaluations:
    """All evaluations of a run."""

    def __init__(self, plan: Plan, options: Options, orders: Orders, weights: Weights, course: Course) -> None:
        self.plan = plan
        self.orders = orders
        self.weights = weights
        self.course = course
        self.stages = [stage for stage in plan.stages.values() if stage.action == "evaluate"]
        self._held = {stage.waits_for[0]: StepRows(0, plan) for stage in self.stages}
        """By prompts stage."""
        self._asked: dict[int, str] = {}
        """Firings that read held prompts."""
        self._complete: set[str] = set()
        start = options.first_step if options.first_step else -1
        self._newest = {stage.name: start for stage in self.stages}
        """Newest version that each was asked of."""
        self._running: Counter[str] = Counter()
        """Ranks that still evaluate."""

    # --- prompts

    def read_prompts(self) -> None:
        """Ask for the first step's prompts of each source, once."""
        for name in self._held if len(self._asked) < len(self._held) else ():
            worker = self.plan.pools[self.plan.stages[name].pool].workers[0]
            firing = self.orders.fire(worker, name, "prompts", 0)
            self._asked[firing.id] = name

    def holds(self, firing: Firing) -> bool:
        """Whether a firing reads held prompts."""
        return firing.id in self._asked

    def take_prompts(self, firing: Firing, block: Block) -> None:
        """Some prompts have come."""
        rows = self._held[firing.node]
        progress = rows.stages[firing.node]
        fresh = set(block.keys) - progress.done
        progress.done |= fresh
        if fresh:
            rows.place(firing.node, block, fresh)
        else:
            self.orders.free([block])

    def after_prompts(self, firing: Firing) -> None:
        """All have come; without any, there is nothing to evaluate on."""
        self._complete.add(firing.node)
        if not self._held[firing.node].blocks:
            self.stages = [stage for stage in self.stages if stage.waits_for[0] != firing.node]
            self.orders.commands.append(Warn(f"node '{firing.node}' has no prompts: nothing is evaluated on them"))

    def free(self) -> None:
        """The run is over."""
        self.orders.free(block for rows in self._held.values() for block in rows.blocks)

    # --- versions

    def go_on(self) -> None:
        """Evaluate what is due."""
        for stage in self.stages:
            if self._due(stage) and stage.waits_for[0] in self._complete:
                self._launch(stage)

    def after(self, firing: Firing) -> None:
        """A rank has ended its part."""
        self._running[firing.node] -= 1

    def busy_with(self, model: str) -> bool:
        """Whether a version of a model is being evaluated or still to be."""
        own = [stage for stage in self.stages if self.plan.model_of[stage.name] == model]
        return any(self._running[stage.name] or self._due(stage) for stage in own)

    def holds_open(self, step: int) -> bool:
        """Whether the line of a step still waits for an evaluation."""
        waited_for = [stage for stage in self.stages if self._line(self._version(stage)) == step]
        return any(self._running[stage.name] or self._due(stage) for stage in waited_for)

    def label(self, firing: Firing, metrics: Metrics) -> Metrics:
        """Metrics of an evaluation under the names that they have in the line of its step."""
        return metrics if firing.version else {f"{name}/start": value for name, value in metrics.items()}

    def _version(self, stage: Stage) -> int:
        return self.weights.versions.get(self.plan.model_of[stage.name], 0)

    def _line(self, version: int) -> int:
        return max(version - 1, 0)

    def _due(self, stage: Stage) -> bool:
        spec = self.plan.graph[stage.name].spec
        assert isinstance(spec, EvaluateSpec)
        version = self._version(stage)
        return version > self._newest[stage.name] and (version % spec.every == 0 or version == self.course.end)

    def _launch(self, stage: Stage) -> None:
        version = self._newest[stage.name] = self._version(stage)
        rows = self._held[stage.waits_for[0]]
        keys: list[Key] = sorted(rows.stages[stage.waits_for[0]].done)
        pool = self.plan.pools[stage.pool]
        for worker, mine in zip(pool.workers, parts(keys, pool.size), strict=True):
            if mine:
                self._running[stage.name] += 1
                inputs = rows.inputs(stage, set(mine))
                step = self._line(version)
                self.orders.fire(worker, stage.name, "evaluate", step, keys=mine, inputs=inputs, version=version)

"""Waves: how a step reads further prompts for the groups that a filter with ``refill=`` has dropped.

Dynamic sampling of DAPO (arXiv:2503.14476, section 3.2). A wave is one read of prompts for a step. Once the filter has
decided all groups of the waves so far, the step is closed to new prompts if it has its groups, if the waves or the data
are used up; else it reads as many further batches as are missing at least. What the first wave lets pass goes on at
once: it cannot be too much. What a later one lets pass is held until the whole wave is decided, and of it the first
groups in order of their keys go on. So what trains is a function of the keys, never of who was first.

Steps are decided in order, since the batches of a step depend on how many those before it took (cursor.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flowrl.backend import Sum
from flowrl.graph import PromptsSpec
from flowrl.refill import Refill
from flowrl.rows import Key

from .course import Course, Options, shown
from .cursor import Cursor
from .events import Warn
from .orders import Orders
from .plan import Plan
from .progress import StageProgress, StepRows
from .step_metrics import StepMetrics

TOO_MANY = "more than the batch needs"
"""Why a group is dropped that its filter would let pass."""


@dataclass(slots=True)
class _Filling:
    """How far a step is."""

    batches: tuple[int, ...] | None = None
    """What the wave that is being read brings; None between two."""
    used_up: bool = False
    """The source has no further prompts."""
    passed: int = 0
    """Groups that the filter lets pass, those beyond the need among them."""


@dataclass(slots=True)
class _Source:
    """Prompts that a filter asks for more of."""

    refill: Refill
    cursor: Cursor
    batch: int
    """Prompts of one batch."""
    steps: dict[int, _Filling] = field(default_factory=dict)
    """Those that are not closed to new prompts."""


class Waves:
    """Reads prompts of steps, those of a graph without refill once.

    Args:
        steps: the open ones, in order.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        orders: Orders,
        course: Course,
        steps: dict[int, StepRows],
        metrics: StepMetrics,
    ) -> None:
        self.orders = orders
        self.course = course
        self.steps = steps
        self.metrics = metrics
        self._sources: dict[str, _Source] = {}
        for refill in plan.refills.values():
            spec = plan.graph[refill.prompts].spec
            assert isinstance(spec, PromptsSpec)
            per_step = plan.prompts_per_step[refill.prompts] // spec.batch
            staleness, state = plan.staleness[refill.rollout], options.cursors.get(refill.prompts)
            cursor = Cursor(per_step, staleness, first_step=options.first_step, state=state)
            self._sources[refill.prompts] = _Source(refill, cursor, spec.batch)

    # --- reading

    def to_read(self, step: StepRows, prompts: str) -> dict[str, Any] | None:
        """What to ask a prompts stage for now: settings of its firing; None while an earlier step comes before it."""
        source = self._sources.get(prompts)
        if source is None:
            return {}
        filling = source.steps.setdefault(step.number, _Filling())
        if filling.batches is None:
            filling.batches = source.cursor.first(step.number)
        if filling.batches is None:
            return None
        known = sum(map(len, step.waves.get(prompts, ())))
        return {"batches": list(filling.batches), "first_prompt": known}

    def after_read(self, step: StepRows, prompts: str, more: bool) -> None:
        """A read has ended, and has brought `more` prompts or none."""
        source = self._sources.get(prompts)
        if source is None:
            step.close(prompts)
            return
        filling = source.steps[step.number]
        filling.batches = None
        filling.used_up = not more

    # --- filling a step

    def go_on(self) -> None:
        """Close steps whose groups are decided to new prompts, or let them read another wave."""
        for prompts, source in self._sources.items():
            while (step := self.steps.get(source.cursor.open)) and step.number < self.course.end:
                if not self._is_decided(step, source) or not self._fill(step, prompts, source):
                    break

    def states(self, version: int) -> dict[str, Any]:
        """By prompts stage: what a run that goes on at a version must know of its prompts."""
        return {prompts: source.cursor.state(version) for prompts, source in self._sources.items()}

    def forget(self, step: StepRows) -> None:
        """A step is over."""
        for source in self._sources.values():
            source.steps.pop(step.number, None)
            source.cursor.forget(step.number)

    def _is_decided(self, step: StepRows, source: _Source) -> bool:
        """Whether no read runs, and the filter has decided all groups that were read."""
        filling = source.steps.get(step.number)
        return filling is not None and filling.batches is None and step.stages[source.refill.filter].caught_up

    def _fill(self, step: StepRows, prompts: str, source: _Source) -> bool:
        """Let the groups of a wave pass that the step needs. True: it is closed to new prompts now."""
        refill, filling = source.refill, source.steps[step.number]
        waves, progress = step.waves[prompts], step.stages[refill.filter]
        kept = _prompts_of(progress.done)
        filling.passed = filling.passed + len(_prompts_of(progress.held)) if progress.holds else len(kept)
        missing = len(waves[0]) - len(kept)
        kept |= self._let_pass(step, progress, missing)
        missing = len(waves[0]) - len(kept)
        if missing and len(waves) < refill.waves and not filling.used_up:
            filling.batches = source.cursor.again(step.number, -(-missing // source.batch))
            progress.holds = True
            step.stages[prompts].fires_without = True
            return False
        self._close(step, prompts, source, kept)
        return True

    def _let_pass(self, step: StepRows, progress: StageProgress, count: int) -> set[Key]:
        """Of the groups that are held, the first `count` go on and the others are dropped."""
        ranked = sorted(_prompts_of(progress.held))
        chosen, name = set(ranked[:count]), progress.stage.name
        held, progress.held = progress.held, set()
        pass_on = {key for key in held if key.group in chosen}
        if pass_on:
            step.deliver(name, pass_on)
        if surplus := sorted(held - pass_on):
            self.orders.counts[name, "dropped"] += len(surplus)
            self.metrics.add(step.number, {"num_dropped": Sum(len(surplus), 1)})
            step.drop(name, surplus, TOO_MANY)
        return chosen

    def _close(self, step: StepRows, prompts: str, source: _Source, kept: set[Key]) -> None:
        filling, waves, refill = source.steps[step.number], step.waves[prompts], source.refill
        step.close(prompts, kept)
        source.cursor.close(step.number)
        groups = sum(map(len, waves))
        self.metrics.add(
            step.number,
            {
                "num_waves": Sum(len(waves), 1),
                "num_groups": Sum(len(kept), 1),
                "useful_groups": Sum(filling.passed, groups),
            },
        )
        if len(kept) < len(waves[0]) and refill.waves > 1:
            why = "the data has ended" if filling.used_up else f"refill={refill.waves}"
            passed = f"filter '{refill.filter}' lets pass {len(kept)} of {groups} groups"
            read = f"{len(waves)} wave{'s' * (len(waves) != 1)}"
            text = f"step {shown(step.number)}: {passed} in {read}, fewer than {len(waves[0])} ({why})"
            self.orders.commands.append(Warn(text))


def _prompts_of(rows: Iterable[Key]) -> set[Key]:
    return {key.group for key in rows}

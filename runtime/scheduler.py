"""The scheduler: a pure state machine, events in, commands out. No socket, no clock, no torch.

Invariants:

* A prompt of step s starts only if ``s <= version + staleness`` (`Ledger.admits`); prompts are read one step further
  ahead. So at most ``staleness + 2`` steps are in memory, whatever the speed of any node, each with the rows of as many
  waves as its filter may ask for: the bound of every queue.
* A row passes a stage once: what arrives again, or under an attempt that was given up, is ignored and counted.
* On one worker, firings run in the order of their commands; a worker holds at most `MAX_QUEUED` of them, as many passes
  of each update, and what all ranks of a mesh do together.
* Weights change only once nothing reads their version any more (`Dispatch`).
* At staleness 0 which rows share a firing of a model, on which rank and in which order, is a function of the keys.

A row moves like this: ``prompts`` produces its prompt, ``rollout`` takes it and produces samples (intake.py); where a
filter asks for further prompts, the step reads them until it has its groups (waves.py); each stage takes rows as
progress.py makes them ready (dispatch.py says when, and on which worker); ``backward`` passes add gradients and a
``step`` on all ranks publishes the version (updates.py), which weights.py brings to its readers; ``record`` writes the
row down. Then the step is closed (closing.py), and the next may be opened here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .adaptive import AdaptiveSettings
from .closing import Closing
from .course import Course, Options, shown
from .dispatch import Dispatch
from .evaluations import Evaluations
from .events import (
    MAKES_SAMPLES,
    NO_FIRING,
    Block,
    Command,
    Died,
    Event,
    Failed,
    Finished,
    Firing,
    Halt,
    Interrupted,
    Joined,
    Produced,
    Tick,
    Warn,
)
from .intake import Intake
from .ledger import Ledger, Totals
from .orders import MAX_ATTEMPTS, MAX_QUEUED, Lease, Orders, in_words
from .plan import Plan
from .progress import StageProgress, StepRows, by_reason
from .saves import Saves
from .step_metrics import StepMetrics
from .waves import Waves
from .weights import Weights

__all__ = ["MAX_ATTEMPTS", "MAX_QUEUED", "Options", "Scheduler"]


class Scheduler:
    """Drives one run of a plan.

    Use: send the commands of `on_events` for the events that have come, until a `Halt`; the first are `Joined`.
    """

    def __init__(self, plan: Plan, options: Options) -> None:
        self.plan = plan
        self.options = options
        self.ledgers = {name: Ledger(staleness) for name, staleness in plan.staleness.items()}
        self.steps: dict[int, StepRows] = {}
        """Open steps."""
        self.halted: Halt | None = None
        self._joined: set[str] = set()
        self._num_workers = len(plan.workers())
        self._max_staleness = max(plan.staleness.values(), default=0)
        self._course = course = Course.start(options)
        self._orders = Orders(plan, options.lease_s)
        self._weights = Weights(plan, options, self._orders, course)
        self._metrics = StepMetrics()
        self._waves = waves = Waves(plan, options, self._orders, course, self.steps, self._metrics)
        adaptive = AdaptiveSettings(plan, first_step=options.first_step, state=options.coefficients)
        self._saves = Saves(options, self._orders, self._weights, course, waves, adaptive)
        self._evaluations = Evaluations(plan, options, self._orders, self._weights, course)
        read = (self._weights, self._saves, self._evaluations, waves, adaptive, self._metrics)
        self._dispatch = Dispatch(plan, self._orders, self.ledgers, *read)
        self._intake = Intake(plan, self._orders, self.steps, self.ledgers, self._metrics)
        parts = (self._orders, course, self.steps, self.ledgers, self._metrics, self._evaluations, self._dispatch)
        self._closing = Closing(plan, *parts, waves)

    # --- the one verb, for one event and for several

    def on_event(self, event: Event) -> list[Command]:
        """Take one event; say what follows from it."""
        return self.on_events([event])

    def on_events(self, events: Iterable[Event]) -> list[Command]:
        """Take events that have come together; say what follows from all of them."""
        if self.halted:
            return []
        self._orders.commands = []
        for event in events:
            self._on_event(event)
            if self.halted:
                return self._orders.commands
        if len(self._joined) == self._num_workers:
            self._go_on()
        return self._orders.commands

    def _on_event(self, event: Event) -> None:
        match event:
            case Produced():
                self._on_produced(event)
            case Finished():
                self._on_finished(event)
            case Joined(worker):
                self._on_joined(worker)
            case Failed():
                self._on_failed(event)
            case Died(worker, reason):
                self._on_died(worker, reason)
            case Tick(now_s):
                self._on_tick(now_s)
            case Interrupted(signal):
                self._halt("interrupted", {"type": "Interrupted", "problem": signal})

    # --- what can be asked

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """By stage: rows that ``passed``, were ``dropped`` or ``repeated``; its ``firings`` and ``retries``."""
        return self._orders.counts

    @property
    def planned(self) -> Counter[str]:
        """Rows that stages are to handle, of the steps whose prompts are read."""
        return self._closing.planned

    @property
    def executed(self) -> Counter[str]:
        """Those that they have passed on, or that were dropped before or in them."""
        return self._closing.executed

    @property
    def last_step(self) -> int:
        """The step that the run ends before, as far as it is known."""
        return self._course.end

    def totals(self) -> dict[str, Totals]:
        """The ledger's sums of each rollout."""
        return {name: ledger.totals() for name, ledger in self.ledgers.items()}

    def version(self, space: str) -> int:
        """The version that decides admission to a rollout: that of the model which its samples train."""
        return self._weights.clock(space)

    def waiting(self) -> list[tuple[str, str, int]]:
        """Rows that wait, by (stage, reason)."""
        progresses = [progress for step in self.steps.values() for progress in step.stages.values()]
        return [(p.stage.name, self._why(p), len(p.ready)) for p in progresses if p.ready]

    def doing(self) -> dict[str, str]:
        """The node that each worker with work runs, or is about to."""
        leases = reversed(self._orders.leases.values())
        return {lease.worker: lease.firing.node for lease in leases}

    # --- events

    def _on_joined(self, worker: str) -> None:
        if worker not in self._joined:
            self._joined.add(worker)
            if len(self._joined) == self._num_workers:
                self._weights.load()

    def _on_produced(self, event: Produced) -> None:
        if event.block is not None and not self._orders.is_new(event.block):
            return
        lease = self._orders.answered(event.firing, event.attempt, event.worker)
        if lease is None:
            self._orders.free([event.block] if event.block else [])
            return
        if event.block is not None:
            self._take(lease, event.block)
        for reason, keys in by_reason(event.dropped).items():
            self._intake.drop(lease, keys, reason)

    def _take(self, lease: Lease, block: Block) -> None:
        firing = lease.firing
        if firing.action == "export":
            self._weights.take_export(firing, block)
        elif self._evaluations.holds(firing):
            self._evaluations.take_prompts(firing, block)
        else:
            self._intake.accept(lease, block)

    def _on_finished(self, event: Finished) -> None:
        lease = self._orders.answered(event.firing, event.attempt, event.worker)
        if lease is None:
            return
        firing = lease.firing
        if lease.missing:
            where = f"node '{firing.node}' ended step {shown(firing.step)} on worker '{event.worker}'"
            self._again(lease, f"{where} without saying what became of {lease.missing} rows", "ResultError")
            return
        self._orders.end(lease)
        if self._evaluations.holds(firing):
            self._evaluations.after_prompts(firing)
            return
        if firing.step in self.steps:
            metrics = self._evaluations.label(firing, event.metrics) if firing.action == "evaluate" else event.metrics
            self._metrics.add(firing.step, metrics, self.plan.prefixes.get(firing.node, ""))
            self._metrics.time(firing, event.worker, event.compute_s)
        self._after(firing, event)

    def _on_failed(self, event: Failed) -> None:
        lease = self._orders.answered(event.firing, event.attempt, event.worker)
        if lease is not None:
            self._halt("failed", {**event.error, "node": lease.firing.node, "worker": event.worker})
        elif event.firing == NO_FIRING:
            self._halt("failed", {"node": None, **event.error, "worker": event.worker})

    def _on_died(self, worker: str, reason: str) -> None:
        owed = self._orders.owed_by(worker)
        doing = f" while it owed {in_words(owed[0])}" if owed else ""
        error = {"type": "WorkerDied", "problem": f"worker '{worker}' died{doing}", "found": reason}
        self._halt("failed", {**error, "node": owed[0].node if owed else None, "worker": worker})

    def _on_tick(self, now_s: float) -> None:
        self._orders.now_s = now_s
        for lease, silent_s in self._orders.overdue():
            owes = f"the run waits for {in_words(lease.firing)}"
            problem = f"{owes}: no sign from worker '{lease.worker}' for {silent_s:.0f} s"
            if not self.halted:
                self._again(lease, problem, "DeadlineError")

    def _again(self, lease: Lease, problem: str, error: str) -> None:
        """Fire a lost firing again, or give up."""
        firing, version = lease.firing, lease.firing.version
        if firing.action == "rollout":
            stage = self.plan.stages[firing.node]
            if not self._weights.at_rest(stage):
                return  # a later tick finds it overdue still
            version = self._weights.served(stage)
        if self._orders.again(lease, problem, version):
            if firing.action in MAKES_SAMPLES:
                samples = self.steps[firing.step].samples(firing.node, firing.keys)
                age = self._weights.age(self.plan.stages[firing.node], firing.step)
                self.ledgers[firing.node].reissue(firing.step, list(samples), age)
            return
        lenders = sorted({f"'{each.worker}'" for each in firing.inputs if each.worker != lease.worker})
        reads = f"; it needs rows that lie with {', '.join(lenders)}" if lenders else ""
        parts = {"type": error, "problem": problem, "found": f"attempt {firing.attempt}{reads}"}
        self._halt("failed", {**parts, "node": firing.node, "worker": lease.worker})

    # --- what an ended firing leads to

    def _after(self, firing: Firing, event: Finished) -> None:
        match firing.action:
            case "export":
                self._weights.after_export(firing)
            case "import":
                self._weights.after_import(firing)
            case "save":
                self._saves.after_save()
            case "evaluate":
                self._evaluations.after(firing)
            case "load":
                pass
            case _:
                self._after_rows(self.steps[firing.step], firing, event)

    def _after_rows(self, step: StepRows, firing: Firing, event: Finished) -> None:
        progress = step.stages[firing.node]
        progress.running -= 1
        match firing.action:
            case "prompts":
                more = step.read(firing.node)
                self._closing.expect(more)
                if progress.known:
                    self._waves.after_read(step, firing.node, bool(more))
                elif step.number < self._course.end:  # the source is used up
                    self._course.end = step.number
                    ends = f"the data of node '{firing.node}' ends after step {step.number} of {self.options.num_steps}"
                    self._orders.commands.append(Warn(ends))
            case "rollout" | "function" | "filter" | "judge":
                if self.plan.graph[firing.node].kind == "metric":
                    step.deliver(firing.node, set(firing.keys))
                if error := self._intake.too_many_failures(progress, step.number):
                    self._halt("failed", error)
            case "backward":
                update, rank = self._dispatch.round_of(firing, event.worker)
                update.end_pass(rank, event.metrics)
            case "step":
                update, rank = self._dispatch.round_of(firing, event.worker)
                update.end_step(rank)
                if update.finished:
                    progress.pass_alive()
                    self._weights.publish(self.plan.model_of[firing.node], firing.version)
            case "record":
                progress.pass_alive()
            case _:
                pass

    # --- going on

    def _go_on(self) -> None:
        self._waves.go_on()
        self._closing.go_on()
        self._open()
        self._saves.go_on()
        self._weights.sync()
        self._evaluations.go_on()
        for number, step in self.steps.items():
            if number < self._course.end:
                self._dispatch.launch(step)
        if self._dispatch.stopped:
            self._halt("failed", self._dispatch.stopped)
        else:
            self._end()

    def _open(self) -> None:
        """Open the steps whose prompts may be read: one further than what rollouts may start."""
        course = self._course
        self._evaluations.read_prompts()
        ahead = course.closed + self._max_staleness + 1
        while course.opened <= ahead and course.opened < course.end:
            self.steps[course.opened] = StepRows(course.opened, self.plan)
            course.opened += 1

    def _end(self) -> None:
        over = self._course.closed >= self._course.end and not self.steps and not self._orders.leases
        if over and self._saves.unpublished is None:
            self._evaluations.free()
            self._halt("done", None)

    def _halt(self, outcome: Any, error: dict[str, Any] | None) -> None:
        self.halted = Halt(outcome, error)
        self._orders.commands.append(self.halted)

    def _why(self, progress: StageProgress) -> str:
        stage = progress.stage
        behind = stage.name in self.plan.behind(stage.space)
        if not progress.closed and (stage.per == "batch" or (behind and stage.action in ("forward", "backward"))):
            return "their step may read further prompts"
        if stage.action == "backward":
            return f"version {self._weights.versions[self.plan.model_of[stage.name]]}, or the rest of their passes"
        if stage.per != "row":
            return f"their {stage.per} is incomplete"
        return f"pool '{stage.pool}' is busy"

"""One run: the scheduler, a launcher and a console, wired together.

The loop is all there is: events from the launcher go into the scheduler, its commands go to the launcher, and what a
step comes to goes to the run folder and the console. Nothing is decided here but when to stop waiting.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import flowrl.errors
from flowrl.errors import ConfigError, FlowrlError, NodeError, RunError
from flowrl.graph import Graph
from flowrl.rates import bound_texts, bounds

from .checkpoint import Checkpoint, publish, recipe, sweep
from .events import Command, Event, Finished, Fire, Free, Halt, Saved, Send, StepDone, Tick, Warn
from .launch.inline import InlineLauncher
from .launch.launcher import Launch, Launcher
from .launch.local import LocalLauncher
from .plan import Plan, compile_plan
from .ranks import devices, num_threads
from .report import Console, EdgeStatus, MeshStatus, Summary
from .resuming import find_checkpoint, tell_changes, tell_nothing_is_left
from .rundir import RunDir, open_run_dir
from .scheduler import Options, Scheduler
from .signals import Terminated

LAUNCHERS: dict[str, Callable[[Launch], Launcher]] = {"inline": InlineLauncher, "local": LocalLauncher}
POLL_S = 0.5
"""Longest wait for an event: how often leases and the live view are looked at."""
REWARD_WEIGHT = 0.2
"""Of a step in the moving average that the end report shows."""
log = logging.getLogger("flowrl.run")
logging.getLogger("flowrl").addHandler(logging.NullHandler())  # what is told the console is not printed twice


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a graph is run."""

    num_steps: int
    """Steps of the whole run, those of a resumed one's first part included."""
    launcher: Literal["inline", "local"] = "local"
    run_dir: Path | None = None
    """Where the run writes; None writes nothing."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder."""
    save_every: int | None = None
    """Steps between two checkpoints; the last step is saved too. None saves the last step only."""
    lease_s: float = 600.0
    """Longest that a worker may go without a sign of progress."""
    command: tuple[str, ...] = ()
    """The command line, for the record."""
    graph_spec: str | None = None
    """``file.py:name``, for worker processes."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Graph parameters that differ from their defaults, as plain data."""

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", self.num_steps),
            ("save_every", 1 if self.save_every is None else self.save_every),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                what = "a run has one step or more" if name == "steps" else "save_every counts steps"
                raise ConfigError(what, found=f"{name}={value!r}", wanted="an integer >= 1", fix=f"{name}=N")


def run(graph: Graph, options: RunOptions, console: Console) -> Summary:
    """Run a checked graph to its end.

    Raises:
        RunError: the run failed; its last checkpoint and all that it wrote stay.
        KeyboardInterrupt, Terminated: it was interrupted; no worker is left.
    """
    plan = compile_plan(graph)
    output: SimpleQueue[tuple[str, str]] = SimpleQueue()
    folder = open_run_dir(options.run_dir, resume=options.resume) if options.run_dir else None
    try:
        found = find_checkpoint(folder, graph, _seed(graph), console) if folder and options.resume else None
        first = found.version if found else 0
        if folder and first >= options.num_steps:
            return tell_nothing_is_left(folder, graph, options.num_steps, first, console)
        if folder:
            tell_changes(folder.earlier_graph(), graph, console)
            sweep(folder.path)
            folder.rewind(first + 1)
            folder.describe_run(graph, command=list(options.command), seed=_seed(graph), bounds=bound_texts(graph))
        launch = Launch(
            plan=plan,
            seed=_seed(graph),
            devices=devices(plan, _num_gpus()),
            threads=num_threads(plan),
            samples=folder.path / "samples.jsonl" if folder else None,
            graph_spec=options.graph_spec,
            overrides=options.overrides,
            on_output=lambda worker, line: output.put((worker, line)),
        )
        scheduler = Scheduler(plan, _scheduler_options(options, folder, first, found))
        this = _Run(plan, scheduler, LAUNCHERS[options.launcher](launch), console, folder, graph, output)
        console.start(graph, options.num_steps, options.run_dir, first_step=first)
        return this.to_the_end()
    finally:
        if folder:
            folder.close()


class _Run:
    """The loop of one run."""

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        launcher: Launcher,
        console: Console,
        folder: RunDir | None,
        graph: Graph,
        output: SimpleQueue[tuple[str, str]],
    ) -> None:
        self.plan = plan
        self.output = output
        """Lines that workers have printed, with the worker's name."""
        self.scheduler = scheduler
        self.launcher = launcher
        self.console = console
        self.folder = folder
        self.graph = graph
        self.steps = 0
        self._begun = time.monotonic()
        self._last: float | None = None
        """When the step at hand began."""
        self._shown = self._looked = self._begun
        self._clock_s = 0.0
        """Seconds that this process was there to hear from workers: not those in which it was stopped."""
        self._busy: dict[str, float] = {}
        """Seconds that each worker has computed since the last look."""
        self._bounds = bounds(graph).edges
        self._reward: tuple[float, float] | None = None
        self._saved = scheduler.options.first_step
        """The newest version that a checkpoint holds; 0 is none."""

    def to_the_end(self) -> Summary:
        """Run until the scheduler halts, or the user does not want it any longer."""
        outcome = "failed"
        try:
            halt = self._loop()
            if halt.outcome == "failed":
                raise _error(halt)
            outcome = halt.outcome
        except (KeyboardInterrupt, Terminated):
            outcome = "interrupted"
            raise
        finally:
            self.launcher.stop(gently=outcome == "done")
            if self.folder:
                sweep(self.folder.path)
            self._tell_output()
            if self.folder and outcome != "done":
                self.console.say(_way_on(self._saved))
            summary = self._summary(outcome)
            self.console.stop(summary)
        if summary.problems:
            raise RunError("the run's numbers do not add up: " + "; ".join(summary.problems))
        return summary

    def _loop(self) -> Halt:
        self.launcher.start()
        while True:
            events: list[Event] = self.launcher.poll(POLL_S)
            now = time.monotonic()
            self._clock_s += min(now - self._looked, 2 * POLL_S)
            self._looked = now
            for event in events:
                if isinstance(event, Finished):
                    self._busy[event.worker] = self._busy.get(event.worker, 0.0) + event.compute_s
            self._tell_output()
            if not events or now - self._shown > POLL_S:
                events.append(Tick(self._clock_s))
                self._show()
            if halt := self._obey(self.scheduler.on_events(events)):
                return halt

    def _tell_output(self) -> None:
        while not self.output.empty():
            worker, line = self.output.get()
            log.info("[%s] %s", worker, line)
            self.console.say(f"[{worker}] {line}")

    def _obey(self, commands: list[Command]) -> Halt | None:
        """Carry out what the scheduler wants: what workers wait for goes first."""
        told: list[Command] = []
        for command in commands:
            if isinstance(command, (Fire, Send, Free)):
                if self._last is None:
                    self._last = time.monotonic()  # the first step begins when all have joined
                self.launcher.send(command)
            else:
                told.append(command)
        for command in told:
            match command:
                case StepDone(step, metrics):
                    self._step_done(step, metrics)
                case Saved():
                    self._publish(command)
                case Warn(text):
                    self._warn(text)
                case Halt():
                    return command
        return None

    def _step_done(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        seconds, self._last = now - (self._last or self._begun), now
        self.steps += 1
        if (reward := metrics.get("reward")) is not None:
            at_first, average = self._reward or (reward, reward)
            self._reward = at_first, average + REWARD_WEIGHT * (reward - average)
        tokens = metrics.get("response_tokens", 0.0)
        first = {"step": step + 1, "version": step + 1, "reward": metrics.get("reward"), "loss": metrics.get("loss")}
        record = {
            **first,
            "kl": metrics.get("kl"),
            "lag": metrics.get("lag", 0),
            "tokens_per_s": tokens / max(seconds, 1e-9),
        }
        record |= {"time_s": seconds, **{name: value for name, value in metrics.items() if name not in record}}
        if self.folder:
            self.folder.metrics.write(record)
        self.console.step(record)

    def _publish(self, saved: Saved) -> None:
        if self.folder:
            told = recipe(self.graph, _seed(self.graph))
            checkpoint = Checkpoint(
                version=saved.version, recipe=told, cursors=saved.cursors, coefficients=saved.coefficients
            )
            log.info("saved version %d in %s", saved.version, publish(self.folder.path, checkpoint))
            self._saved = saved.version

    def _warn(self, text: str) -> None:
        log.warning(text)
        self.console.warn(text)

    def _show(self) -> None:
        now = time.monotonic()
        seconds, self._shown = now - self._shown, now
        doing, busy, self._busy = self.scheduler.doing(), self._busy, {}
        self.console.status(
            [self._edge(*waiting) for waiting in self.scheduler.waiting()],
            [
                MeshStatus(
                    name=pool.name,
                    busy=min(1.0, sum(busy.get(worker, 0.0) for worker in pool.workers) / (pool.size * seconds)),
                    doing=", ".join(dict.fromkeys(doing[worker] for worker in pool.workers if worker in doing)),
                )
                for pool in self.plan.pools.values()
            ],
        )

    def _edge(self, stage: str, reason: str, rows: int) -> EdgeStatus:
        """Rows that wait before a stage, on the edge that bounds them."""
        sources = self.plan.stages[stage].waits_for
        source = next((name for name in sources if (name, stage) in self._bounds), ", ".join(sources))
        bound = self._bounds.get((source, stage))
        return EdgeStatus(source=source, target=stage, rows=rows, bound=bound.rows if bound else None, reason=reason)

    def _summary(self, outcome: str) -> Summary:
        totals = self.scheduler.totals().values()
        dropped: dict[str, int] = {}
        for each in totals:
            for reason, count in each.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        return Summary(
            outcome=outcome,
            steps=self.steps,
            wall_s=time.monotonic() - self._begun,
            planned=self.scheduler.planned,
            executed=self.scheduler.executed,
            issued=sum(each.issued for each in totals),
            consumed=sum(each.consumed for each in totals),
            dropped=dropped,
            in_flight=sum(each.open for each in totals),
            reward=self._reward,
            written=self.folder.written() if self.folder else {},
        )


def _scheduler_options(options: RunOptions, folder: RunDir | None, first: int, found: Any) -> Options:
    return Options(
        num_steps=options.num_steps,
        first_step=first,
        load_from=str(found.path) if found else None,
        cursors=found.cursors if found else {},
        coefficients=found.coefficients if found else {},
        save_every=(options.save_every or options.num_steps) if folder else None,
        save_to=str(folder.path / "checkpoints") if folder else "",
        # Inline nothing is lost, and while one worker computes the others cannot give a sign.
        lease_s=math.inf if options.launcher == "inline" else options.lease_s,
    )


def _error(halt: Halt) -> FlowrlError:
    """The exception that a worker, or the scheduler, told of."""
    told = halt.error or {}
    parts = {name: told.get(name) for name in ("node", "found", "wanted", "fix")}
    named = f"'{told.get('worker')}'"
    worker = f" (worker {named})" if told.get("worker") and named not in str(told.get("problem")) else ""
    at = f"{told['at']}: " if told.get("at") else ""
    problem = f"{at}{told.get('problem', 'the run failed')}{worker}"
    if told.get("node") and f"'{told['node']}'" not in problem:
        problem = f"{at}node '{told['node']}' failed{worker}: {told.get('problem')}"
    kind = getattr(flowrl.errors, str(told.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, FlowrlError) and not issubclass(kind, NodeError):
        return kind(problem, **parts)
    return NodeError(problem, traceback=told.get("traceback", ""), **parts)


def _way_on(saved: int) -> str:
    """How a run that has not come to its end goes on."""
    if saved:
        return f"step {saved} is saved: the same command with --resume goes on from there"
    return "nothing is saved to go on from: --save-every N keeps checkpoints"


def _seed(graph: Graph) -> int:
    """The run's seed: the graph's parameter ``seed``, or 0 where it has none.

    Raises:
        ConfigError: it is no whole number.
    """
    seed = graph.parameters.get("seed")
    if seed is None:
        return 0
    if isinstance(seed, bool) or not isinstance(seed, int):
        fix = "seed: int = 0 among the graph's parameters, or another name for what it means there"
        raise ConfigError("the seed of a run is no number", found=f"seed={seed!r}", wanted="an integer", fix=fix)
    return seed


def _num_gpus() -> int:
    from flowrl.placement import visible_gpus

    return visible_gpus()

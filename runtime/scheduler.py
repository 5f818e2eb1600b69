"""The scheduler: a pure state machine, events in, commands out. No socket, no clock, no torch.

Invariants:

* A prompt of step s starts only if ``s <= version + staleness`` (`Ledger.admits`); prompts are read one step further ahead.
  So at most ``staleness + 2`` steps are in memory, whatever the speed of any node: that is the bound of every queue.
* A row passes a stage once: what arrives again, or under an attempt that was given up, is ignored and counted.
* On one worker, firings run in the order of their commands; a worker holds at most `MAX_QUEUED` of them.
* At staleness 0 which rows share a firing of a model, on which rank and in which order, is a function of the keys.

A row moves like this: ``prompts`` produces its prompt; ``rollout`` takes the prompt and produces samples; each stage that waits
for them takes rows as `StepRows` makes them ready; ``backward`` passes add gradients, a ``step`` on all ranks publishes the
version; ``record`` writes the row down; then the step is closed, its blocks are freed and the next may be admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from flowrl.backend import Sum
from flowrl.graph import EvaluateSpec, UpdateSpec
from flowrl.rows import Key

from .events import (
    Action,
    Block,
    Command,
    Died,
    Event,
    Failed,
    Finished,
    Fire,
    Firing,
    Free,
    Halt,
    Input,
    Interrupted,
    Joined,
    Produced,
    Saved,
    Send,
    StepDone,
    Tick,
    Warn,
)
from .ledger import Ledger, Totals
from .plan import Plan, Stage
from .progress import StageProgress, StepRows
from .runstate import Lease, RunState
from .updates import UpdateRound

MAX_QUEUED = 2
"""Firings on one worker: one runs and one waits, which hides the way there; more would be decided too early."""
MAX_ATTEMPTS = 3
RETRIABLE: frozenset[Action] = frozenset({"prompts", "rollout", "forward", "function", "filter", "evaluate"})
"""Actions that change nothing but their output, so that a lost one can be fired again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How long, from where, and how patiently."""

    num_steps: int
    """Steps of the whole run, those before `first_step` included."""
    first_step: int = 0
    """Version that the run starts from: 0, or a checkpoint's."""
    load_from: str | None = None
    """Folder of the checkpoint to start from."""
    save_every: int | None = None
    """Versions between two checkpoints; the last version is always saved. None saves none."""
    save_to: str = ""
    """Folder of the checkpoints."""
    lease_s: float = 600.0
    """Longest that a worker with work may go without a sign of progress."""


class Scheduler:
    """Drives one run of a plan.

    Use: send `start`'s commands, then those of `on_event` for each event, until a `Halt`.
    """

    def __init__(self, plan: Plan, options: Options) -> None:
        self.plan = plan
        self.options = options
        self.last_step = options.num_steps
        self.ledgers = {name: Ledger(staleness) for name, staleness in plan.staleness.items()}
        self.steps: dict[int, StepRows] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """Rows by (stage, outcome): ``taken``, ``passed``, ``dropped``; firings by (stage, ``firings``)."""
        self.halted: Halt | None = None
        self._state = RunState(plan, options)
        self._out: list[Command] = []

    # --- the two verbs

    def start(self) -> list[Command]:
        """What to do once workers have been started: wait for them."""
        return []

    def on_event(self, event: Event) -> list[Command]:
        """Take one event; say what follows from it."""
        if self.halted:
            return []
        self._out = []
        match event:
            case Joined(worker):
                self._on_joined(worker)
            case Produced():
                self._on_produced(event)
            case Finished():
                self._on_finished(event)
            case Failed():
                self._on_failed(event)
            case Died(worker, reason):
                self._halt("failed", _died(worker, reason, self._state.leases.values()))
            case Tick(now_s):
                self._on_tick(now_s)
            case Interrupted(signal):
                self._halt("interrupted", {"type": "Interrupted", "problem": signal})
        if not self.halted and self._state.ready:
            self._dispatch()
        return self._out

    # --- what can be asked

    def totals(self) -> dict[str, Totals]:
        """The ledger's sums of each rollout."""
        return {name: ledger.totals() for name, ledger in self.ledgers.items()}

    def version(self, space: str) -> int:
        """The version that decides admission to a rollout: that of the model which its samples train."""
        return self._state.clock(space)

    def waiting(self) -> list[tuple[str, str, int]]:
        """Rows that wait, by (stage, reason)."""
        found = []
        for step in self.steps.values():
            for name, progress in step.stages.items():
                if progress.ready:
                    found.append((name, self._why(progress.stage), len(progress.ready)))
        return found

    def queued(self) -> dict[str, int]:
        """Firings that each worker owes."""
        return Counter(lease.worker for lease in self._state.leases.values())

    # --- events

    def _on_joined(self, worker: str) -> None:
        state = self._state
        state.joined.add(worker)
        if len(state.joined) < len(self.plan.workers()) or state.ready:
            return
        state.ready = True
        if self.options.load_from:
            for pool in dict.fromkeys(state.home.values()):
                settings = {"folder": self.options.load_from, "models": self._trained_on(pool)}
                self._gang(pool, "load", settings, version=self.options.first_step)

    def _on_produced(self, event: Produced) -> None:
        lease = self._lease(event.firing, event.attempt, event.block)
        if lease is None:
            return
        firing = lease.firing
        self._state.progressed(event.worker)
        if firing.action == "export":
            assert event.block is not None
            self._state.exported[firing.node] = event.block
        elif firing.node in self._state.held:
            self._state.held[firing.node] += [event.block] if event.block else []
        elif firing.step in self.steps:
            step = self.steps[firing.step]
            if event.block is not None:
                self._accept(step, firing, event.block)
            for reason, keys in _by_reason(event.dropped).items():
                self._drop(step, firing.node, keys, reason)

    def _on_finished(self, event: Finished) -> None:
        lease = self._lease(event.firing, event.attempt, None)
        if lease is None:
            return
        firing = self._state.end_lease(event.firing).firing
        self._state.progressed(event.worker)
        if firing.step in self.steps:
            self._state.note(firing, event)
            self.steps[firing.step].stages[firing.node].running -= 1
        self._after(firing, event)

    def _on_failed(self, event: Failed) -> None:
        lease = self._lease(event.firing, event.attempt, None)
        if lease is not None:
            self._halt("failed", {**event.error, "node": lease.firing.node, "worker": event.worker})

    def _on_tick(self, now_s: float) -> None:
        state = self._state
        state.now_s = now_s
        for lease in list(state.leases.values()):
            silent = now_s - max(lease.since_s, state.last_progress.get(lease.worker, 0.0))
            if silent > self.options.lease_s:
                self._expire(lease, silent)

    # --- what an ended firing leads to

    def _after(self, firing: Firing, event: Finished) -> None:
        match firing.action:
            case "prompts":
                if firing.node not in self._state.held and not self.steps[firing.step].stages[firing.node].done:
                    self.last_step = min(self.last_step, firing.step)  # the source is exhausted
            case "backward":
                self._state.rounds[firing.node, firing.step].end_pass(event.metrics)
            case "step":
                self._after_step(firing)
            case "record":
                record = self.steps[firing.step].stages[firing.node]
                record.done.update(record.expected)
            case "export":
                self._import(firing)
            case "import":
                if self._state.end_import(firing):
                    block = self._state.exported.pop(firing.node)
                    self._out.append(Free(block.worker, (block.number,)))
            case "save":
                self._state.saving -= 1
            case _:
                pass

    def _expect(self, step: StepRows, prompts: str, keys: Collection[Key]) -> None:
        """A step's prompts are known, and with them the keys of all its samples."""
        step.stages[prompts].expect(keys)
        for rollout, n in self.plan.samples_per_prompt.items():
            if prompts in self.plan.stages[rollout].waits_for:
                samples = [Key(key.step, key.prompt, sample) for key in sorted(keys) for sample in range(n)]
                for progress in step.stages.values():
                    if progress.stage.space == rollout:
                        progress.expect(samples)

    def _after_step(self, firing: Firing) -> None:
        update = self._state.rounds[firing.node, firing.step]
        update.end_step()
        if not update.finished:
            return
        progress = self.steps[firing.step].stages[firing.node]
        progress.done.update(progress.taken)
        model = self._state.model_of(firing.node)
        self._state.versions[model] = firing.step + 1
        for node in self.plan.graph.nodes.values():
            spec = node.spec
            if isinstance(spec, EvaluateSpec) and node.model and node.model.name == model:
                self._state.evaluate(node.name, firing.step + 1, spec.every)

    # --- rows

    def _accept(self, step: StepRows, firing: Firing, block: Block) -> None:
        """Rows of a block that are new pass on; a second answer changes nothing."""
        progress = step.stages[firing.node]
        if firing.action == "prompts":
            self._expect(step, firing.node, block.keys)
        if firing.action == "rollout":
            fresh = self.ledgers[firing.node].produce(step.number, block.keys)
        else:
            fresh = [key for key in block.keys if key not in progress.done and key not in progress.dead]
        self.counts[firing.node, "repeated"] += len(block.keys) - len(fresh)
        if not fresh:
            self._out.append(Free(block.worker, (block.number,)))
            return
        self.counts[firing.node, "passed"] += len(fresh)
        step.place(firing.node, block, fresh)
        step.deliver(firing.node, fresh)

    def _drop(self, step: StepRows, node: str, keys: Collection[Key], reason: str) -> None:
        progress = step.stages[node]
        new = [key for key in keys if key not in progress.dead and key not in progress.done]
        self.counts[node, "dropped"] += len(new)
        self._state.metric(step.number, "num_dropped", Sum(len(new), 1))
        step.drop(node, new, reason)

    # --- what can be fired now

    def _dispatch(self) -> None:
        self._admit()
        self._save()
        self._sync()
        self._evaluate()
        for number in sorted(self.steps):
            step = self.steps[number]
            for stage in self._state.downstream_first:
                self._launch(step, stage)
        self._close()
        self._end()

    def _admit(self) -> None:
        """Open the steps whose prompts may be read: one further than what rollouts may start."""
        for name in self._state.held:
            if name not in self._state.held_fired:
                self._state.held_fired.add(name)
                self._fire(self._worker_of(self.plan.stages[name]), self.plan.stages[name], "prompts", 0, ())
        ahead = min(
            (self.version(space) + ledger.staleness + 1 for space, ledger in self.ledgers.items()),
            default=self._state.closed + 1,
        )
        while self._state.next_step <= ahead and self._state.next_step < self.last_step:
            self.steps[self._state.next_step] = StepRows(self._state.next_step, self.plan)
            self._state.next_step += 1

    def _launch(self, step: StepRows, stage: Stage) -> None:
        progress = step.stages[stage.name]
        match stage.action:
            case "prompts":
                if not progress.taken and stage.name not in self._state.held and self._free(stage.pool):
                    progress.taken.add(Key(step.number, -1))
                    self._fire(self._free(stage.pool)[0], stage, "prompts", step.number, ())
            case "rollout":
                self._launch_rollout(step, progress)
            case "forward":
                self._launch_forward(step, progress)
            case "function" | "filter":
                self._launch_function(step, progress)
            case "backward":
                self._launch_update(step, progress)
            case "record":
                self._launch_record(step, progress)
            case _:
                pass

    def _launch_rollout(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        if not progress.ready or not self._may_sample(stage, step.number):
            return
        pool = self.plan.pools[stage.pool]
        num_prompts = len(progress.ready) + len(progress.taken)
        for rank, worker in enumerate(pool.workers):
            mine = sorted(key for key in progress.ready if pool.rank_of(key.prompt, num_prompts) == rank)
            if not mine or self._load(worker) >= MAX_QUEUED:
                continue
            progress.take(mine)
            version = self._state.served(stage)
            n = self.plan.samples_per_prompt[stage.name]
            samples = [Key(key.step, key.prompt, sample) for key in mine for sample in range(n)]
            self.ledgers[stage.name].issue(step.number, samples, version)
            self._fire(worker, stage, "rollout", step.number, mine, version=version)

    def _may_sample(self, stage: Stage, step: int) -> bool:
        """Admission: both the trainer's version and the one that the rollout's ranks hold are new enough."""
        ledger = self.ledgers[stage.name]
        return ledger.admits(step, self.version(stage.name)) and step <= self._state.served(stage) + ledger.staleness

    def _launch_forward(self, step: StepRows, progress: StageProgress) -> None:
        stage, pool = progress.stage, self.plan.pools[progress.stage.pool]
        if not progress.ready:
            return
        num_prompts = len(progress.group_sizes)
        for rank, worker in enumerate(pool.workers):
            share = [key for key in progress.expected if pool.rank_of(key.prompt, num_prompts) == rank]
            ready = sorted(key for key in share if key in progress.ready)
            if ready and progress.settled(share) and self._load(worker) < MAX_QUEUED:
                progress.take(ready)
                self._fire(worker, stage, "forward", step.number, ready)

    def _launch_function(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        keys = self._takeable(progress)
        if not keys:
            return
        free = self._free(stage.pool)
        for index, worker in enumerate(free):
            part = keys[index * len(keys) // len(free) : (index + 1) * len(keys) // len(free)]
            if stage.per != "row":
                part = [] if index else keys
            if part:
                progress.take(part)
                self._fire(worker, stage, stage.action, step.number, part)

    def _takeable(self, progress: StageProgress) -> list[Key]:
        match progress.stage.per:
            case "row":
                return sorted(progress.ready)
            case "group":
                return progress.complete_groups()
            case "batch":
                return sorted(progress.ready) if progress.expected and progress.complete else []

    def _launch_update(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        if not progress.expected:
            return
        model = self._state.model_of(stage.name)
        version = self._state.versions[model]
        if version != step.number or self._state.save_due(version):
            return  # an earlier step trains first, and a checkpoint is taken between two versions
        pool = self.plan.pools[stage.pool]
        update = self._round(stage, step, progress)
        for each in update.passes():
            progress.take(each.keys)
            worker = pool.workers[each.rank]
            self._fire(worker, stage, "backward", step.number, each.keys, version=step.number)
        if update.step_due():
            sums = update.sums()
            denominator = self.plan.loss(stage.name).denominator(sums["tokens"], sums["rows"])
            if not denominator:
                self._out.append(Warn(f"step {step.number}: node '{stage.name}' has nothing to train: {self._reasons(progress)}"))
            settings: dict[str, Any] = {"denominator": denominator, "publish": update.last_step}
            update.begin_step()
            self._gang(stage.pool, "step", settings, stage=stage, step=step.number, version=step.number + 1)

    def _round(self, stage: Stage, step: StepRows, progress: StageProgress) -> UpdateRound:
        found = self._state.rounds.get((stage.name, step.number))
        if found is None:
            spec = self.plan.graph[stage.name].spec
            assert isinstance(spec, UpdateSpec)
            found = UpdateRound(
                spec, progress, self.plan.pools[stage.pool].size, lambda keys: step.lengths(stage.space, keys)
            )
            self._state.rounds[stage.name, step.number] = found
        return found

    def _launch_record(self, step: StepRows, progress: StageProgress) -> None:
        if not progress.expected or progress.taken or not progress.complete or not self._free(progress.stage.pool):
            return
        keys = sorted(progress.expected)
        dropped = {str(row): progress.dead[key] for row, key in enumerate(keys) if key in progress.dead}
        progress.take(keys)
        worker = self._free(progress.stage.pool)[0]
        self._fire(worker, progress.stage, "record", step.number, keys, settings={"dropped": dropped})

    # --- versions

    def _sync(self) -> None:
        """Bring a new version to rollouts on meshes of their own."""
        for (model, pool), version in self._state.replicas.items():
            key = f"{model}>{pool}"
            current = self._state.versions[model]
            if version < current and key not in self._state.importing:
                self._state.importing[key] = 0
                trainer = self.plan.pools[self._state.home[model]].workers[0]
                self._fire_plain(trainer, key, "export", settings={"model": model}, version=current)

    def _import(self, export: Firing) -> None:
        block = self._state.exported[export.node]
        model, pool = export.node.split(">")
        workers = self.plan.pools[pool].workers
        self._state.importing[export.node] = len(workers)
        for worker in workers:
            self._fire_plain(
                worker, export.node, "import", settings={"model": model}, version=export.version, tensors=block
            )

    def _evaluate(self) -> None:
        for name, version in list(self._state.to_evaluate.items()):
            stage = self.plan.stages[name]
            blocks = self._state.held[stage.waits_for[0]]
            if not blocks:
                continue
            del self._state.to_evaluate[name]
            keys = sorted(key for block in blocks for key in block.keys)
            held = StepRows(0, self.plan)
            for block in blocks:
                held.place(stage.waits_for[0], block, block.keys)
            pool = self.plan.pools[stage.pool]
            for rank, worker in enumerate(pool.workers):
                mine = [key for key in keys if pool.rank_of(key.prompt, len(keys)) == rank]
                if mine:
                    inputs = held.inputs(stage, mine)
                    self._fire(worker, stage, "evaluate", version - 1, mine, version=version, inputs=inputs)

    # --- steps end, the run ends

    def _close(self) -> None:
        """Close steps in order, once nothing of them runs."""
        while self._state.closed in self.steps:
            step = self.steps[self._state.closed]
            exhausted = step.number >= self.last_step
            if self._is_owed(step) or not (exhausted or self._is_over(step)):
                return
            del self.steps[step.number]
            self._state.closed += 1
            for worker, numbers in _by_worker(step.blocks).items():
                self._out.append(Free(worker, numbers))
            if not exhausted:
                self._settle(step)
                self._out.append(StepDone(step.number, self._state.close(step.number)))

    def _is_owed(self, step: StepRows) -> bool:
        """Whether a worker still owes a firing of this step."""
        leases = self._state.leases.values()
        return any(lease.firing.step == step.number and lease.firing.node in step.stages for lease in leases)

    def _is_over(self, step: StepRows) -> bool:
        """Whether every row of this step is passed on or dropped at every stage."""
        if any(version - 1 == step.number for version in self._state.to_evaluate.values()):
            return False
        for name, progress in step.stages.items():
            action = progress.stage.action
            if action == "evaluate" or name in self._state.held:
                continue
            if action == "backward":
                update = self._state.rounds.get((name, step.number))
                if update is None or not update.finished:
                    return False
            elif not progress.expected or not progress.finished:
                return False
        return True

    def _settle(self, step: StepRows) -> None:
        """Enter into the ledger what became of each row."""
        for space, ledger in self.ledgers.items():
            terminals = [p for p in step.stages.values() if p.stage.space == space and p.stage.terminal]
            rows = step.stages[space].done | {key for t in terminals for key in t.dead}
            consumed = [key for key in rows if any(key in t.done and key not in t.dead for t in terminals)]
            taken = set(consumed)
            reasons = {key: reason for t in terminals for key, reason in t.dead.items() if key not in taken}
            lags = ledger.lag(step.number, consumed, step.number)
            if lags:
                self._state.metric(step.number, "lag", Sum(sum(lags), len(lags)))
            ledger.consume(step.number, consumed, step.number)
            for reason, keys in _by_reason(reasons).items():
                ledger.drop(step.number, keys, reason)
            ledger.close(step.number)

    def _save(self) -> None:
        """Write a checkpoint between two versions; publish it once the steps before it are closed."""
        state = self._state
        if state.unpublished is not None:
            if not state.saving and state.closed >= state.unpublished:
                self._out.append(Saved(state.unpublished))
                state.unpublished = None
            return
        versions = set(state.versions.values())
        if len(versions) == 1 and state.save_due(version := versions.pop()):
            state.saved = state.unpublished = version
            for pool in dict.fromkeys(state.home.values()):
                settings = {"folder": self.options.save_to, "models": self._trained_on(pool)}
                state.saving += self._gang(pool, "save", settings, version=version)

    def _trained_on(self, pool: str) -> list[str]:
        return [model for model, home in self._state.home.items() if home == pool]

    def _end(self) -> None:
        state = self._state
        over = state.closed >= self.last_step and not state.leases and not state.to_evaluate
        if over:
            self._save()
        if over and state.unpublished is None:
            self._halt("done", None)

    def _halt(self, outcome: Any, error: dict[str, Any] | None) -> None:
        self.halted = Halt(outcome, error)
        self._out.append(self.halted)

    # --- firing

    def _fire(
        self,
        worker: str,
        stage: Stage,
        action: Action,
        step: int,
        keys: Collection[Key],
        *,
        version: int = 0,
        inputs: Any = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        rows = self.steps.get(step)
        if inputs is None:
            inputs = rows.inputs(stage, keys) if rows and keys else ()
        firing = Firing(
            self._state.next_id(), stage.name, action, step, 1, tuple(keys), inputs, version, settings or {}
        )
        if rows:
            rows.stages[stage.name].running += 1
        self.counts[stage.name, "firings"] += 1
        self.counts[stage.name, "taken"] += len(keys)
        self._command(worker, firing)

    def _fire_plain(
        self, worker: str, node: str, action: Action, *, settings: dict[str, Any], version: int, tensors: Block | None = None
    ) -> None:
        inputs = (Input(node, tensors.worker, tensors.number, None, ()),) if tensors else ()
        firing = Firing(self._state.next_id(), node, action, -1, 1, (), inputs, version, settings)
        self._command(worker, firing)

    def _gang(
        self,
        pool: str,
        action: Action,
        settings: dict[str, Any],
        *,
        version: int,
        stage: Stage | None = None,
        step: int = -1,
    ) -> int:
        """Fire on every rank of a mesh at once."""
        workers = self.plan.pools[pool].workers
        for worker in workers:
            if stage is not None:
                self._fire(worker, stage, action, step, (), version=version, settings=settings)
            else:
                self._fire_plain(worker, pool, action, settings=settings, version=version)
        return len(workers)

    def _command(self, worker: str, firing: Firing) -> None:
        self._state.lend(worker, firing)
        for index, part in enumerate(firing.inputs):
            if part.worker != worker:
                self._out.append(Send(part.worker, worker, firing.id, index, part.number, part.rows, part.columns))
        self._out.append(Fire(worker, firing))

    def _lease(self, firing: int, attempt: int, block: Block | None) -> Lease | None:
        """The lease that an answer belongs to; an answer without one is late: ignored, counted, its block freed."""
        lease = self._state.leases.get(firing)
        if lease is not None and lease.firing.attempt == attempt:
            return lease
        self.counts["late", "answers"] += 1
        if block is not None:
            self._out.append(Free(block.worker, (block.number,)))
        return None

    def _expire(self, lease: Lease, silent_s: float) -> None:
        firing = lease.firing
        problem = f"node '{firing.node}' owes step {firing.step} to the run: no sign from worker '{lease.worker}' for {silent_s:.0f} s"
        if firing.action not in RETRIABLE or firing.attempt >= MAX_ATTEMPTS:
            error = {"type": "DeadlineError", "problem": problem, "found": f"attempt {firing.attempt}"}
            self._halt("failed", {**error, "node": firing.node, "worker": lease.worker})
            return
        self._out.append(Warn(f"{problem}; it is fired again (attempt {firing.attempt + 1} of {MAX_ATTEMPTS})"))
        self._state.end_lease(firing.id)
        self.counts[firing.node, "retries"] += 1
        self._command(self._another(firing, lease.worker), replace(firing, attempt=firing.attempt + 1))

    def _another(self, firing: Firing, worker: str) -> str:
        """For functions, any other worker of the pool; a model's share stays with its rank."""
        stage = self.plan.stages.get(firing.node)
        if stage is None or self.plan.pools[stage.pool].kind == "model":
            return worker
        others = [name for name in self.plan.pools[stage.pool].workers if name != worker]
        return min(others, key=self._load, default=worker)

    def _worker_of(self, stage: Stage) -> str:
        return self.plan.pools[stage.pool].workers[0]

    def _free(self, pool: str) -> list[str]:
        """Workers with room for a firing, the least loaded first."""
        workers = [worker for worker in self.plan.pools[pool].workers if self._load(worker) < MAX_QUEUED]
        return sorted(workers, key=self._load)

    def _load(self, worker: str) -> int:
        return self._state.load[worker]

    def _why(self, stage: Stage) -> str:
        if stage.action == "rollout":
            return f"version {self.version(stage.name)} + staleness {self.plan.staleness[stage.name]}"
        if stage.per != "row":
            return f"its {stage.per} is incomplete"
        return f"pool '{stage.pool}' is busy"

    def _reasons(self, progress: StageProgress) -> str:
        counted = Counter(progress.dead.values())
        return ", ".join(f"{count} rows dropped: {reason}" for reason, count in counted.most_common()) or "no row"


def _died(worker: str, reason: str, leases: Iterable[Lease]) -> dict[str, Any]:
    owed = [lease.firing for lease in leases if lease.worker == worker]
    node = owed[0].node if owed else None
    doing = f" while it owed node '{node}' of step {owed[0].step}" if owed else ""
    return {"type": "WorkerDied", "problem": f"worker '{worker}' died{doing}", "found": reason, "node": node, "worker": worker}


def _by_reason(dropped: dict[Key, str]) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for key, reason in dropped.items():
        found.setdefault(reason, []).append(key)
    return found


def _by_worker(blocks: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for block in blocks:
        found.setdefault(block.worker, []).append(block.number)
    return {worker: tuple(numbers) for worker, numbers in found.items()}

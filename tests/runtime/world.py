"""A world without processes: workers that keep their firings in order and answer in any interleaving.

`World` drives a `Scheduler` to its end and keeps what happened: every event, firing and block. Which worker speaks
next, how an answer is cut into blocks, what is dropped, lost, repeated or late is drawn from one `random.Random`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

from flowrl.backend import Sum
from flowrl.graph import PromptsSpec
from flowrl.rows import Key
from flowrl.runtime.events import (
    Block,
    Event,
    Finished,
    Fire,
    Firing,
    Free,
    Halt,
    Joined,
    Produced,
    Saved,
    Send,
    StepDone,
    Tick,
    Warn,
)
from flowrl.runtime.orders import RETRIABLE
from flowrl.runtime.plan import Plan
from flowrl.runtime.scheduler import Options, Scheduler


def kl_of(key: Key) -> float:
    """What a backward pass measures of a row."""
    return 0.1 + key.step % 3 + 0.01 * key.prompt + 0.001 * key.sample


@dataclass(kw_only=True)
class Faults:
    """How often things go wrong: chances between 0 and 1."""

    drop: float = 0.0
    """A row is dropped by a function or a filter."""
    choosy: float | None = None
    """The share of groups that filters drop, which ones being a function of their keys; None leaves it to `drop`."""
    passes: frozenset[int] | None = None
    """Numbers of the only prompts whose groups filters let pass; None leaves it to `choosy`."""
    drop_all: frozenset[str] = frozenset()
    """Nodes that drop every row."""
    repeat: float = 0.0
    """An event comes twice."""
    lose: float = 0.0
    """An event of a firing that can be fired again is lost, and what would follow it."""
    lost_attempts: int = 1
    """Attempts of a firing that this happens to."""
    late: float = 0.0
    """A lost event comes after all, much later."""
    mismatch: tuple[float, ...] = ()
    """KL of the sampler from the trainer, by step; a step behind them has the last."""
    untrained: float = 0.0
    """A backward pass finds no token to train."""


@dataclass
class World:
    """One run.

    Args:
        plan, options: what runs.
        seed: of everything that is left to chance.
        faults: what goes wrong.
        num_steps_of_data: steps that each prompts stage has rows for; None for all.
        ends: the same for one of them, by name.
        blocks: largest number of blocks that an answer is cut into.
    """

    plan: Plan
    options: Options
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    num_steps_of_data: int | None = None
    ends: dict[str, int] = field(default_factory=dict)
    blocks: int = 3
    max_events: int = 20000

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.scheduler = Scheduler(self.plan, self.options)
        self.queues: dict[str, deque[Event]] = {worker: deque([Joined(worker)]) for worker in self.plan.workers()}
        self.held_back: list[list[Event]] = []
        """Events that come again or late; those of one firing in order."""
        self.live: dict[tuple[str, int], Block] = {}
        self.freed: Counter[tuple[str, int]] = Counter()
        self.made: Counter[str] = Counter()
        self.firings: list[tuple[str, Firing]] = []
        self.sends: list[Send] = []
        self.steps: list[StepDone] = []
        self.saved: list[int] = []
        self.cursors: dict[int, dict] = {}
        self.coefficients: dict[int, dict] = {}
        """By version that was saved."""
        self.warnings: list[str] = []
        self.trace: list[Event | str] = []
        self.heard: list[Produced] = []
        """Answers that came under the attempt that was asked for."""
        self.halt: Halt | None = None
        self.max_open = 0
        self.now_s = 0.0
        self.sampled: dict[Key, int] = {}
        """The version that sampled each row, by the first answer that counted."""
        self.read: dict[str, dict[int, list[list[int]]]] = {}
        """By prompts stage and step: the batches of each wave."""
        self.prompt_of: dict[Key, tuple[str, int, int]] = {}
        """The batch that each prompt is of, and its place there."""
        self._newest: dict[int, Firing] = {}
        self.weights: dict[tuple[str, str], int] = {}
        """Version of each (worker, model), as its firings leave it; -1 while the optimizer is between two."""

    # --- driving

    def run(self) -> World:
        """Speak until the run is over; fails when nobody has anything to say before that."""
        for _ in range(self.max_events):
            if self.halt:
                return self
            if self.held_back and self.chance.random() < 0.02:
                self._say_late()
            speaking = [worker for worker, queue in self.queues.items() if queue]
            if speaking:
                self._say(self.queues[self.chance.choice(speaking)].popleft())
            elif self.held_back or self._owed():
                if self.held_back and self.chance.random() < 0.5:
                    self._say_late()
                else:
                    self.now_s += self.options.lease_s * 1.01
                    self._say(Tick(self.now_s))
            else:
                raise AssertionError(f"the run stalls: {self.describe()}")
        raise AssertionError(f"the run does not end: {self.describe()}")

    def _note_sampled(self, event: Event) -> None:
        firing = self._newest.get(event.firing) if isinstance(event, Produced) else None
        if firing is not None and firing.action == "rollout" and event.attempt == firing.attempt and event.block:
            for key in event.block.keys:
                self.sampled.setdefault(key, firing.version)

    def _say_late(self) -> None:
        late = self.held_back.pop(self.chance.randrange(len(self.held_back)))
        queue, firing = self.queues[late[0].worker], late[0].firing
        if not any(event is late[0] for event in self.trace):  # what is said for the first time comes in its order
            while any(event.firing == firing for event in queue if isinstance(event, Produced | Finished)):
                self._say(queue.popleft())
        for event in late:
            self._say(event)

    def _owed(self) -> bool:
        return self.faults.lose > 0 and bool(self.scheduler.doing())  # answers that never come

    def _say(self, event: Event) -> None:
        if self.halt:
            return
        if isinstance(event, Produced | Finished) and self.chance.random() < self.faults.repeat:
            self.held_back.append([event])
        self.trace.append(event)
        lease = self.scheduler._orders.leases.get(event.firing) if isinstance(event, Produced) else None
        if lease is not None and lease.firing.attempt == event.attempt:
            self.heard.append(event)
        self._note_sampled(event)
        self._take(self.scheduler.on_event(event))
        self.max_open = max(self.max_open, len(self.scheduler.steps))
        for space, totals in self.scheduler.totals().items():
            assert totals.balanced, (space, totals)

    def _take(self, commands: list) -> None:
        for command in commands:
            assert self.halt is None, f"{command} after {self.halt}"
            match command:
                case Fire(worker, firing):
                    self._fire(worker, firing)
                case Send():
                    assert (command.worker, command.number) in self.live, f"{command} of a block that is freed"
                    self.sends.append(command)
                case Free(worker, numbers):
                    for number in numbers:
                        self.freed[worker, number] += 1
                        assert (worker, number) in self.live, f"block {number} of {worker} is freed twice"
                        del self.live[worker, number]
                case StepDone():
                    assert command.step == len(self.steps) + self.options.first_step
                    self.steps.append(command)
                case Saved(version, cursors, coefficients):
                    assert len(self.steps) + self.options.first_step >= version
                    self.saved.append(version)
                    self.cursors[version] = cursors
                    self.coefficients[version] = coefficients
                case Warn(text):
                    self.warnings.append(text)
                case Halt():
                    self.halt = command

    def _fire(self, worker: str, firing: Firing) -> None:
        for each in firing.inputs:
            block = self.live.get((each.worker, each.number))
            assert block is not None, f"{firing} reads a block that is freed"
            assert each.rows is None or max(each.rows) < len(block.keys)
            assert set(each.columns) <= set(block.columns) or firing.action == "import", (each, block)
        self.firings.append((worker, firing))
        self._newest[firing.id] = firing
        lossy = firing.action in RETRIABLE and firing.attempt <= self.faults.lost_attempts
        events = self._answer(worker, firing)
        lost = [i for i in range(len(events)) if lossy and self.chance.random() < self.faults.lose]
        heard = min(lost, default=len(events))
        self.queues[worker].extend(events[:heard])
        if heard < len(events) and self.chance.random() < self.faults.late:
            self.held_back.append(events[heard:])
            return
        for event in events[heard:]:
            if isinstance(event, Produced) and event.block:
                del self.live[worker, event.block.number]  # nobody hears of it

    # --- answering

    def _answer(self, worker: str, firing: Firing) -> list[Event]:
        self._check_version(worker, firing)
        events: list[Event] = []
        match firing.action:
            case "prompts":
                keys = self._read(firing)
                events += self._produce(worker, firing, keys) if keys else []
            case "rollout" | "responses":
                n = self.plan.samples_per_prompt[firing.node]
                keys = [Key(key.step, key.prompt, sample) for key in firing.keys for sample in range(n)]
                self.chance.shuffle(keys)
                events += self._produce(worker, firing, keys, lengths=True)
            case "forward" | "function" | "filter":
                if self.plan.graph[firing.node].kind != "metric":
                    events += self._produce(worker, firing, list(firing.keys))
            case "export":
                events += self._produce(worker, firing, [])
        return [*events, Finished(worker, firing.id, firing.attempt, self._metrics(firing), 0.001)]

    def _read(self, firing: Firing) -> list[Key]:
        """The prompts of a step, or of a further wave; none once the data has ended."""
        per_step = self.plan.prompts_per_step[firing.node]
        spec = self.plan.graph[firing.node].spec
        assert isinstance(spec, PromptsSpec)
        count = per_step // spec.batch
        first = firing.step // spec.every * count
        batches = firing.settings.get("batches") or range(first, first + count)
        first = firing.settings.get("first_prompt", 0)
        data = self.ends.get(firing.node, self.num_steps_of_data)
        there = [number for number in batches if data is None or number < data * count]
        if not first and len(there) < len(batches):
            return []
        keys = [Key(firing.step, first + i) for i in range(len(there) * spec.batch)]
        if firing.attempt == 1 and not self.scheduler._evaluations.holds(firing):
            self.read.setdefault(firing.node, {}).setdefault(firing.step, []).append(list(there))
            self.prompt_of.update(
                zip(keys, [(firing.node, number, i) for number in there for i in range(spec.batch)], strict=True)
            )
        return keys

    def _metrics(self, firing: Firing) -> dict[str, Sum]:
        if firing.action == "backward":
            tokens = 0 if self.chance.random() < self.faults.untrained else 3 * len(firing.keys)
            sums = {"tokens": Sum(tokens, 1), "rows": Sum(tokens // 3, 1), "loss": Sum(1.0, 1.0)}
            if tokens:
                sums["kl"] = Sum(sum(map(kl_of, firing.keys)), len(firing.keys))
            if self.faults.mismatch and not firing.settings["moved"]:
                mean = self.faults.mismatch[min(firing.step, len(self.faults.mismatch) - 1)]
                sums["mismatch_kl"] = Sum(mean * tokens, tokens)
            return sums
        if firing.action == "evaluate":
            return {firing.node: Sum(len(firing.keys), len(firing.keys))}
        return {}

    def _produce(self, worker: str, firing: Firing, keys: list[Key], *, lengths: bool = False) -> list[Event]:
        droppable = firing.action in ("function", "filter")
        whole = {k.prompt for k in keys if self._drops(firing)} if droppable else set()
        if firing.action == "filter":
            whole |= {k.prompt for k in keys if self._refuses(k)}
        per = self.plan.stages[firing.node].per if firing.node in self.plan.stages else "row"
        events: list[Event] = []
        for part in self._cut(keys) if firing.action not in ("export",) else [keys]:
            if per == "row":
                dropped = [key for key in part if droppable and self._drops(firing)]
            else:
                dropped = [key for key in part if key.prompt in whole]
            kept = [key for key in part if key not in set(dropped)]
            block = self._block(worker, firing, kept, lengths) if kept or firing.action == "export" else None
            reason = f"{firing.node} says no"
            events.append(Produced(worker, firing.id, firing.attempt, block, dict.fromkeys(dropped, reason)))
        return events

    def _drops(self, firing: Firing) -> bool:
        return firing.node in self.faults.drop_all or self.chance.random() < self.faults.drop

    def _refuses(self, key: Key) -> bool:
        """Whether filters drop a group, whenever they are asked."""
        if self.faults.passes is not None:
            return key.prompt not in self.faults.passes
        return self.faults.choosy is not None and _share_of(key) < self.faults.choosy

    def _cut(self, keys: list[Key]) -> list[list[Key]]:
        cuts = sorted(self.chance.randrange(len(keys) + 1) for _ in range(self.chance.randrange(self.blocks)))
        bounds = [0, *cuts, len(keys)]
        return [keys[a:b] for a, b in pairwise(bounds) if b > a]

    def _block(self, worker: str, firing: Firing, keys: list[Key], lengths: bool) -> Block:
        self.made[worker] += 1
        columns = self.plan.graph[firing.node].outputs if firing.node in self.plan.graph.nodes else ()
        if firing.action == "prompts":
            columns = ("prompt", "prompt_ids", "prompt_messages", "prompt_row", "answer")
        tokens = tuple(3 + (k.prompt * 7 + k.sample * 3) % 5 for k in keys) if lengths else None
        block = Block(worker, self.made[worker], tuple(keys), columns, 8 * len(keys), tokens)
        self.live[worker, block.number] = block
        return block

    # --- weights, as each worker would hold them

    def _check_version(self, worker: str, firing: Firing) -> None:
        model = firing.settings.get("model")
        if model is None and firing.node in self.plan.graph.nodes and self.plan.graph[firing.node].model is not None:
            model = self.plan.model_of[firing.node]
        if model is None:
            if firing.action == "load":
                for name in firing.settings["models"]:
                    self.weights[worker, name] = firing.version
            return
        held = self.weights.get((worker, model), 0)
        match firing.action:
            case "rollout" | "forward" | "evaluate" | "export":
                assert held == firing.version, f"{firing} on {worker} finds version {held}"
            case "step":
                self.weights[worker, model] = firing.version if firing.settings["publish"] else -1
            case "import":
                assert held < firing.version
                self.weights[worker, model] = firing.version

    # --- what can be asked

    def fired(self, action: str) -> list[tuple[str, Firing]]:
        """Firings of an action, in order, first attempts only."""
        return [(worker, firing) for worker, firing in self.firings if firing.action == action and firing.attempt == 1]

    def leaked(self) -> set[tuple[str, int]]:
        """Blocks that the scheduler heard of and never freed."""
        heard = [event.block for event in self.trace if isinstance(event, Produced) and event.block]
        return {(block.worker, block.number) for block in heard} & self.live.keys()

    def describe(self) -> str:
        """Where a run stands, for a failure's message."""
        scheduler = self.scheduler
        lines = [f"seed {self.seed}", f"course {scheduler._course}", f"versions {scheduler._weights.versions}"]
        lines += [f"owed {lease}" for lease in scheduler._orders.leases.values()]
        for step in scheduler.steps.values():
            for name, p in step.stages.items():
                lines.append(
                    f"step {step.number} {name}: known={p.known} ready={len(p.ready)} settled={len(p.settled)} "
                    f"done={len(p.done)} dead={len(p.dead)} of {len(p.expected)}, running {p.running}, fired {p.fired}"
                )
        return "\n".join(lines)


def _share_of(key: Key) -> float:
    """A number from 0 to 1 that a group always has."""
    return random.Random(f"{key.step} {key.prompt}").random()

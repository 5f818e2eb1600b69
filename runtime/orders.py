"""The order book: firings that workers owe, the commands that gave them out, and answers told apart from late ones.

Every firing is leased to its worker under an attempt. An answer counts only under the newest attempt; a block that
comes with any other is freed at once, and one that was seen before is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .course import shown
from .events import Action, Block, Command, Fire, Firing, Free, Input, Send, Warn
from .ledger import most_frequent
from .plan import Plan, Stage

MAX_QUEUED = 2
"""Firings on one worker: one runs and one waits, which hides the way there; more would be decided too early."""
MAX_ATTEMPTS = 3
RETRIABLE: frozenset[Action] = frozenset(
    {"prompts", "rollout", "responses", "forward", "judge", "function", "filter", "evaluate"}
)
"""Actions that change nothing but their output, so that a lost one can be fired again."""
REMEMBERED = 1024
"""Blocks of a worker that are known again should their event come twice."""
NO_STEP = -1
"""The step of firings that belong to none: weights, checkpoints."""


@dataclass(slots=True)
class Lease:
    """A firing that a worker owes."""

    firing: Firing
    worker: str
    since_s: float
    missing: int
    """Rows that it has not answered for."""


class Orders:
    """What was asked of workers and is not answered yet.

    Args:
        plan: who runs what.
        lease_s: longest that a worker with work may go without a sign of progress.
    """

    def __init__(self, plan: Plan, lease_s: float) -> None:
        self.plan = plan
        self.lease_s = lease_s
        self.commands: list[Command] = []
        """What follows from the event at hand."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """By (stage, what)."""
        self.now_s = 0.0
        self.leases: dict[int, Lease] = {}
        self.of_step: Counter[int] = Counter()
        """Leases by the step of their rows."""
        self._load: Counter[str] = Counter()
        self._last_sign: dict[str, float] = {}
        self._seen: dict[str, dict[int, None]] = {}
        self._ids = 0

    # --- asking

    def fire(
        self,
        worker: str,
        node: str,
        action: Action,
        step: int = NO_STEP,
        *,
        keys: Sequence[Any] = (),
        inputs: tuple[Input, ...] = (),
        version: int = 0,
        settings: dict[str, Any] | None = None,
        missing: int = 0,
    ) -> Firing:
        """Ask a worker for a firing; `missing` rows are to come of it."""
        self._ids += 1
        firing = Firing(self._ids, node, action, step, 1, tuple(keys), inputs, version, settings or {})
        self.counts[node, "firings"] += 1
        self._lend(worker, firing, missing)
        return firing

    def fire_on_all(self, pool: str, node: str, action: Action, step: int = NO_STEP, **parts: Any) -> int:
        """Ask every rank of a mesh at once."""
        workers = self.plan.pools[pool].workers
        for worker in workers:
            self.fire(worker, node, action, step, **parts)
        return len(workers)

    def has_room(self, worker: str) -> bool:
        """Whether a worker may be given another firing."""
        return self._load[worker] < MAX_QUEUED

    def with_room(self, pool: str) -> list[str]:
        """Workers that may be given another firing, the least loaded first."""
        return sorted(filter(self.has_room, self.plan.pools[pool].workers), key=self._load.__getitem__)

    def again(self, lease: Lease, problem: str, version: int) -> bool:
        """Fire a lost firing again with weights of `version`; false when it may not be, or not once more."""
        firing = lease.firing
        if firing.action not in RETRIABLE or firing.attempt >= MAX_ATTEMPTS:
            return False
        self.commands.append(Warn(f"{problem}; it is fired again (attempt {firing.attempt + 1} of {MAX_ATTEMPTS})"))
        self.counts[firing.node, "retries"] += 1
        self.end(lease)
        worker = self._another(firing, lease.worker)
        self._lend(worker, replace(firing, attempt=firing.attempt + 1, version=version), lease.missing)
        return True

    def free(self, blocks: Iterable[Block]) -> None:
        """Nobody reads these blocks any more."""
        numbers: dict[str, list[int]] = {}
        for block in blocks:
            numbers.setdefault(block.worker, []).append(block.number)
        self.commands += [Free(worker, tuple(found)) for worker, found in numbers.items()]

    # --- answers

    def is_new(self, block: Block) -> bool:
        """Whether the event of a block is the first one."""
        seen = self._seen.setdefault(block.worker, {})
        if block.number in seen:
            self.counts[block.worker, "repeated"] += 1
            return False
        seen[block.number] = None
        if len(seen) > REMEMBERED:
            del seen[next(iter(seen))]
        return True

    def answered(self, firing: int, attempt: int, worker: str) -> Lease | None:
        """The lease that an answer belongs to, or None for a late one."""
        lease = self.leases.get(firing)
        if lease is None or lease.firing.attempt != attempt:
            self.counts["late", "answers"] += 1
            return None
        self._last_sign[worker] = self.now_s
        return lease

    def end(self, lease: Lease) -> None:
        """A worker owes a firing no more."""
        del self.leases[lease.firing.id]
        self._load[lease.worker] -= 1
        self.of_step[lease.firing.step] -= 1

    def overdue(self) -> list[tuple[Lease, float]]:
        """Leases of workers that have been silent too long, and for how many seconds."""
        found = [(lease, self.now_s - self._last_heard(lease)) for lease in self.leases.values()]
        return [(lease, silent_s) for lease, silent_s in found if silent_s > self.lease_s]

    def owed_by(self, worker: str) -> list[Firing]:
        """Firings that a worker owes, the oldest first."""
        return [lease.firing for lease in self.leases.values() if lease.worker == worker]

    def _last_heard(self, lease: Lease) -> float:
        return max(lease.since_s, self._last_sign.get(lease.worker, 0.0))

    def _lend(self, worker: str, firing: Firing, missing: int) -> None:
        self.leases[firing.id] = Lease(firing, worker, self.now_s, missing)
        self._load[worker] += 1
        self.of_step[firing.step] += 1
        for index, each in enumerate(firing.inputs):
            if each.worker != worker:
                self.commands.append(Send(each.worker, worker, firing.id, index, each.number, each.rows, each.columns))
        self.commands.append(Fire(worker, firing))

    def _another(self, firing: Firing, worker: str) -> str:
        """For functions, any other worker of the pool; a model's share stays with its rank."""
        stage: Stage | None = self.plan.stages.get(firing.node)
        if stage is None or self.plan.pools[stage.pool].kind == "model":
            return worker
        others = [name for name in self.plan.pools[stage.pool].workers if name != worker]
        return min(others, key=self._load.__getitem__, default=worker)


def in_words(firing: Firing) -> str:
    """``node 'reward' of step 3``; of a firing that belongs to no step, ``the save of version 3 ('train')``."""
    if firing.step == NO_STEP:
        return f"the {firing.action} of version {firing.version} ('{firing.node}')"
    return f"node '{firing.node}' of step {shown(firing.step)}"


def reasons(dropped: Collection[str]) -> str:
    """``3 rows dropped: too long, 1 row dropped: ...``, the most frequent first."""
    counted = [
        (f"{count} row" if count == 1 else f"{count} rows", why) for why, count in most_frequent(Counter(dropped))
    ]
    return ", ".join(f"{rows} dropped: {reason}" for rows, reason in counted) or "no row"

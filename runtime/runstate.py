"""What the scheduler remembers between two events: leases, versions, pending evaluations, and the metrics of open steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.backend import Sum
from flowrl.graph import RolloutSpec

from .events import Block, Finished, Firing
from .plan import Plan, Stage
from .updates import UpdateRound

if TYPE_CHECKING:
    from .scheduler import Options

COUNTS = frozenset({"tokens", "rows", "response_tokens", "samples", "num_dropped"})
"""Metrics that are totals; all others are means."""


@dataclass(slots=True)
class Lease:
    """A firing that a worker owes."""

    firing: Firing
    worker: str
    since_s: float


class RunState:
    """Plain state with small verbs; decisions are the scheduler's."""

    def __init__(self, plan: Plan, options: Options) -> None:
        first = options.first_step
        self.plan = plan
        self.options = options
        self.now_s = 0.0
        self.joined: set[str] = set()
        self.ready = False
        """Whether every worker has joined."""
        self.leases: dict[int, Lease] = {}
        self.load: Counter[str] = Counter()
        """Firings that each worker owes."""
        self.last_progress: dict[str, float] = {}
        self.next_step = first
        """First step that is not open yet."""
        self.closed = first
        """First step that is not closed yet."""
        self.home = _homes(plan)
        """The pool that trains each trained model."""
        self.versions = dict.fromkeys(self.home, first)
        self.replicas = dict.fromkeys(_replicas(plan, self.home), -1 if first else 0)
        """Version of each (model, pool) that holds a copy of a trained model."""
        self.exported: dict[str, Block] = {}
        self.importing: dict[str, int] = {}
        """Ranks that still import, by sync."""
        self.rounds: dict[tuple[str, int], UpdateRound] = {}
        self.held: dict[str, list[Block]] = {name: [] for name in _held(plan)}
        """Prompts of evaluations; they stay for the whole run."""
        self.held_fired: set[str] = set()
        self.to_evaluate: dict[str, int] = {}
        """The version that each evaluation is due for."""
        self.saved = first
        """Newest version that ranks were told to save."""
        self.saving = 0
        """Ranks that still write."""
        self.unpublished: int | None = None
        """A version that is written or being written and not published yet."""
        self.downstream_first = sorted(plan.stages.values(), key=lambda stage: -stage.depth)
        self._metrics: dict[int, dict[str, Sum]] = {}
        self._times: dict[int, Counter[tuple[str, str]]] = {}
        self._ids = 0

    def next_id(self) -> int:
        """A number no firing had before."""
        self._ids += 1
        return self._ids

    def lend(self, worker: str, firing: Firing) -> None:
        """A worker owes a firing from now on."""
        self.leases[firing.id] = Lease(firing, worker, self.now_s)
        self.load[worker] += 1

    def end_lease(self, firing: int) -> Lease:
        """A worker owes a firing no more."""
        lease = self.leases.pop(firing)
        self.load[lease.worker] -= 1
        return lease

    def progressed(self, worker: str) -> None:
        """A sign of progress: renews all leases of the worker."""
        self.last_progress[worker] = self.now_s

    # --- versions

    def model_of(self, update: str) -> str:
        """Name of the model that an update trains."""
        model = self.plan.graph[update].model
        assert model is not None
        return model.name

    def clock(self, space: str) -> int:
        """The version that decides admission to a rollout: of what its samples train, or else the number of closed steps."""
        trained = [
            self.versions[self.model_of(stage.name)]
            for stage in self.plan.stages.values()
            if stage.space == space and stage.action == "backward"
        ]
        return min(trained, default=self.closed)

    def served(self, stage: Stage) -> int:
        """The version of the weights that a rollout's ranks hold."""
        model = self.plan.graph[stage.name].model
        assert model is not None
        return self.replicas.get((model.name, stage.pool), self.versions.get(model.name, self.clock(stage.name)))

    def end_import(self, firing: Firing) -> bool:
        """A rank has imported a version; true when it was the last one."""
        self.importing[firing.node] -= 1
        if self.importing[firing.node]:
            return False
        del self.importing[firing.node]
        model, pool = firing.node.split(">")
        self.replicas[model, pool] = firing.version
        return True

    def evaluate(self, node: str, version: int, every: int) -> None:
        """Remember that a version is to be evaluated, if it is one of those."""
        if version % every == 0 or version == self.options.num_steps:
            self.to_evaluate[node] = version

    def save_due(self, version: int) -> bool:
        """Whether a version is to be saved and is not yet."""
        every = self.options.save_every
        due = every is not None and (version % every == 0 or version == self.options.num_steps)
        return due and version > self.saved

    # --- metrics

    def metric(self, step: int, name: str, value: Sum) -> None:
        """Add to a metric of a step."""
        metrics = self._metrics.setdefault(step, {})
        metrics[name] = metrics[name] + value if name in metrics else value

    def note(self, firing: Firing, event: Finished) -> None:
        """Add what a firing reported."""
        for name, value in event.metrics.items():
            self.metric(firing.step, name, Sum(*value))
        label = "optimizer" if firing.action == "step" else firing.node
        self._times.setdefault(firing.step, Counter())[label, event.worker] += event.compute_s

    def close(self, step: int) -> dict[str, float]:
        """All metrics of a step, as numbers; ``time/NODE`` is the busiest worker's seconds in that node."""
        metrics = {n: s.total if n in COUNTS else s.mean for n, s in self._metrics.pop(step, {}).items()}
        times: dict[str, float] = {}
        for (node, _), seconds in self._times.pop(step, Counter()).items():
            times[f"time/{node}"] = max(times.get(f"time/{node}", 0.0), seconds)
        for key in [key for key in self.rounds if key[1] == step]:
            del self.rounds[key]
        return {**metrics, **times}


def _homes(plan: Plan) -> dict[str, str]:
    homes = {}
    for stage in plan.stages.values():
        model = plan.graph[stage.name].model if stage.action == "backward" else None
        if model is not None:
            homes[model.name] = stage.pool
    return homes


def _replicas(plan: Plan, homes: dict[str, str]) -> list[tuple[str, str]]:
    found = {}
    for node in plan.graph.nodes.values():
        pool = plan.stages[node.name].pool
        if isinstance(node.spec, RolloutSpec) and node.model and homes.get(node.model.name, pool) != pool:
            found[node.model.name, pool] = None
    return list(found)


def _held(plan: Plan) -> list[str]:
    """Prompts that only evaluations read."""
    found = []
    for stage in plan.stages.values():
        readers = [r.action for r in plan.readers(stage.name) if r.action != "record"]
        if stage.action == "prompts" and readers and all(action == "evaluate" for action in readers):
            found.append(stage.name)
    return found

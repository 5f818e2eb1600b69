"""Versions of trained models: who has which, and how a new one comes to rollouts on other meshes.

Two rules keep a version's number true: while the optimizer of a model is between two versions (`Weights.changing`),
nothing that reads the model is fired on its mesh; and on one worker firings run in order, so that what is fired after
an import reads what it brought. By the second rule a version is *promised* on its own mesh once all ranks were told to
make it: a rollout that waits for nothing else is queued behind the optimizer, and no rank idles while word of the
version goes to the scheduler and back.
"""

from __future__ import annotations

from flowrl.graph import RolloutSpec

from .course import Course, Options
from .events import Block, Firing, Input
from .orders import Orders
from .plan import Plan, Stage


class Weights:
    """Which version each mesh holds of each trained model."""

    def __init__(self, plan: Plan, options: Options, orders: Orders, course: Course) -> None:
        self.plan = plan
        self.options = options
        self.orders = orders
        self.course = course
        first = options.first_step
        self.home = {plan.model_of[name]: s.pool for name, s in plan.stages.items() if s.action == "backward"}
        """The pool that trains each trained model."""
        self.versions = dict.fromkeys(self.home, first)
        self.promised = dict(self.versions)
        """Version that whatever is fired now on a model's home will read."""
        self.changing: set[str] = set()
        """Models whose optimizer has stepped, or was told to, since their newest version."""
        # A replica of a resumed run holds what the run began with: too old for any staleness, whatever the step.
        unsynced = -1 - max(plan.staleness.values(), default=0) if first else 0
        self.replicas = dict.fromkeys(_replicas(plan, self.home), unsynced)
        """Version of each (model, pool) that holds a copy of a trained model, once all that was asked of it is done."""
        self._exported: dict[str, Block] = {}
        self._syncing: dict[str, int] = {}
        """Ranks that still import, by sync; 0 while the trainer exports."""
        self._clocks = {name: self._clock_models(name) for name in plan.staleness}

    # --- what version

    def clock(self, space: str) -> int:
        """The version that decides admission to a rollout: of what its samples train, or else of its own model."""
        models = self._clocks[space]
        pool = self.plan.stages[space].pool
        versions = self.promised if all(self.home[model] == pool for model in models) else self.versions
        return min(map(versions.__getitem__, models), default=self.course.closed)

    def served(self, stage: Stage) -> int:
        """The version of the weights that a stage's ranks hold; a model that nothing trains stays at 0."""
        model = self.plan.model_of[stage.name]
        if (model, stage.pool) in self.replicas:
            return self.replicas[model, stage.pool]
        return self.promised.get(model, 0)

    def age(self, stage: Stage, step: int) -> int:
        """The version that the samples of a step count from: a rollout's ranks', or the clock's for a model that none
        trains. Given responses are of no version and never late: they count from their own step's."""
        if stage.action == "responses":
            return step
        trained = self.plan.model_of[stage.name] in self.versions
        return min(self.served(stage), self.clock(stage.space)) if trained else self.clock(stage.space)

    def at_rest(self, stage: Stage) -> bool:
        """Whether the weights that a stage reads are those of a version, and stay so for what is fired now."""
        model = self.plan.model_of[stage.name]
        promised = self.promised.get(model) != self.versions.get(model)
        return model not in self.changing or promised or self.home.get(model) != stage.pool

    def trained_on(self, pool: str) -> list[str]:
        """Models that are trained on a pool."""
        return [model for model, home in self.home.items() if home == pool]

    def promise(self, model: str, version: int) -> None:
        """All ranks were told to make a version."""
        assert version == self.versions[model] + 1
        self.promised[model] = version

    def publish(self, model: str, version: int) -> None:
        """All ranks have made a version."""
        assert version == self.versions[model] + 1
        self.versions[model] = version
        self.changing.discard(model)

    def _clock_models(self, rollout: str) -> list[str]:
        trained = [self.plan.model_of[s.name] for s in self.plan.in_space[rollout] if s.action == "backward"]
        return trained or [model for model in [self.plan.model_of.get(rollout, "")] if model in self.versions]

    # --- bringing versions to where they are read

    def load(self) -> None:
        """Start from a checkpoint."""
        for pool in dict.fromkeys(self.home.values()) if self.options.load_from else ():
            settings = {"folder": self.options.load_from, "models": self.trained_on(pool)}
            self.orders.fire_on_all(pool, pool, "load", version=self.options.first_step, settings=settings)

    def sync(self) -> None:
        """Bring a new version to rollouts on meshes of their own, while there is something left to sample."""
        for (model, pool), version in self.replicas.items():
            name, current = f"{model}>{pool}", self.versions[model]
            if version >= current or name in self._syncing or model in self.changing or current >= self.course.end:
                continue
            self._syncing[name] = 0
            trainer = self.plan.pools[self.home[model]].workers[0]
            self.orders.fire(trainer, name, "export", version=current, settings={"model": model})

    def take_export(self, firing: Firing, block: Block) -> None:
        """The trainer has taken a copy of its weights."""
        self._exported[firing.node] = block

    def after_export(self, firing: Firing) -> None:
        """The copy is complete: every rank of the replica imports it, before anything that it is asked from now on."""
        block = self._exported[firing.node]
        model, pool = firing.node.split(">")
        inputs = (Input(firing.node, block.worker, block.number, None, ()),)
        self._syncing[firing.node] = self.orders.fire_on_all(
            pool, firing.node, "import", inputs=inputs, version=firing.version, settings={"model": model}
        )
        self.replicas[model, pool] = firing.version

    def after_import(self, firing: Firing) -> None:
        """A rank has imported; after the last one the copy is forgotten."""
        self._syncing[firing.node] -= 1
        if not self._syncing[firing.node]:
            del self._syncing[firing.node]
            self.orders.free([self._exported.pop(firing.node)])


def _replicas(plan: Plan, homes: dict[str, str]) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], None] = {}
    for node in plan.graph.nodes.values():
        pool = plan.stages[node.name].pool
        if isinstance(node.spec, RolloutSpec) and node.model and homes.get(node.model.name, pool) != pool:
            found[node.model.name, pool] = None
    return list(found)

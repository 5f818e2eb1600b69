"""What can be fired now: for each stage of a step, the rows that it may take and the workers that take them.

=========  ==================================================  =================================================
stage      waits for                                           on
=========  ==================================================  =================================================
prompts    the step to be open; of a filter that refills,      the host
           every earlier step to be closed to new prompts, or
           the groups of the wave before to be decided
rollout    its prompts, admission, weights at rest             each rank its share of the prompts
responses  its prompts, admission                              the host
forward,   its whole share; a trained model: the step's        each rank its share
judge      version
function   rows, whole groups, or the whole step               any workers with room
backward   the step to be closed to new prompts; the rows of   the rank whose share they are
           a pass; the step's version
step       all passes of the mini-batch; before a round's      all ranks
           first, whatever else reads these weights
record     all rows, and all their scores                      the host
=========  ==================================================  =================================================
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import groupby
from operator import itemgetter
from typing import Any

from flowrl.graph import UpdateSpec
from flowrl.rows import Key

from .adaptive import AdaptiveSettings
from .course import shown
from .evaluations import Evaluations
from .events import MAKES_SAMPLES, Action, Firing, Warn
from .ledger import Ledger
from .mismatch import mismatch_error
from .orders import MAX_QUEUED, Orders, reasons
from .plan import Plan, Stage
from .progress import Share, StageProgress, StepRows, parts
from .saves import Saves
from .step_metrics import StepMetrics
from .updates import UpdateRound
from .waves import Waves
from .weights import Weights


class Dispatch:
    """Fires what the rows of a step are ready for."""

    def __init__(
        self,
        plan: Plan,
        orders: Orders,
        ledgers: dict[str, Ledger],
        weights: Weights,
        saves: Saves,
        evaluations: Evaluations,
        waves: Waves,
        adaptive: AdaptiveSettings,
        metrics: StepMetrics,
    ) -> None:
        self.plan = plan
        self.orders = orders
        self.ledgers = ledgers
        self.weights = weights
        self.saves = saves
        self.evaluations = evaluations
        self.waves = waves
        self.adaptive = adaptive
        self.metrics = metrics
        self.rounds: dict[tuple[str, int], UpdateRound] = {}
        """By update and step."""
        self.stopped: dict[str, Any] | None = None
        """The error of an update whose optimizer may not step, which ends the run."""
        launchers = {
            "prompts": self._prompts,
            "rollout": self._rollout,
            "responses": self._responses,
            "forward": self._forward,
            "judge": self._forward,
            "function": self._function,
            "filter": self._function,
            "backward": self._update,
            "record": self._record,
        }
        later_first = sorted(plan.stages.values(), key=lambda stage: -stage.depth)
        self._later_first = [(s.name, launchers[s.action]) for s in later_first if self.is_fired(s)]
        self._metric_nodes = {name for name, node in plan.graph.nodes.items() if node.kind == "metric"}
        self._updates = [stage.name for stage in plan.stages.values() if stage.action == "backward"]
        self._samplers = _readers_of(plan, list(weights.home))

    def launch(self, step: StepRows) -> None:
        """Fire what can be fired of a step, its later stages first."""
        stages = step.stages
        for name, launch in self._later_first:
            progress = stages[name]
            if progress.ready or progress.fires_without:
                launch(step, progress)

    def is_fired(self, stage: Stage) -> bool:
        """Whether a stage is fired once for each step: evaluations are not, nor are prompts that only they read."""
        if stage.action == "prompts":
            return any(reader.action in MAKES_SAMPLES for reader in self.plan.readers[stage.name])
        return stage.action != "evaluate"

    def is_read(self, step: StepRows) -> bool:
        """Whether prompts of a step have been read from each source."""
        stages = [progress for progress in step.stages.values() if progress.stage.action == "prompts"]
        return all(progress.known for progress in stages if self.is_fired(progress.stage))

    def is_trained(self, step: StepRows) -> bool:
        """Whether all updates of a step have published their version."""
        versions = [self.weights.versions[self.plan.model_of[update]] for update in self._updates]
        return all(version > step.number for version in versions)

    def forget(self, step: StepRows) -> None:
        """A step is closed."""
        for update in self._updates:
            self.rounds.pop((update, step.number), None)
        self.adaptive.forget(step.number)

    def round_of(self, firing: Firing, worker: str) -> tuple[UpdateRound, int]:
        """The round that a pass or a step belongs to, and its rank."""
        workers = self.plan.pools[self.plan.stages[firing.node].pool].workers
        return self.rounds[firing.node, firing.step], workers.index(worker)

    # --- one for each kind of stage

    def _prompts(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        if step.number % self.plan.every[stage.name]:
            progress.fires_without = False
            step.skip(stage.name)
            return
        worker = self.plan.pools[stage.pool].workers[0]
        if not self.orders.has_room(worker) or (settings := self.waves.to_read(step, stage.name)) is None:
            return
        progress.fires_without = False
        self._fire(worker, step, progress, "prompts", (), set(), missing=0, settings=settings)

    def _rollout(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        if not progress.known or not self._may_sample(stage, step.number):
            return
        for share, worker in self._shares_to_fire(step, progress):
            self._sample(step, progress, share, worker, version=self.weights.served(stage))
        progress.fires_without = self._samples_more(step, progress)

    def _may_sample(self, stage: Stage, step: int) -> bool:
        """Admission: both the trainer's version and the one that the rollout's ranks hold are new enough."""
        return self.ledgers[stage.name].admits(step, self.weights.age(stage, step)) and self.weights.at_rest(stage)

    def _responses(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        if not progress.known or not self.ledgers[stage.name].admits(step.number, self.weights.clock(stage.name)):
            return
        for share, worker in self._shares_to_fire(step, progress):
            self._sample(step, progress, share, worker)
        progress.fires_without = self._samples_more(step, progress)

    def _sample(self, step: StepRows, progress: StageProgress, share: Share, worker: str, *, version: int = 0) -> None:
        """Give a rank its prompts: their samples exist for the ledger from now on."""
        stage = progress.stage
        progress.fired.add(share.number)
        self.ledgers[stage.name].issue(step.number, share.samples, self.weights.age(stage, step.number))
        prompts, missing = share.prompts, len(share.samples)
        self._fire(worker, step, progress, stage.action, prompts, set(prompts), missing=missing, version=version)

    def _samples_more(self, step: StepRows, progress: StageProgress) -> bool:
        """Whether a rank was not given its prompts yet, or more of them may come."""
        shares = step.shares(progress.stage, self.plan.pools[progress.stage.pool].size)
        return not progress.closed or len(progress.fired) < len(shares)

    def _forward(self, step: StepRows, progress: StageProgress) -> None:
        version = self.weights.served(progress.stage)
        if self.plan.model_of[progress.stage.name] in self.weights.versions and version != step.number:
            return  # an earlier step trains first
        action = progress.stage.action
        for share, worker in self._shares_to_fire(step, progress):
            if share.rows <= progress.settled:
                progress.fired.add(share.number)
                if keys := progress.ready_of(share.samples):
                    self._fire(worker, step, progress, action, keys, progress.take(keys), version=version)

    def _function(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        if not (workers := self.orders.with_room(stage.pool)):
            return
        keys = progress.takeable()
        if stage.per == "batch":
            workers = workers[:1]
        for part, worker in zip(_even(keys, stage.per == "group", len(workers)), workers, strict=True):
            if part:
                missing = 0 if stage.name in self._metric_nodes else len(part)
                rows, numbers = progress.take(part), self.adaptive.settings(stage.name, step.number)
                self._fire(worker, step, progress, stage.action, part, rows, missing=missing, settings=numbers)

    def _update(self, step: StepRows, progress: StageProgress) -> None:
        stage = progress.stage
        version = self.weights.versions[self.plan.model_of[stage.name]]
        if not progress.closed or version != step.number or self.saves.due(version):
            return  # an earlier step trains first, and a checkpoint is taken between two versions
        update = self._round(step, progress)
        update.gather()
        for each in list(update.waiting):
            worker = self.plan.pools[stage.pool].workers[each.rank]
            if update.running[each.rank] < MAX_QUEUED:  # whatever else it holds: nothing else may hold up training
                update.begin_pass(each)
                rows, settings = progress.take(each.keys), {"moved": update.steps_done > 0}
                self._fire(
                    worker, step, progress, "backward", each.keys, rows, version=version, missing=0, settings=settings
                )
        if update.step_due() and self._may_step(step, stage):
            self._step(step, progress, update)

    def _round(self, step: StepRows, progress: StageProgress) -> UpdateRound:
        stage = progress.stage
        found = self.rounds.get((stage.name, step.number))
        if found is None:
            spec = self.plan.graph[stage.name].spec
            assert isinstance(spec, UpdateSpec)
            size = self.plan.pools[stage.pool].size
            found = UpdateRound(spec, progress, size, lambda keys: step.lengths(stage.space, keys))
            self.rounds[stage.name, step.number] = found
        return found

    def _may_step(self, step: StepRows, stage: Stage) -> bool:
        """Whether nothing reads the weights at this version any more: the first optimizer step ends it."""
        model = self.plan.model_of[stage.name]
        if model in self.weights.changing:
            return True
        read = all(step.stages[name].finished for name in self._samplers[model])
        return read and not self.evaluations.busy_with(model)

    def _step(self, step: StepRows, progress: StageProgress, update: UpdateRound) -> None:
        stage = progress.stage
        sums = update.sums()
        loss = self.plan.loss(stage.name)
        denominator = loss.denominator(sums["tokens"], sums["rows"])
        if not denominator:
            nothing = "no row has a trained token" + (" and is one that the loss is about" if loss.selects_by else "")
            dead = progress.dead
            left = [nothing] if len(dead) < len(progress.expected) else []
            why = "; ".join([*left, *([reasons(dead.values())] if dead else [])])
            text = f"step {shown(step.number)}: node '{stage.name}' has nothing to train: {why}"
            self.orders.commands.append(Warn(text))
        self.stopped = mismatch_error(self.plan.graph[stage.name], step.number, update)
        if self.stopped:
            return
        settings: dict[str, Any] = {"denominator": denominator, "publish": update.last_step}
        if loss.adaptive:
            observed = {name: list(each) for name, each in update.observed().items()}
            settings |= {"observed": observed, "rows": sums["rows"]}
        update.begin_step()
        model, version = self.plan.model_of[stage.name], step.number + 1
        self.weights.changing.add(model)
        progress.running += update.num_ranks
        self.orders.fire_on_all(stage.pool, stage.name, "step", step.number, version=version, settings=settings)
        if settings["publish"]:
            self.weights.promise(model, version)
            # Known as soon as a row of the step to come can be.
            self.metrics.add(step.number, self.adaptive.move(stage.name, step.number, *update.followed()))

    def _record(self, step: StepRows, progress: StageProgress) -> None:
        worker = self.plan.pools[progress.stage.pool].workers[0]
        if not progress.complete or not self.orders.has_room(worker) or not self._is_judged(step, progress.stage):
            return
        keys = progress.expected
        dropped = {str(row): progress.dead[key] for row, key in enumerate(keys) if key in progress.dead}
        progress.fires_without = False
        progress.ready = set()
        self._fire(worker, step, progress, "record", keys, set(keys), missing=0, settings={"dropped": dropped})

    # --- parts of them

    def _is_judged(self, step: StepRows, record: Stage) -> bool:
        """Whether all that is written down is made: a row that one branch has dropped may get a score in another."""
        return all(step.stages[source].finished for source, _ in record.reads)

    def _shares_to_fire(self, step: StepRows, progress: StageProgress) -> list[tuple[Share, str]]:
        """Shares of ranks that have room and were given none yet."""
        pool = self.plan.pools[progress.stage.pool]
        shares = step.shares(progress.stage, pool.size)
        if len(progress.fired) == len(shares):
            return []
        left = [share for share in shares if share.number not in progress.fired]
        with_room = [share for share in left if self.orders.has_room(pool.workers[share.rank])]
        return [(share, pool.workers[share.rank]) for share in with_room if share.samples]

    def _fire(
        self,
        worker: str,
        step: StepRows,
        progress: StageProgress,
        action: Action,
        keys: Sequence[Key],
        rows: Set[Key],
        *,
        missing: int | None = None,
        version: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        stage = progress.stage
        progress.running += 1
        self.orders.fire(
            worker,
            stage.name,
            action,
            step.number,
            keys=keys,
            inputs=step.inputs(stage, rows) if keys else (),
            version=version,
            settings=settings,
            missing=len(keys) if missing is None else missing,
        )


def _even(keys: Sequence[Key], whole_groups: bool, count: int) -> list[Sequence[Key]]:
    """`count` parts of about equal size."""
    if count == 1 or not whole_groups:
        return parts(keys, count)
    groups = [list(members) for _, members in groupby(keys, key=itemgetter(1))]
    return [[key for group in part for key in group] for part in parts(groups, count)]


def _readers_of(plan: Plan, models: list[str]) -> dict[str, list[str]]:
    """Stages that read the weights of each model, other than its update."""
    readers = [stage for stage in plan.stages.values() if stage.action in ("rollout", "forward", "judge")]
    return {model: [stage.name for stage in readers if plan.model_of[stage.name] == model] for model in models}

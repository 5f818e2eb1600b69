"""What answers bring: rows that exist now, and rows that will not pass.

An answer that says again what is known changes nothing, so that a row passes a stage once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flowrl.backend import Sum
from flowrl.graph import FunctionSpec, JudgeSpec, Node, RolloutSpec
from flowrl.rows import PROMPT, Key

from .course import shown
from .events import MAKES_SAMPLES, Block
from .ledger import Ledger
from .orders import Lease, Orders, reasons
from .plan import Plan
from .progress import StageProgress, StepRows
from .step_metrics import StepMetrics


class Intake:
    """Takes the rows of answers into their step.

    Args:
        steps: the open ones.
    """

    def __init__(
        self, plan: Plan, orders: Orders, steps: dict[int, StepRows], ledgers: dict[str, Ledger], metrics: StepMetrics
    ) -> None:
        self.plan = plan
        self.orders = orders
        self.steps = steps
        self.ledgers = ledgers
        self.metrics = metrics

    def accept(self, lease: Lease, block: Block) -> None:
        """Rows of a block that are new pass on."""
        node, step = lease.firing.node, self.steps[lease.firing.step]
        progress, counts = step.stages[node], self.orders.counts
        if lease.firing.action in MAKES_SAMPLES:
            fresh = self.ledgers[node].produce(step.number, block.keys)
        else:
            fresh = set(block.keys) - progress.done - progress.held
            if progress.dead:
                fresh.difference_update(progress.dead)
        counts[node, "repeated"] += len(block.keys) - len(fresh)
        if not fresh:
            self.orders.free([block])
            return
        counts[node, "passed"] += len(fresh)
        step.place(node, block, fresh)
        if lease.firing.action == "prompts":
            progress.done |= fresh  # they are delivered together: their number decides which rank gets which
        else:
            lease.missing -= len(fresh)
            if progress.holds:
                progress.held |= fresh
            else:
                step.deliver(node, fresh)

    def drop(self, lease: Lease, keys: Collection[Key], reason: str) -> None:
        """Rows will not pass; a prompt that its rollout drops takes its samples along."""
        firing = lease.firing
        self.orders.counts[firing.node, "dropped"] += len(keys)
        if firing.action == "prompts":
            return  # a prompt that was never given out has no row
        step = self.steps[firing.step]
        progress = step.stages[firing.node]
        if firing.action in MAKES_SAMPLES:
            prompts = [key for key in keys if key.sample == PROMPT]
            keys = [*step.samples(firing.node, prompts), *(key for key in keys if key.sample != PROMPT)]
        known = (progress.dead, progress.done, progress.held)
        new = [key for key in keys if not any(key in rows for rows in known)]
        lease.missing -= len(new)
        progress.dropped += len(new)
        self.metrics.add(step.number, {"num_dropped": Sum(len(new), 1)})
        step.drop(firing.node, new, reason)

    def too_many_failures(self, progress: StageProgress, step: int) -> dict[str, Any] | None:
        """What is wrong once more than the declared share of a step's rows has failed in a node."""
        name = progress.stage.name
        spec = called_by(self.plan.graph[name])
        if not (progress.dropped and progress.caught_up and spec is not None and spec.on_error == "drop"):
            return None
        called = progress.dropped + len(progress.done)
        if progress.dropped <= spec.max_failure_rate * called:
            return None
        return {
            "type": "NodeError",
            "problem": f"node '{name}' failed for {progress.dropped} of {called} rows of step {shown(step)}",
            "found": reasons(progress.dead.values()),
            "wanted": f"at most {spec.max_failure_rate:.0%} (max_failure_rate)",
            "fix": "repair the function, or allow more: max_failure_rate=",
            "node": name,
        }


def called_by(node: Node) -> FunctionSpec | None:
    """The function whose failures drop a node's rows: its own, a rollout's tool, or what reads a judge's answers."""
    if isinstance(node.spec, RolloutSpec):
        return node.spec.tool.call if node.spec.tool else None
    if isinstance(node.spec, JudgeSpec):
        return node.spec.read
    return node.spec if isinstance(node.spec, FunctionSpec) else None

"""How a step ends: once nothing of it runs and every row is passed on or dropped at every stage.

Then the ledger learns what became of each row, the step's blocks are freed and its line is written, in order of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flowrl.backend import Sum

from .course import Course
from .dispatch import Dispatch
from .evaluations import Evaluations
from .events import StepDone
from .ledger import Ledger
from .orders import Orders
from .plan import Plan
from .progress import StepRows, by_reason
from .step_metrics import StepMetrics
from .waves import Waves


class Closing:
    """Closes steps.

    Args:
        steps: the open ones, in order; closed ones are taken out.
    """

    def __init__(
        self,
        plan: Plan,
        orders: Orders,
        course: Course,
        steps: dict[int, StepRows],
        ledgers: dict[str, Ledger],
        metrics: StepMetrics,
        evaluations: Evaluations,
        dispatch: Dispatch,
        waves: Waves,
    ) -> None:
        self.plan = plan
        self.orders = orders
        self.course = course
        self.steps = steps
        self.ledgers = ledgers
        self.metrics = metrics
        self.evaluations = evaluations
        self.dispatch = dispatch
        self.waves = waves
        self.planned: Counter[str] = Counter()
        """Rows that stages are to handle, of the steps whose prompts are read."""
        self.executed: Counter[str] = Counter()
        """Those that they have passed on, or that were dropped before or in them; of closed steps."""

    def expect(self, more: Mapping[str, int]) -> None:
        """Prompts are read: these stages get so many more rows."""
        self.planned.update(more)

    def go_on(self) -> None:
        """Close what is over."""
        while (step := self.steps.get(self.course.closed)) and not self.orders.of_step[step.number]:
            in_run = step.number < self.course.end
            if in_run and not self._is_over(step):
                return
            self._settle(step, in_run)
            if in_run:
                self.waves.forget(step)
            self._forget(step)
            metrics = self.metrics.close(step.number)
            if in_run:
                self.orders.commands.append(StepDone(step.number, metrics))

    def _is_over(self, step: StepRows) -> bool:
        fired = (progress for progress in step.stages.values() if self.dispatch.is_fired(progress.stage))
        if not all(progress.finished for progress in fired) or not self.dispatch.is_trained(step):
            return False
        evaluated = not self.evaluations.holds_open(step.number) and self._next_is_known(step)
        return evaluated or not self.evaluations.stages

    def _next_is_known(self, step: StepRows) -> bool:
        """Whether it is known if this is the last step: the last version is evaluated."""
        following = self.steps.get(step.number + 1)
        return step.number + 1 >= self.course.end or (following is not None and self.dispatch.is_read(following))

    def _settle(self, step: StepRows, in_run: bool) -> None:
        """Enter into the ledger what became of each row."""
        number = step.number
        for space, ledger in self.ledgers.items():
            terminals = [step.stages[stage.name] for stage in self.plan.in_space[space] if stage.terminal]
            consumed = set().union(*(progress.done for progress in terminals)) if in_run else set()
            left = ledger.open_rows(number) - consumed
            if consumed:
                lags = ledger.consume(number, consumed, number)
                mean = Sum(sum(lag * rows for lag, rows in lags.items()), len(consumed))
                self.metrics.add(number, {"lag": mean})
            dead = {key: why for progress in terminals for key, why in progress.dead.items() if key in left}
            for reason, keys in by_reason(dead if in_run else dict.fromkeys(left, "the data ended")).items():
                ledger.drop(number, set(keys), reason)
            ledger.close(number)
        for name, progress in step.stages.items():
            if in_run:
                self.executed[name] += len(progress.done) + len(progress.dead)
            else:
                self.planned[name] -= len(progress.expected)

    def _forget(self, step: StepRows) -> None:
        self.orders.free(step.blocks)
        self.dispatch.forget(step)
        del self.steps[step.number], self.orders.of_step[step.number]
        self.course.closed += 1

"""Adaptive coefficients that are settings of functions (`flowrl.adaptive`): their value at each version.

With each version that an update makes, its coefficients move by the KL that its passes have measured, of each row once:
in the first epoch. The rows of step s are computed with the value of version ``s - staleness``, the newest that is sure
to be known when the first of them is ready; at staleness 0 it is what the step before has led to. So all rows of a step
see one value, which is a function of the step and not of who was first, and a resumed run finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from flowrl.adaptive import AdaptiveSetting
from flowrl.backend import Metrics, Sum
from flowrl.coefficients import Adaptive
from flowrl.errors import CheckpointError
from flowrl.graph import UpdateSpec

from .plan import Plan


class Moving:
    """One coefficient, by version.

    Args:
        coefficient: how it moves.
        staleness: of the rollout whose rows it is a setting for.
        first_step: the step that the run begins with.
        state: the `state` of that version; None for a run that starts anew.
    """

    def __init__(self, coefficient: Adaptive, staleness: int, *, first_step: int = 0, state: object = None) -> None:
        self.coefficient = coefficient
        self.staleness = staleness
        known = [coefficient.initial] if state is None else _read(state)
        self._values = dict(enumerate(known, first_step + 1 - len(known)))
        """By version, the oldest first."""

    def at(self, step: int) -> float:
        """The value for the rows of a step; that of the oldest version for the steps before there were more."""
        return self._values[max(step - self.staleness, next(iter(self._values)))]

    def move(self, step: int, kl: Sum, num_rows: int) -> None:
        """A step has measured this KL: the value of the version that it makes."""
        before = self._values[step]
        self._values[step + 1] = self.coefficient.after(before, kl.mean, num_rows) if kl.weight else before

    def state(self, version: int) -> list[float]:
        """What a run that goes on at a version must know: the values up to it that steps from there on see."""
        return [value for number, value in self._values.items() if version - self.staleness <= number <= version]

    def forget(self, step: int) -> None:
        """A step is over, and all before it."""
        needed = step + 1 - self.staleness
        self._values = {number: value for number, value in self._values.items() if number >= needed}


class AdaptiveSettings:
    """All coefficients of a run that are settings of functions.

    Args:
        state: by name, those of a checkpoint's version.
    """

    def __init__(self, plan: Plan, *, first_step: int, state: Mapping[str, Any]) -> None:
        self._moving: dict[AdaptiveSetting, Moving] = {}
        for each in plan.adaptive:
            staleness, known = plan.staleness[plan.stages[each.node].space], state.get(each.name)
            self._moving[each] = Moving(each.coefficient, staleness, first_step=first_step, state=known)
        specs = [node.spec for node in plan.graph.nodes.values()]
        in_losses = sum(len(spec.loss.adaptive) for spec in specs if isinstance(spec, UpdateSpec))
        self._is_only = len(plan.adaptive) + in_losses == 1

    def settings(self, node: str, step: int) -> dict[str, float]:
        """What stands in place of a function's coefficients for the rows of a step."""
        return {each.setting: moving.at(step) for each, moving in self._moving.items() if each.node == node}

    def move(self, update: str, step: int, kl: Sum, num_rows: int) -> Metrics:
        """An update is about to make a version; what its step was computed with, as metrics."""
        metrics: Metrics = {}
        for each, moving in self._moving.items():
            if each.update != update:
                continue
            label = each.coefficient.label
            metrics[label if self._is_only else f"{label}/{each.name}"] = Sum(moving.at(step), 1.0)
            moving.move(step, kl, num_rows)
        return metrics

    def states(self, version: int) -> dict[str, list[float]]:
        """By name: what a run that goes on at a version must know."""
        return {each.name: moving.state(version) for each, moving in self._moving.items()}

    def forget(self, step: int) -> None:
        """A step is over, and all before it."""
        for moving in self._moving.values():
            moving.forget(step)


def _read(state: object) -> list[float]:
    if not isinstance(state, list) or not state or not all(map(_is_coefficient, state)):
        raise CheckpointError(
            "an adaptive coefficient cannot be read",
            found=repr(state)[:80],
            wanted="numbers > 0, by version",
            fix="resume from an earlier checkpoint: move this one's folder away",
        )
    return state


def _is_coefficient(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and 0 < value < float("inf")

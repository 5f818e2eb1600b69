"""Coefficients that move with training, by what it has measured.

Each is given in place of a number as a setting of a loss function, and moves from one optimizer step to the next. Its
value is the same on every rank, and part of the trained model's checkpoint. An `Adaptive` one may be a setting of a
node's function too, and moves from one version to the next (`flowrl.adaptive`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import WrongType
from .kl import adapt

LARGEST = 1e4
"""Of a multiplier: a constraint that nothing can meet would otherwise end in infinity."""
SMALLEST = 1e-4
"""Of a multiplier: one that a large step makes 0 would stay there, whatever the cost becomes."""


class Coefficient(ABC):
    """A number that follows a metric of the loss; the base of those below."""

    __slots__ = ()
    metric: ClassVar[str]
    """Whose mean over the mini-batch moves it."""
    column: ClassVar[str]
    """That a loss has to read for the metric to be measured."""
    usage: ClassVar[str]
    """How it is given to a loss, for errors."""
    label: ClassVar[str]
    """What its value is called in the metrics."""
    initial: float
    """Of the first optimizer step."""

    @abstractmethod
    def after(self, coefficient: float, observed: float, num_rows: int) -> float:
        """The one of the next optimizer step.

        Args:
            coefficient: of the step just made.
            observed: the mean of `metric` over the whole mini-batch, on all ranks.
            num_rows: responses that it was trained on.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive(Coefficient):
    """A coefficient that follows the KL of an update, for ``losses.kl(coef=fl.Adaptive(...))`` and
    ``advantages.token_rewards(..., kl_coef=fl.Adaptive(...))``.

    `adapt` moves it: in a loss after each optimizer step, by the mean KL of all trained tokens of the mini-batch on all
    ranks; in a function with each version, by that of the batch (see `flowrl.advantages.token_rewards`). Its value is
    part of the checkpoint, and is reported as ``kl_coef``.
    """

    metric: ClassVar[str] = "kl"
    column: ClassVar[str] = "ref_logprobs"
    usage: ClassVar[str] = "losses.kl(coef=fl.Adaptive(...))"
    label: ClassVar[str] = "kl_coef"
    initial: float
    """Of the first optimizer step, > 0: a factor never leaves 0."""
    target: float
    """KL to keep, in nats a token, > 0."""
    horizon: int = 10_000
    """Responses over which a KL of 20% above target multiplies it by about 1.2; those of a step, if they are more."""

    def __post_init__(self) -> None:
        if not all(_is_positive(value) for value in (self.initial, self.target, self.horizon)):
            raise WrongType(
                "an adaptive coefficient starts, aims and moves by positive numbers",
                found=f"initial={self.initial}, target={self.target}, horizon={self.horizon}",
                wanted="each > 0",
                fix="fl.Adaptive(initial=0.1, target=0.05)",
            )

    def after(self, coefficient: float, observed: float, num_rows: int) -> float:
        """See `Coefficient.after`; `observed` is the mean KL in nats a token."""
        return adapt(coefficient, observed, target=self.target, samples=num_rows, horizon=self.horizon)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lagrange(Coefficient):
    """The multiplier of a constraint "cost <= limit", for ``losses.ppo_lagrangian(multiplier=fl.Lagrange(...))``.

    Gradient ascent on its logarithm after each optimizer step, so that it stays positive: ``log m += lr * m * (cost -
    limit)``, eq. 31 of Dai et al. 2023 (arXiv:2310.12773).
    """

    metric: ClassVar[str] = "cost"
    column: ClassVar[str] = "costs"
    usage: ClassVar[str] = "losses.ppo_lagrangian(multiplier=fl.Lagrange(...))"
    label: ClassVar[str] = "multiplier"
    limit: float
    """Mean cost of a response that is allowed."""
    initial: float = 1.0
    """From 1e-4 to 1e4, as every later one."""
    lr: float = 0.1
    """Of the multiplier, > 0."""

    def __post_init__(self) -> None:
        starts = _is_positive(self.initial) and SMALLEST <= self.initial <= LARGEST
        if not starts or not _is_positive(self.lr) or not _is_number(self.limit):
            raise WrongType(
                "a multiplier starts and moves by positive numbers, towards a finite limit",
                found=f"initial={self.initial}, lr={self.lr}, limit={self.limit}",
                wanted=f"{SMALLEST:g} <= initial <= {LARGEST:g}, lr > 0, a number as limit",
                fix="fl.Lagrange(limit=0.1)",
            )

    def after(self, coefficient: float, observed: float, num_rows: int) -> float:
        """See `Coefficient.after`; `observed` is the mean cost of a response."""
        moved = math.log(coefficient) + self.lr * coefficient * (observed - self.limit)
        return math.exp(min(max(moved, math.log(SMALLEST)), math.log(LARGEST)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0

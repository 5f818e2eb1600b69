"""Checkpoints: written between two versions of all trained models, published once the step before is closed."""

from __future__ import annotations

from typing import Any

from .adaptive import AdaptiveSettings
from .course import Course, Options
from .events import Saved
from .orders import Orders
from .waves import Waves
from .weights import Weights


class Saves:
    """When to save, and what is being saved."""

    def __init__(
        self,
        options: Options,
        orders: Orders,
        weights: Weights,
        course: Course,
        waves: Waves,
        adaptive: AdaptiveSettings,
    ) -> None:
        self.options = options
        self.orders = orders
        self.weights = weights
        self.course = course
        self.waves = waves
        self.adaptive = adaptive
        self.unpublished: int | None = None
        """A version that is written or being written, and not published yet."""
        self._newest = options.first_step
        self._writing = 0
        """Ranks that still write."""
        self._cursors: dict[str, Any] = {}
        """Where the prompts of a run stand that goes on at the version which is being saved."""
        self._coefficients: dict[str, Any] = {}
        """And the adaptive settings of its functions."""

    def due(self, version: int) -> bool:
        """Whether a version is to be saved and is not yet: nothing is trained on it until then."""
        every = self.options.save_every
        due = every is not None and (version % every == 0 or version == self.course.end)
        return due and version > self._newest

    def go_on(self) -> None:
        """Publish what is written, then write what is due."""
        if self.unpublished is not None:
            if self._writing or self.course.closed < self.unpublished:
                return
            self.orders.commands.append(Saved(self.unpublished, self._cursors, self._coefficients))
            self.unpublished = None
        if self.options.save_every is None:
            return
        versions = set(self.weights.versions.values())
        if len(versions) == 1 and self.due(version := versions.pop()):
            self._newest = self.unpublished = version
            self._cursors, self._coefficients = self.waves.states(version), self.adaptive.states(version)
            for pool in dict.fromkeys(self.weights.home.values()):
                settings = {"folder": self.options.save_to, "models": self.weights.trained_on(pool)}
                self._writing += self.orders.fire_on_all(pool, pool, "save", version=version, settings=settings)

    def after_save(self) -> None:
        """A rank has written its part."""
        self._writing -= 1

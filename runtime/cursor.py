"""The prompt cursor: which batches of a source each step reads, where a step may read more than its own.

Without refill the batches of a step are a function of its number. With it they depend on how many waves the steps
before took, and so that nothing else may matter, least of all which worker was first, batches are given out in one
order: those that steps 0 to `staleness` begin with; then, step by step, what a step reads again, and, once it is closed
to new prompts, those that begin the step ``staleness + 1`` after it. No rollout waits for that: a step this far ahead
may not start before its predecessor has trained.

What a run needs to go on at a step are the batches that were given to it and to later steps when its predecessor was
closed, and the first that nobody was given: `Cursor.state`. Steps that were open and not consumed get theirs again, so
each batch is consumed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from flowrl.errors import CheckpointError


class Cursor:
    """Gives out the batches of one source, each once.

    Args:
        per_step: batches that a step begins with.
        staleness: steps after the first open one that may begin before it is closed.
        first_step: the step that the run begins with.
        state: the `state` of that step; None for a run that starts anew, or has no waves behind it.
    """

    def __init__(
        self, per_step: int, staleness: int, *, first_step: int = 0, state: Mapping[str, Any] | None = None
    ) -> None:
        self.per_step = per_step
        self.staleness = staleness
        self.open = first_step
        """The first step that may still read prompts."""
        self._given: dict[int, tuple[int, ...]] = {}
        """What steps that are not closed begin with."""
        self._next, given = _read(state, first_step * per_step)
        self._given.update((first_step + i, batches) for i, batches in enumerate(given))
        self._states = {first_step: self._state()}
        self._give()

    def first(self, step: int) -> tuple[int, ...] | None:
        """The batches that a step begins with; None while an earlier step comes before it."""
        return self._given.get(step)

    def again(self, step: int, count: int) -> tuple[int, ...]:
        """Further batches for the first step that is open."""
        assert step == self.open, "an earlier step may still read"
        return self._take(count)

    def close(self, step: int) -> None:
        """The first step that is open reads no more."""
        assert step == self.open
        self.open += 1
        self._given.pop(step)
        self._states[self.open] = self._state()
        self._give()

    def state(self, step: int) -> dict[str, Any]:
        """What a run that goes on at a step must know: plain values. The step before it is closed."""
        return self._states[step]

    def forget(self, step: int) -> None:
        """No run will go on at this step, or an earlier one."""
        self._states = {number: state for number, state in self._states.items() if number > step}

    def _state(self) -> dict[str, Any]:
        return {"next": self._next, "given": [list(self._given[step]) for step in sorted(self._given)]}

    def _give(self) -> None:
        for step in range(self.open, self.open + self.staleness + 1):
            if step not in self._given:
                self._given[step] = self._take(self.per_step)

    def _take(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))


def _read(state: Mapping[str, Any] | None, first: int) -> tuple[int, list[tuple[int, ...]]]:
    """The next batch, and those given out already."""
    if state is None:
        return first, []
    following, given = state.get("next"), state.get("given")
    if not _is_count(following) or not isinstance(given, Sequence) or not all(map(_is_batches, given)):
        raise CheckpointError(
            "a prompt cursor cannot be read",
            found=repr(state)[:80],
            wanted="{'next': a number, 'given': lists of numbers}",
            fix="resume from an earlier checkpoint: move this one's folder away",
        )
    return following, [tuple(batches) for batches in given]


def _is_batches(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_count, value))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

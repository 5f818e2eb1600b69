"""The ledger: what became of every row.

A row is ``issued``, then ``produced``, then ``consumed`` or ``dropped`` with a reason: each exactly once. Work is *leased* to
a firing; an answer counts only under the newest attempt of its lease, so that a late one can neither train a row twice nor
bring one back. Rows of closed steps are folded into totals: the ledger's memory is that of the steps in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from flowrl.errors import LedgerError
from flowrl.rows import Key


class State(Enum):
    """Where a row stands."""

    ISSUED = "issued"
    PRODUCED = "produced"
    CONSUMED = "consumed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Totals:
    """The ledger's sums."""

    issued: int
    produced: int
    consumed: int
    dropped: dict[str, int]
    """By reason."""
    open: int
    """Rows that are neither consumed nor dropped."""
    max_lag: int
    """Largest trainer version minus row version at consumption."""

    @property
    def balanced(self) -> bool:
        """Whether every row that was issued is consumed, dropped or open."""
        return self.issued == self.consumed + sum(self.dropped.values()) + self.open


class Ledger:
    """Row states of one rollout's samples.

    Args:
        staleness: no row may start more than this many versions ahead of the trainer, nor be consumed with a larger lag.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._steps: dict[int, dict[State, set[Key]]] = {}
        self._versions: dict[int, dict[Key, int]] = {}
        self._counts: Counter[State] = Counter()
        self._reasons: Counter[str] = Counter()
        self._max_lag = 0

    def admits(self, step: int, version: int) -> bool:
        """Whether a prompt of `step` may start while the trainer has `version`."""
        return step <= version + self.staleness

    def issue(self, step: int, keys: Collection[Key], version: int) -> None:
        """Rows of a step are about to be sampled by weights of `version`.

        Raises:
            LedgerError: one of them was issued before.
        """
        states = self._steps.setdefault(step, {state: set() for state in State})
        versions = self._versions.setdefault(step, {})
        if again := [key for key in keys if key in versions]:
            raise LedgerError(f"{again[0]} is issued twice")
        states[State.ISSUED].update(keys)
        self._counts[State.ISSUED] += len(keys)
        versions.update(dict.fromkeys(keys, version))

    def reissue(self, step: int, keys: Collection[Key], version: int) -> list[Key]:
        """Sample again those of the rows of a lost lease that do not exist yet."""
        again = [key for key in keys if key in self._steps[step][State.ISSUED]]
        self._versions[step].update(dict.fromkeys(again, version))
        return again

    def produce(self, step: int, keys: Collection[Key]) -> list[Key]:
        """Rows exist. Those that existed already are left out of the result: a second answer changes nothing."""
        states = self._steps.get(step)
        fresh = [key for key in keys if key in states[State.ISSUED]] if states else []
        self._move(step, fresh, State.ISSUED, State.PRODUCED)
        return fresh

    def consume(self, step: int, keys: Collection[Key], version: int) -> None:
        """Rows are trained while the trainer has `version`.

        Raises:
            LedgerError: a row is consumed twice, was dropped, or lags more than the staleness.
        """
        self._move(step, keys, State.PRODUCED, State.CONSUMED)
        if keys:
            lag = version - min(map(self._versions[step].__getitem__, keys))
            self._max_lag = max(self._max_lag, lag)
            if lag > self.staleness:
                raise LedgerError(f"a row of step {step} is consumed with lag {lag}; the staleness is {self.staleness}")

    def drop(self, step: int, keys: Collection[Key], reason: str) -> None:
        """Rows will not be trained; they may or may not exist.

        Raises:
            LedgerError: a row was consumed or dropped before, or never issued.
        """
        issued = self._steps[step][State.ISSUED] if step in self._steps else set()
        unborn = [key for key in keys if key in issued]
        born = [key for key in keys if key not in issued]
        self._move(step, unborn, State.ISSUED, State.DROPPED)
        self._move(step, born, State.PRODUCED, State.DROPPED)
        self._reasons[reason] += len(keys)

    def state(self, key: Key) -> State | None:
        """None before a row is issued, and once its step is closed."""
        states = self._steps.get(key.step, {})
        return next((state for state, keys in states.items() if key in keys), None)

    def lag(self, step: int, keys: Collection[Key], version: int) -> list[int]:
        """Trainer version minus each row's."""
        return [version - self._versions[step][key] for key in keys]

    def open_rows(self, step: int) -> set[Key]:
        """Rows of a step that are neither consumed nor dropped."""
        states = self._steps.get(step)
        return states[State.ISSUED] | states[State.PRODUCED] if states else set()

    def close(self, step: int) -> None:
        """Fold a step into the totals.

        Raises:
            LedgerError: one of its rows is still open.
        """
        if left := self.open_rows(step):
            raise LedgerError(f"step {step} is closed with {len(left)} open rows, the first {min(left)}")
        self._steps.pop(step, None)
        self._versions.pop(step, None)

    def totals(self) -> Totals:
        """Sums so far."""
        return Totals(
            issued=self._counts[State.ISSUED],
            produced=self._counts[State.PRODUCED],
            consumed=self._counts[State.CONSUMED],
            dropped=dict(self._reasons),
            open=sum(len(self.open_rows(step)) for step in self._steps),
            max_lag=self._max_lag,
        )

    def __len__(self) -> int:
        """Rows in memory."""
        return sum(map(len, self._versions.values()))

    def _move(self, step: int, keys: Collection[Key], before: State, after: State) -> None:
        if not keys:
            return
        states = self._steps.get(step, {state: set() for state in State})
        if not states[before].issuperset(keys):
            stray = next(key for key in keys if key not in states[before])
            found = self.state(stray)
            raise LedgerError(f"{stray} cannot be {after.value}: it is {found.value if found else 'unknown'}")
        if len(set(keys)) != len(keys):
            raise LedgerError(f"rows of step {step} are {after.value} twice in one call")
        states[before].difference_update(keys)
        states[after].update(keys)
        self._counts[after] += len(keys)

"""The ledger: what became of every row.

A row is ``issued``, then ``produced``, then ``consumed`` or ``dropped`` with a reason: each exactly once. A late answer
can neither train a row twice nor bring one back. Rows of closed steps are folded into totals: the ledger's memory is
that of the steps in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from flowrl.errors import LedgerError
from flowrl.rows import Key

MAX_REASONS = 64
"""Reasons that are counted one by one: a reason that quotes its row would be one for each."""
OTHER = "other reasons"
SHOWN_REASONS = 3


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


@dataclass(slots=True)
class _Step:
    """The rows of one step."""

    rows: dict[State, set[Key]] = field(default_factory=lambda: {state: set() for state in State})
    versions: dict[int, set[Key]] = field(default_factory=dict)
    """Rows by the version that samples them."""


def most_frequent(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """The most frequent reasons with their counts; all others together come last."""
    counted = Counter(reasons)
    others = counted.pop(OTHER, 0)
    ranked = counted.most_common()
    others += sum(count for _, count in ranked[SHOWN_REASONS:])
    return ranked[:SHOWN_REASONS] + ([(OTHER, others)] if others else [])


class Ledger:
    """Row states of one rollout's samples.

    Args:
        staleness: most versions that a row may start ahead of the trainer, and its largest lag when consumed.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._steps: dict[int, _Step] = {}
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
        entry = self._steps.get(step) or self._steps.setdefault(step, _Step())
        new = set(keys)
        known = next((rows & new for rows in entry.rows.values() if rows & new), None)
        if known or len(new) < len(keys):
            raise LedgerError(f"{min(known or new)} is issued twice")
        entry.rows[State.ISSUED] |= new
        entry.versions.setdefault(version, set()).update(new)
        self._counts[State.ISSUED] += len(new)

    def reissue(self, step: int, keys: Collection[Key], version: int) -> set[Key]:
        """Weights of `version` sample again those of the rows of a lost lease that do not exist yet."""
        entry = self._steps[step]
        again = entry.rows[State.ISSUED].intersection(keys)
        for rows in entry.versions.values():
            rows -= again
        entry.versions.setdefault(version, set()).update(again)
        return again

    def produce(self, step: int, keys: Collection[Key]) -> set[Key]:
        """Rows exist. Those that existed already are left out of the result: a second answer changes nothing."""
        entry = self._steps.get(step)
        fresh = entry.rows[State.ISSUED].intersection(keys) if entry else set()
        self._move(step, fresh, State.ISSUED, State.PRODUCED)
        return fresh

    def consume(self, step: int, keys: Set[Key], version: int) -> Counter[int]:
        """Rows are trained while the trainer has `version`. Returns their number by lag: `version` minus the row's.

        Raises:
            LedgerError: a row is consumed twice, was dropped, or lags more than the staleness.
        """
        self._move(step, keys, State.PRODUCED, State.CONSUMED)
        versions = self._steps[step].versions if keys else {}
        lags = +Counter({version - own: len(rows & keys) for own, rows in versions.items()})
        lag = max(lags, default=0)
        self._max_lag = max(self._max_lag, lag)
        if lag > self.staleness:
            raise LedgerError(f"a row of step {step + 1} is consumed with lag {lag}; the staleness is {self.staleness}")
        return lags

    def drop(self, step: int, keys: Set[Key], reason: str) -> None:
        """Rows will not be trained; they may or may not exist.

        Raises:
            LedgerError: a row was consumed or dropped before, or never issued.
        """
        unborn = keys & self._steps[step].rows[State.ISSUED] if step in self._steps else set()
        self._move(step, unborn, State.ISSUED, State.DROPPED)
        self._move(step, keys - unborn, State.PRODUCED, State.DROPPED)
        known = reason in self._reasons or len(self._reasons) < MAX_REASONS
        self._reasons[reason if known else OTHER] += len(keys)

    def state(self, key: Key) -> State | None:
        """None before a row is issued, and once its step is closed."""
        entry = self._steps.get(key.step)
        return next((state for state, keys in entry.rows.items() if key in keys), None) if entry else None

    def open_rows(self, step: int) -> set[Key]:
        """Rows of a step that are neither consumed nor dropped."""
        entry = self._steps.get(step)
        return entry.rows[State.ISSUED] | entry.rows[State.PRODUCED] if entry else set()

    def close(self, step: int) -> None:
        """Fold a step into the totals.

        Raises:
            LedgerError: one of its rows is still open.
        """
        if left := self.open_rows(step):
            raise LedgerError(f"step {step + 1} is closed with {len(left)} open rows, the first {min(left)}")
        self._steps.pop(step, None)

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
        return sum(len(rows) for entry in self._steps.values() for rows in entry.rows.values())

    def _move(self, step: int, keys: Set[Key], before: State, after: State) -> None:
        if not keys:
            return
        entry = self._steps.get(step)
        if stray := keys - entry.rows[before] if entry else keys:
            found = self.state(min(stray))
            raise LedgerError(f"{min(stray)} cannot be {after.value}: it is {found.value if found else 'unknown'}")
        assert entry is not None
        entry.rows[before] -= keys
        entry.rows[after] |= keys
        self._counts[after] += len(keys)

"""Which rows of a step each stage may take: joins, groups and dropped rows, on keys alone.

A stage waits for some sources. A row is *ready* at a stage once every source has delivered it, *taken* once it was given to
a firing, *done* once the stage has passed it on. A row that a stage drops is *dead* at every stage that waits for it, and at
theirs: but alive in branches that do not. A group may go once each member is ready or dead, so that a filter in one branch
of a diamond never starves the join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from flowrl.rows import Key

from .events import Block, Input
from .plan import Plan, Stage


class StageProgress:
    """The rows of one step at one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.expected: frozenset[Key] = frozenset()
        self.group_sizes: Counter[int] = Counter()
        self.ready: set[Key] = set()
        self.taken: set[Key] = set()
        self.done: set[Key] = set()
        self.dead: dict[Key, str] = {}
        self.running = 0
        """Firings that have not ended."""
        self._arrived: dict[str, set[Key]] = {source: set() for source in stage.waits_for}
        self._settled_of_group: Counter[int] = Counter()

    def expect(self, keys: Collection[Key]) -> None:
        """The rows of the step, as far as this stage is concerned."""
        self.expected = frozenset(keys)
        self.group_sizes = Counter(key.prompt for key in keys)

    def arrive(self, source: str, keys: Iterable[Key]) -> None:
        """`source` has passed these rows."""
        new = set(keys) - self._arrived[source]
        self._arrived[source] |= new
        for other, arrived in self._arrived.items():
            if other != source:
                new &= arrived
        new -= self.dead.keys()
        self.ready |= new
        self._settled_of_group.update(key.prompt for key in new)

    def kill(self, keys: Iterable[Key], reason: str) -> list[Key]:
        """These rows will never come. Returns those that were not known to be dead."""
        new = [key for key in keys if key not in self.dead]
        self.dead.update(dict.fromkeys(new, reason))
        self._settled_of_group.update(key.prompt for key in new if key not in self.taken and key not in self.done)
        return new

    def take(self, keys: Collection[Key]) -> None:
        """Give ready rows to a firing."""
        self.ready.difference_update(keys)
        self.taken.update(keys)

    def settled(self, keys: Collection[Key]) -> bool:
        """Whether each of these rows has come or is dead."""
        return all(key in self.ready or key in self.dead or key in self.taken for key in keys)

    def complete_groups(self) -> list[Key]:
        """Ready rows of groups whose every member has come or is dead, in order of their keys."""
        if not self.ready:
            return []
        complete = {
            prompt
            for prompt in {key.prompt for key in self.ready}
            if self._settled_of_group[prompt] == self.group_sizes[prompt]
        }
        return sorted(key for key in self.ready if key.prompt in complete)

    @property
    def complete(self) -> bool:
        """Whether every row of the step has come or is dead."""
        return len(self.ready) + len(self.taken) + len(self.dead.keys() - self.taken) >= len(self.expected)

    @property
    def finished(self) -> bool:
        """Whether every row of the step is passed on or dead here, and no firing runs."""
        return not self.running and len(self.done | self.dead.keys()) >= len(self.expected)


@dataclass(slots=True)
class StepRows:
    """All stages of one step, and where its rows lie."""

    number: int
    plan: Plan
    stages: dict[str, StageProgress] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    _places: dict[str, dict[Key, tuple[Block, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = {name: StageProgress(stage) for name, stage in self.plan.stages.items()}

    def deliver(self, source: str, keys: Collection[Key]) -> None:
        """`source` is done with these rows: tell those who wait for it."""
        self.stages[source].done.update(keys)
        for reader in self.plan.readers(source):
            self.stages[reader.name].arrive(source, keys)

    def drop(self, source: str, keys: Collection[Key], reason: str) -> None:
        """`source` passes these rows to nobody: they are dead for all that wait for it, directly or not."""
        new = self.stages[source].kill(keys, reason)
        for reader in self.plan.readers(source) if new else ():
            self.drop(reader.name, new, reason)

    def place(self, source: str, block: Block, keys: Collection[Key]) -> None:
        """Remember where those rows of a block lie that nobody made before."""
        self.blocks.append(block)
        places = self._places.setdefault(source, {})
        fresh = set(keys)
        places.update((key, (block, row)) for row, key in enumerate(block.keys) if key in fresh)

    def inputs(self, stage: Stage, keys: Collection[Key]) -> tuple[Input, ...]:
        """The parts of blocks that hold what a stage reads of these rows; rows that a source never made are left out."""
        return tuple(part for source, columns in stage.reads for part in self._inputs(source, columns, keys))

    def lengths(self, source: str, keys: Iterable[Key]) -> list[int]:
        """Tokens of each row, as its rollout counted them."""
        places = self._places.get(source, {})
        found = (places[key] for key in keys)
        return [block.lengths[row] if block.lengths is not None else 1 for block, row in found]

    def _inputs(self, source: str, columns: tuple[str, ...], keys: Collection[Key]) -> Iterable[Input]:
        places = self._places.get(source, {})
        if self.plan.stages[source].action == "prompts":
            keys = list(dict.fromkeys(key.group for key in keys))
        rows_of: dict[int, tuple[Block, list[int]]] = {}
        for key in keys:
            place = places.get(key)
            if place is not None:
                rows_of.setdefault(id(place[0]), (place[0], []))[1].append(place[1])
        for block, rows in rows_of.values():
            whole = len(rows) == len(block.keys) and rows == list(range(len(rows)))
            yield Input(source, block.worker, block.number, None if whole else tuple(rows), columns)

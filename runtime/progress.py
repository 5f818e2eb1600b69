"""Which rows of a step each stage may take: joins, groups and dropped rows, on keys alone.

A stage waits for some sources. A row is *ready* at a stage once every source has passed it on, and *done* once the
stage itself has. A row that a stage drops is *dead* at every stage that waits for it, and at theirs: but alive in
branches that do not. What has come and what is dead is *settled*: a group may go once each member is, so that a filter
in one branch of a diamond never starves the join.

The rows of a step are known when its prompts are read, and all of them are once it is *closed* to new prompts. That is
at once, unless a filter refills the step (waves.py): then prompts come in waves, each with rows of its own for the
stages before and beside the filter, and the stages behind it share out the rows of those prompts that it has kept.

A step of 256 rows passes eight stages in a millisecond only if no Python runs a row: work on rows is work on sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from operator import itemgetter
from typing import TypeVar

from flowrl.rows import Key

from .events import MAKES_SAMPLES, Block, Input
from .plan import Plan, Stage

T = TypeVar("T")
_PROMPT_OF = itemgetter(1)
_KEY: Callable[[tuple[int, ...]], Key] = partial(tuple.__new__, Key)
"""`Key` of a tuple, without a Python frame a key."""


def parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` contiguous parts whose lengths differ by one at most."""
    bounds = [index * len(items) // count for index in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def by_reason(dropped: Mapping[Key, str]) -> dict[str, list[Key]]:
    """Rows by why they were dropped."""
    found: dict[str, list[Key]] = {}
    for key, reason in dropped.items():
        found.setdefault(reason, []).append(key)
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one rank."""

    number: int
    """Among all shares of a stage."""
    rank: int
    prompts: Sequence[Key]
    samples: tuple[Key, ...]
    """In order of their keys."""
    rows: frozenset[Key]
    """The samples as a set."""


class StageProgress:
    """The rows of one step at one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.known = False
        """Whether prompts of the step are read, and with them the keys of its rows."""
        self.closed = False
        """Whether no further prompts will be read."""
        self.expected: tuple[Key, ...] = ()
        """The rows of the step, in order of their keys."""
        self.shared: tuple[Key, ...] = ()
        """The rows that ranks and mini-batches share, once closed: all, or those of prompts that a filter has kept."""
        self.group_size = 1
        self.ready: set[Key] = set()
        self.settled: set[Key] = set()
        self.done: set[Key] = set()
        self.held: set[Key] = set()
        """Rows that the stage lets pass if they are not too many: see waves.py."""
        self.holds = False
        """Whether its rows are held."""
        self.dead: dict[Key, str] = {}
        """Rows that will never come, or never leave, with the reason."""
        self.dropped = 0
        """Those of them that the stage itself dropped."""
        self.fired: set[int] = set()
        """Numbers of the shares that ranks were given."""
        self.fires_without = stage.action in ("prompts", *MAKES_SAMPLES, "backward", "record")
        """Whether it may have something to fire though no row is ready."""
        self.running = 0
        """Firings that have not ended."""
        self._arrived: dict[str, set[Key]] = {source: set() for source in stage.waits_for}
        self._left: Counter[int] = Counter()
        """Members of each group that are not settled."""

    def expect(self, keys: tuple[Key, ...], prompts: Collection[Key]) -> None:
        """These are rows of the step too, behind all that are known, and all of them samples of `prompts`."""
        self.known = True
        self.expected += keys
        self.group_size = len(keys) // len(prompts) if prompts else 1
        if self.stage.per == "group":
            self._left.update(dict.fromkeys(map(_PROMPT_OF, prompts), self.group_size))

    def close(self, shared: tuple[Key, ...] | None = None) -> None:
        """No further rows are expected; those of `shared` are to be shared out, None is all."""
        self.closed = True
        self.shared = self.expected if shared is None else shared

    def arrive(self, source: str, keys: Set[Key]) -> None:
        """`source` has passed these rows on, each once."""
        if len(self._arrived) > 1:
            self._arrived[source] |= keys
            for other, arrived in self._arrived.items():
                if other != source:
                    keys = keys & arrived
            keys = keys - self.settled if self.dead else keys
        self.ready |= keys
        self._settle(keys)

    def kill(self, keys: Iterable[Key], reason: str) -> list[Key]:
        """These rows will never come, or never leave. Returns those that were not known to be dead."""
        new = [key for key in keys if key not in self.dead]
        self.dead.update(dict.fromkeys(new, reason))
        self.ready.difference_update(new)
        self._settle(set(new) - self.settled)
        return new

    def pass_alive(self) -> None:
        """The stage is done with all rows that came."""
        self.done = self.settled - self.dead.keys() if self.dead else self.settled

    def take(self, keys: Sequence[Key]) -> Set[Key]:
        """Give rows to a firing: they are ready, or were and are trained on again. Returns them as a set."""
        if len(keys) == len(self.ready):
            rows, self.ready = self.ready, set()
            return rows
        rows = set(keys)
        self.ready -= rows
        return rows

    def takeable(self) -> Sequence[Key]:
        """What a function may be called with now, in order: rows, whole groups, or the whole step."""
        if not self.ready or (self.stage.per == "batch" and not self.complete):
            return ()
        if self.stage.per == "group" and len(self.ready) < len(self.expected):
            ready, left = self.ready, self._left
            return [key for key in self.expected if key in ready and not left[key[1]]]
        return self.ready_of(self.expected)

    def ready_of(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Those of the keys that are ready, in order."""
        ready = self.ready
        return keys if len(ready) == len(self.expected) else [key for key in keys if key in ready]

    @property
    def complete(self) -> bool:
        """Whether every row of the step has come or is dead."""
        return self.closed and len(self.settled) == len(self.expected)

    @property
    def caught_up(self) -> bool:
        """Whether every row that is known is passed on, held or dead here, and no firing runs."""
        passed = len(self.done) + len(self.held) + len(self.dead)
        return self.known and not self.running and passed == len(self.expected)

    @property
    def finished(self) -> bool:
        """Whether every row of the step is passed on or dead here, and no firing runs."""
        unwritten = self.stage.action == "record" and self.fires_without  # dead rows are written down too
        return self.closed and self.caught_up and not self.held and not unwritten

    def _settle(self, keys: Set[Key]) -> None:
        self.settled |= keys
        if self.stage.per == "group":
            left = self._left
            for prompt, count in Counter(map(_PROMPT_OF, keys)).items():
                left[prompt] -= count


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block, and those of its rows that nobody made before."""

    block: Block
    fresh: Set[Key]

    def part(self, wanted: Set[Key] | None, source: str, columns: tuple[str, ...]) -> Input | None:
        """The wanted rows of it; None wants all."""
        block = self.block
        whole = len(self.fresh) == len(block.keys)
        if whole and (wanted is None or self.fresh <= wanted):
            return Input(source, block.worker, block.number, None, columns)
        wanted = self.fresh if wanted is None else wanted & self.fresh
        if not wanted:
            return None
        rows = tuple(row for row, key in enumerate(block.keys) if key in wanted)
        return Input(source, block.worker, block.number, rows, columns)


@dataclass(slots=True)
class StepRows:
    """All stages of one step, and where its rows lie."""

    number: int
    plan: Plan
    stages: dict[str, StageProgress] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    waves: dict[str, list[list[Key]]] = field(default_factory=dict)
    """By prompts stage: what each read of it has brought, in order."""
    _placed: dict[str, list[_Placed]] = field(default_factory=dict)
    _lengths: dict[str, tuple[dict[Key, int], int]] = field(default_factory=dict)
    """By rollout: tokens of rows, and how many of its blocks are in there."""
    _shares: dict[tuple[str, int, bool], tuple[list[Share], int]] = field(default_factory=dict)
    """By rollout, number of ranks and whether behind a filter that refills: shares, and of how many waves they are."""

    def __post_init__(self) -> None:
        self.stages = {name: StageProgress(stage) for name, stage in self.plan.stages.items()}

    # --- rows come, pass and go

    def read(self, prompts: str) -> dict[str, int]:
        """All prompts of a wave have come from a prompts stage: they and their samples are rows of the step now.

        Returns:
            How many more rows each stage gets; nothing when no prompt has come.
        """
        progress = self.stages[prompts]
        keys = sorted(progress.done.difference(progress.expected))
        if not keys:
            return {}
        self.waves.setdefault(prompts, []).append(keys)
        progress.expect(tuple(keys), keys)
        more = {prompts: len(keys)}
        for sampler in self._samplers(prompts):
            samples = tuple(self.samples(sampler.name, keys))
            for stage in self.plan.in_space[sampler.name]:
                self.stages[stage.name].expect(samples, keys)
                more[stage.name] = len(samples)
        return more

    def skip(self, prompts: str) -> None:
        """A prompts stage has none in this step, and so no rows."""
        told = [stage for sampler in self._samplers(prompts) for stage in self.plan.in_space[sampler.name]]
        for name in (prompts, *(stage.name for stage in told)):
            self.stages[name].expect((), ())
        self.close(prompts)

    def close(self, prompts: str, kept: Collection[Key] | None = None) -> None:
        """No further prompts come from a prompts stage.

        Args:
            kept: those that a filter which refills has let pass; None without one.
        """
        self.stages[prompts].close()
        for sampler in self._samplers(prompts):
            behind = self.plan.behind(sampler.name)
            shared = None if kept is None else tuple(self.samples(sampler.name, sorted(kept)))
            for stage in self.plan.in_space[sampler.name]:
                self.stages[stage.name].close(shared if stage.name in behind else None)

    def _samplers(self, prompts: str) -> list[Stage]:
        return [reader for reader in self.plan.readers[prompts] if reader.action in MAKES_SAMPLES]

    def samples(self, rollout: str, prompts: Iterable[Key]) -> Iterator[Key]:
        """Keys of the samples of some prompts, in their order."""
        n = range(self.plan.samples_per_prompt[rollout])
        return map(_KEY, product((self.number,), map(_PROMPT_OF, prompts), n))

    def deliver(self, source: str, keys: Set[Key]) -> None:
        """`source` is done with these rows: tell those who wait for it."""
        self.stages[source].done |= keys
        for reader in self.plan.readers[source]:
            self.stages[reader.name].arrive(source, keys)

    def drop(self, source: str, keys: Iterable[Key], reason: str) -> None:
        """`source` passes these rows to nobody: they are dead for all that wait for it, directly or not."""
        new = self.stages[source].kill(keys, reason)
        for reader in self.plan.readers[source] if new else ():
            self.drop(reader.name, new, reason)

    # --- shares of ranks

    def shares(self, stage: Stage, size: int) -> list[Share]:
        """The rows of each rank: contiguous parts of each wave's prompts with their samples, a function of the keys.

        Behind a filter that refills, parts of the prompts that it has kept: none before the step is closed.
        """
        space, behind = stage.space, stage.name in self.plan.behind(stage.space)
        waves = self._kept(stage) if behind else self.waves.get(self.plan.stages[space].waits_for[0], [])
        found, known = self._shares.setdefault((space, size, behind), ([], 0))
        for wave in waves[known:]:
            for rank, mine in enumerate(parts(wave, size)):
                samples = tuple(self.samples(space, mine))
                found.append(Share(len(found), rank, mine, samples, frozenset(samples)))
        self._shares[space, size, behind] = found, len(waves)
        return found

    def _kept(self, stage: Stage) -> list[list[Key]]:
        progress = self.stages[stage.name]
        return [sorted(self._groups(progress.shared))] if progress.closed else []

    # --- where rows lie

    def place(self, source: str, block: Block, fresh: Set[Key]) -> None:
        """Remember where those rows of a block lie that nobody made before."""
        self.blocks.append(block)
        self._placed.setdefault(source, []).append(_Placed(block, fresh))

    def inputs(self, stage: Stage, rows: Set[Key]) -> tuple[Input, ...]:
        """The parts of blocks that hold what a stage reads of these rows, as far as its sources have made them."""
        whole = self.stages[stage.name].closed and len(rows) == len(self.stages[stage.name].expected)
        groups: Set[Key] | None = None
        found: list[Input] = []
        for source, columns in stage.reads:
            wanted = None if whole else rows
            if not whole and self.plan.stages[source].action == "prompts":
                wanted = groups = groups or self._groups(rows)
            for placed in self._placed.get(source, ()):
                if part := placed.part(wanted, source, columns):
                    found.append(part)
        return tuple(found)

    def _groups(self, rows: Iterable[Key]) -> Set[Key]:
        """The prompts of some rows."""
        return {Key(self.number, prompt) for prompt in set(map(_PROMPT_OF, rows))}

    def lengths(self, rollout: str, keys: Iterable[Key]) -> list[int]:
        """Tokens of each row, as its rollout counted them."""
        placed = self._placed.get(rollout, [])
        lengths, known = self._lengths.setdefault(rollout, ({}, 0))
        for each in placed[known:]:
            lengths.update(zip(each.block.keys, each.block.lengths or (), strict=False))
        self._lengths[rollout] = lengths, len(placed)
        return [lengths.get(key, 1) for key in keys]

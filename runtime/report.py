"""What a person sees of a run: a live view on a terminal, plain lines in a pipe.

========  =============================  =====================================
call      live view                      plain lines
========  =============================  =====================================
start     draws the frame                one line on stderr
step      a row of the table             one line on stdout
status    queue depths and mesh use      nothing
warn      a line above the frame         a line on stderr
say       a line above the frame         a line on stderr
stop      leaves it, end report below    end report on stderr
========  =============================  =====================================

Nothing here can end a run: a closed pipe or a terminal that went away silences the console, and ``metrics.jsonl`` has
the numbers all the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from flowrl.graph import Graph

from .ledger import most_frequent

SHOWN = {"loss": "loss", "reward": "reward", "kl": "kl", "lag": "lag", "tok/s": "tokens_per_s"}
"""What each line says first, in this order, and the key of the record that holds it."""

EXTRAS = (
    "accuracy", "held_out/loss", "held_out/accuracy", "cost", "multiplier",
    "version", "dropped", "entropy", "clip_fraction", "grad_norm", "lr", "response_tokens", "turns", "time_s",
)  # fmt: skip
"""What a line says after that, where the record has it; the losses of further models (``critic/loss``) and keys that
begin with ``eval`` follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeStatus:
    """How full one edge is, and what it waits for."""

    source: str
    target: str
    rows: int
    """Rows that wait on it."""
    bound: int | None = None
    """Most rows that may wait; None when it has no bound."""
    reason: str = ""
    """Why the rows wait, or the reader does; empty when nothing waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshStatus:
    """How busy one mesh is."""

    name: str
    busy: float
    """Share of its ranks' time since the last status spent in a firing, 0 to 1."""
    doing: str = ""
    """The node that it runs now; empty when it is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run did, in numbers that must add up."""

    outcome: str
    """``done``, ``failed``, ``interrupted`` or ``preempted``."""
    steps: int
    """Versions published by this process."""
    wall_s: float
    planned: Mapping[str, int] = field(default_factory=dict)
    """Rows that the steps bring to each node."""
    executed: Mapping[str, int] = field(default_factory=dict)
    """Rows that each node took."""
    issued: int = 0
    """Rows that were begun."""
    consumed: int = 0
    """Rows that were trained on, each once."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows that were given up, by reason."""
    in_flight: int = 0
    """Rows begun and neither consumed nor dropped: 0 at the end of a run that is done."""
    reward: tuple[float, float] | None = None
    """Of the first step, and the moving average at the end (each step counts a fifth)."""
    written: Mapping[str, Path] = field(default_factory=dict)
    """Where things lie, by what they are."""

    @property
    def problems(self) -> list[str]:
        """Sums that do not add up, one sentence each; a run that is done has none."""
        found = []
        given_up = sum(self.dropped.values())
        known = self.consumed + given_up + self.in_flight
        if self.issued != known:
            fates = f"{self.consumed} consumed + {given_up} dropped + {self.in_flight} in flight"
            found.append(f"{self.issued} rows were issued, but {fates} are {known}")
        if self.outcome != "done":
            return found
        if self.in_flight:
            found.append(f"{self.in_flight} rows were neither consumed nor dropped")
        for node in dict.fromkeys([*self.planned, *self.executed]):
            planned, executed = self.planned.get(node, 0), self.executed.get(node, 0)
            if planned != executed:
                found.append(f"node '{node}' took {executed} rows, {planned} were planned")
        return found


class Console(Protocol):
    """Where a run's progress is shown. `start` comes first and `stop` last; both may be called from one thread only."""

    def start(self, graph: Graph, num_steps: int, run_dir: Path | None, *, first_step: int = 0) -> None:
        """Begin to show a run of `num_steps` steps, of which `first_step` are done already (a resumed run)."""
        ...

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one step: the object that ``metrics.jsonl`` gets."""
        ...

    def status(self, edges: Sequence[EdgeStatus], meshes: Sequence[MeshStatus]) -> None:
        """Show what waits and what is busy. May be called as often as is handy."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning."""
        ...

    def say(self, text: str) -> None:
        """Show a line that a worker has printed."""
        ...

    def stop(self, summary: Summary | None) -> None:
        """End: give the terminal back and print the end report, if there is one. A second call does nothing."""
        ...


class PlainLines:
    """One line a step on `out`; everything else on `err`."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self._out = out
        self._err = err
        self._stopped = False

    def start(self, graph: Graph, num_steps: int, run_dir: Path | None, *, first_step: int = 0) -> None:
        """Say what runs and where."""
        resumed = f", from step {first_step}" if first_step else ""
        where = f", run folder {run_dir}" if run_dir else ""
        _print(f"flowrl: graph '{graph.name}', {num_steps} steps{resumed}{where}", self._err)

    def step(self, record: Mapping[str, Any]) -> None:
        """Print ``step 100 loss=0.421 reward=12.8 kl=0.150 lag=0 tok/s=5120``."""
        _print(step_line(record), self._out)

    def status(self, edges: Sequence[EdgeStatus], meshes: Sequence[MeshStatus]) -> None:
        """Nothing: a log of depths helps nobody."""

    def warn(self, text: str) -> None:
        """Print the warning."""
        _print(f"warning: {text}", self._err)

    def say(self, text: str) -> None:
        """Print the line."""
        _print(text, self._err)

    def stop(self, summary: Summary | None) -> None:
        """Print the end report."""
        if summary is not None and not self._stopped:
            _print(end_report(summary), self._err)
        self._stopped = True


def step_line(record: Mapping[str, Any]) -> str:
    """One step in one line. A value that the record lacks is ``-``; text and nested values are left out."""
    pairs = [f"{label}={number(record.get(key), whole=is_count(key, record))}" for label, key in SHOWN.items()]
    more = [*EXTRAS, *sorted(key for key in record if key.endswith("/loss"))]
    more += sorted(key for key in record if key.startswith("eval"))
    more = [key for key in dict.fromkeys(more) if isinstance(record.get(key), (int, float))]
    pairs += [f"{key}={number(record[key], whole=is_count(key, record))}" for key in more]
    return f"step {record.get('step', '-')} {' '.join(pairs)}"


def is_count(key: str, record: Mapping[str, Any]) -> bool:
    """Whether a value is shown without decimals: tokens, and a lag or a number of rows that is whole."""
    value = record.get(key)
    return key in ("tokens_per_s", "response_tokens") or (
        key in ("lag", "version", "dropped") and isinstance(value, float) and value.is_integer()
    )


def number(value: object, *, whole: bool = False) -> str:
    """A number in three significant digits, in full where it is whole; ``-`` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or whole or abs(value) >= 999.5:
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.2e}"
    if value == 0:
        return "0.000"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def end_report(summary: Summary) -> str:
    """Planned against executed rows of each node, the rows' fates, the time, and where everything lies."""
    lines = [f"{summary.outcome}: {_count(summary.steps, 'step')} in {duration(summary.wall_s)}"]
    rows = {**summary.planned, **summary.executed}
    nodes = [node for node in rows if summary.planned.get(node) or summary.executed.get(node)]
    if nodes:
        width = max(len("node"), *(len(node) for node in nodes))
        lines.append(f"  {'node':<{width}}  {'planned':>9}  {'executed':>9}")
        for node in nodes:
            planned, executed = summary.planned.get(node, 0), summary.executed.get(node, 0)
            differs = "  <- differs" if planned != executed and summary.outcome == "done" else ""
            lines.append(f"  {node:<{width}}  {planned:>9}  {executed:>9}{differs}")
    if summary.reward:
        first, average = (number(value) for value in summary.reward)
        lines.append(f"  reward: {first} at first, {average} at the end (moving average)")
    reasons = ", ".join(f"{reason} {count}" for reason, count in most_frequent(summary.dropped) if count)
    lines.append(
        f"  rows: {summary.issued} issued = {summary.consumed} consumed + {sum(summary.dropped.values())} dropped"
        f"{f' ({reasons})' if reasons else ''}{f' + {summary.in_flight} in flight' if summary.in_flight else ''}"
    )
    lines += [f"  {what}: {path}" for what, path in summary.written.items()]
    lines += [f"  does not add up: {problem}" for problem in summary.problems]
    return "\n".join(lines)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _print(text: str, stream: IO[str]) -> None:
    # A reader that went away (`| head`), a closed stream or a narrow encoding must not end hours of training.
    with contextlib.suppress(BrokenPipeError, ValueError):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

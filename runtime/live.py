"""The live view: a frame on the terminal that shows the last steps, the queues and the meshes.

Calls only store what they are given. One thread draws, at most four times a second, and waits 120 times as long as the
last drawing took: the view costs no more than one percent of one core, however large the graph is.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl.graph import Graph

from .report import EdgeStatus, MeshStatus, Summary, duration, end_report, is_count, number

INTERVAL_S = 0.25
"""Shortest time between two drawings."""
SHARE = 120
"""A drawing is followed by a pause this many times as long."""
STEPS = 6
"""Steps in the table."""
EDGES = 12
"""Edges in the table: those that wait, then the fullest."""
TREND = 60
"""Rewards in the sparkline."""
COLUMNS = {
    "reward": "reward", "kl": "kl", "loss": "loss", "lag": "lag", "tok/s": "tokens_per_s", "time s": "time_s"
}  # fmt: skip
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Draws on `out`; the end report goes to `err`."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self._terminal = Terminal(file=out)
        self._err = err
        self._name = ""
        self._run_dir: Path | None = None
        self._num_steps = 0
        self._first_step = 0
        self._seen = 0
        self._begun = self._first_at = time.monotonic()
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=STEPS)
        self._rewards: deque[float] = deque(maxlen=TREND)
        self._edges: Sequence[EdgeStatus] = ()
        self._meshes: Sequence[MeshStatus] = ()
        self._live: Live | None = None
        self._stop = threading.Event()
        self._drawer = threading.Thread(target=self._draw, name="flowrl-live-view", daemon=True)

    def start(self, graph: Graph, num_steps: int, run_dir: Path | None, *, first_step: int = 0) -> None:
        """Put up the frame."""
        self._name, self._num_steps, self._run_dir, self._first_step = graph.name, num_steps, run_dir, first_step
        self._begun = time.monotonic()
        self._live = Live(self.frame(), console=self._terminal, auto_refresh=False)
        self._live.start(refresh=True)
        self._drawer.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Add a row to the table and a bar to the sparkline."""
        self._seen += 1
        if self._seen == 1:
            self._first_at = time.monotonic()
        self._steps.append(dict(record))
        reward = record.get("reward")
        self._rewards.append(float(reward) if isinstance(reward, (int, float)) else math.nan)

    def status(self, edges: Sequence[EdgeStatus], meshes: Sequence[MeshStatus]) -> None:
        """Replace the queues and meshes shown."""
        self._edges, self._meshes = tuple(edges), tuple(meshes)

    def warn(self, text: str) -> None:
        """Print the warning above the frame."""
        with contextlib.suppress(OSError, ValueError):
            self._terminal.print(Text(f"warning: {text}", style="yellow"))

    def say(self, text: str) -> None:
        """Print the line above the frame."""
        with contextlib.suppress(OSError, ValueError):
            self._terminal.print(Text(text, style="dim"))

    def stop(self, summary: Summary | None) -> None:
        """Leave the last frame standing and print the end report below it."""
        if self._live is None:
            return
        self._stop.set()
        self._drawer.join(timeout=5)
        with contextlib.suppress(OSError, ValueError):
            self._live.update(self.frame(), refresh=True)
            self._live.stop()
            if summary is not None:
                Terminal(file=self._err, highlight=False).print(Text(end_report(summary)))
        self._live = None

    def frame(self) -> RenderableType:
        """The whole view as it is now."""
        steps, edges, meshes = list(self._steps), list(self._edges), list(self._meshes)
        parts: list[RenderableType] = [self._progress(), _steps_table(steps)]
        if self._rewards:
            parts.append(Text.assemble(("reward ", "bold"), (sparkline(list(self._rewards)), "green")))
        if edges:
            parts.append(_edges_table(edges))
        if meshes:
            parts.append(_meshes_table(meshes))
        where = Text(str(self._run_dir), style="dim") if self._run_dir else None
        spaced = [Padding(part, (0, 0, 0 if part is parts[-1] else 1, 0)) for part in parts]
        return Panel(Group(*spaced), title=Text(f"flowrl · {self._name}", style="bold"), subtitle=where, padding=(0, 1))

    def _progress(self) -> Table:
        done = min(self._first_step + self._seen, self._num_steps)
        elapsed = time.monotonic() - self._begun
        # From the second step on: the first has the loading of models in it.
        since = time.monotonic() - self._first_at
        left = duration(since / (self._seen - 1) * (self._num_steps - done)) if self._seen > 1 else "-"
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(
            Text(f"step {done}/{self._num_steps}", style="bold"),
            Padding(ProgressBar(total=max(self._num_steps, 1), completed=done), (0, 0)),
            Text(f"{duration(elapsed)} elapsed · {left} left"),
        )
        return row

    def _draw(self) -> None:
        pause = INTERVAL_S
        while not self._stop.wait(pause):
            begun = time.monotonic()
            try:
                assert self._live is not None
                self._live.update(self.frame(), refresh=True)
            except (OSError, ValueError):  # the terminal went away; the run goes on without a view
                return
            pause = max(INTERVAL_S, SHARE * (time.monotonic() - begun))


def sparkline(values: Sequence[float]) -> str:
    """One block a value between the least and the greatest; a value that is not finite is a gap."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] if span else BLOCKS[len(BLOCKS) // 2]

    return "".join(block(value) for value in values)


def _steps_table(records: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not records:
        return Text("waiting for the first step", style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in ("step", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        cells = [number(record.get(key), whole=is_count(key, record)) for key in COLUMNS.values()]
        table.add_row(str(record.get("step", "-")), *cells, style="bold" if record is records[-1] else "")
    return table


def _edges_table(edges: Sequence[EdgeStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("edge", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("waits for", ratio=1, overflow="ellipsis", no_wrap=True)
    shown = sorted(edges, key=lambda edge: (not edge.reason, -_fill(edge)))[:EDGES]
    for edge in (edge for edge in edges if edge in shown):
        bound = "" if edge.bound is None else f" / {edge.bound}"
        meter = "" if edge.bound is None else _meter(_fill(edge), 8)
        name = f"{edge.source} → {edge.target}" if edge.source else edge.target
        table.add_row(Text(name), f"{edge.rows}{bound}", meter, Text(edge.reason or "-"))
    if len(edges) > len(shown):
        table.add_row(Text(f"and {len(edges) - len(shown)} more, less full", style="dim"))
    return table


def _meshes_table(meshes: Sequence[MeshStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("mesh", no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("runs", ratio=1, overflow="ellipsis", no_wrap=True)
    for mesh in meshes:
        table.add_row(Text(mesh.name), f"{mesh.busy:.0%}", _meter(mesh.busy, 8), Text(mesh.doing or "idle"))
    return table


def _fill(edge: EdgeStatus) -> float:
    return edge.rows / edge.bound if edge.bound else 0.0


def _meter(share: float, width: int) -> Text:
    full = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * full, "red" if share >= 0.999 else "cyan"), ("━" * (width - full), "bright_black"))

"""A drawing in characters, for the terminal: nodes from top to bottom, each with a rail to those that read it.

::

     ┬ prompts                    prompts · host
     │   train.jsonl batch=32
     ├▶┬ rollout                  rollout · train                          ◀╌╮
     │ │   n=8 max_new_tokens=512 staleness=0                                ╎
     ├─┼▶┬ exact_match            reward · score                             ╎

A ``┼`` joins; a rail that a line only crosses stays a ``│``.

A graph with more rails than fit has none, and lists instead what each node reads.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from .fold import fold, generations, rows_digraph
from .measure import cells
from .scene import Arrow, Box, Cluster, Scene

ASCII = str.maketrans("┬├╰┴┤╴│─┼▶◀╌╮╯╎·…→≤×", "+|`++-|-+><-.':-~><x")
"""For terminals that know no more: every character has a stand-in of the same width."""
MAX_RAILS = 8
VERSION_WIDTH = 4
"""Columns at the right for the way back of versions and refills."""


def to_text(scene: Scene, width: int = 80, *, ascii_only: bool | None = None) -> str:
    """The drawing, no line of it wider than `width` characters.

    Args:
        scene: what is drawn.
        width: of the terminal; 40 is the least.
        ascii_only: plain ASCII; None asks standard output's encoding.
    """
    scene, width = fold(scene), max(width, 40)
    lines = [*_heading(scene, width), "", *_meshes(scene.clusters, width), "", *_body(scene, width)]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    if ascii_only is None:
        ascii_only = not _knows_unicode()
    return text.translate(ASCII).encode("ascii", "replace").decode("ascii") if ascii_only else text


def _knows_unicode() -> bool:
    try:
        "┬▶╌".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _heading(scene: Scene, width: int) -> Iterable[str]:
    yield _fit(scene.title, width)
    if scene.subtitle:
        yield _fit(scene.subtitle, width)


def _meshes(clusters: Sequence[Cluster], width: int) -> Iterable[str]:
    names = max((cells(cluster.title) for cluster in clusters), default=0)
    for cluster in clusters:
        models = f" · {'; '.join(cluster.models)}" if cluster.models else ""
        yield _fit(f"  {_pad(cluster.title, names)}  {cluster.shape}{models}", width)


class _Rails:
    """Which rails run, by slot; a rail begins at its node and ends at the last node that reads it."""

    def __init__(self, order: Sequence[Box], arrows: Sequence[Arrow]) -> None:
        at = {box.name: i for i, box in enumerate(order)}
        self.last: dict[str, int] = {}
        self.inputs: dict[str, list[str]] = {box.name: [] for box in order}
        for arrow in arrows:
            if not arrow.runs_back and at[arrow.source] < at[arrow.target]:
                self.last[arrow.source] = max(self.last.get(arrow.source, 0), at[arrow.target])
                if arrow.source not in self.inputs[arrow.target]:
                    self.inputs[arrow.target].append(arrow.source)
        self.slots: list[str | None] = []

    def enter(self, name: str, row: int) -> tuple[str, str]:
        """The characters before a node's name, where its inputs turn into it and its own rail begins; and those before
        the lines below, which all running rails pass."""
        before = list(self.slots)
        reads = [i for i, source in enumerate(before) if source in self.inputs[name]]
        for i in reads:
            if self.last[str(before[i])] == row:
                self.slots[i] = None
        # Its own rail starts at the right of every rail that it reads, so that nothing runs backwards.
        least = reads[-1] + 1 if reads else 0
        own = next((i for i in range(least, len(self.slots)) if before[i] is None), len(self.slots))
        while len(self.slots) <= own:
            self.slots.append(None)
        self.slots[own] = name if name in self.last else None
        first = self._turn(before, reads, own, row)
        then = "".join("│ " if rail else "  " for rail in self.slots).rstrip()
        while self.slots and self.slots[-1] is None:
            self.slots.pop()
        return first, then

    def _turn(self, before: list[str | None], reads: list[int], own: int, row: int) -> str:
        parts = []
        for i in range(max(own, len(before))):
            rail = before[i] if i < len(before) else None
            inside = bool(reads) and reads[0] <= i < own
            if i in reads:
                first = "╰" if self.last[str(rail)] == row else "├"
                joint = first if i == reads[0] else "┴" if first == "╰" else "┼"
            elif i == own:
                joint = ""
            else:
                joint = "│" if rail else "─" if inside else " "  # a rail that is only crossed is not joined
            if i == own:
                continue
            parts.append(joint + ("▶" if inside and i == own - 1 else "─" if inside else " "))
        head = "┬" if self.slots[own] else "╴"
        return "".join(parts[:own]) + head + "".join([" ", *parts[own:]]).rstrip()


def _body(scene: Scene, width: int) -> list[str]:
    order = _order(scene)
    rails = _Rails(order, scene.arrows)
    drawn = [rails.enter(box.name, row) for row, box in enumerate(order)]
    widest = max((max(cells(a), cells(b)) for a, b in drawn), default=0)
    railed = widest <= 2 * MAX_RAILS + 2
    clusters = {cluster.key: cluster.title for cluster in scene.clusters}
    titles = {box.name: box.title for box in order}
    back = _Back(order, scene.arrows)
    room = width - (VERSION_WIDTH if back.rows else 0)
    lines: list[str] = []
    for row, (box, (first, then)) in enumerate(zip(order, drawn, strict=True)):
        head, rest = (first, then) if railed else ("─", "")
        name = f"{head} {box.title}"
        where = f"{box.kind} · {clusters.get(box.cluster, '')}"
        lines.append(back.mark(_columns(name, where, widest + 22 if railed else 30, room), room, row, first=True))
        indent = _pad(rest, cells(head) + 3) if railed else "    "
        for line in _texts(box, scene.arrows, titles):
            parts = textwrap.wrap(line, max(room - cells(indent), 20), subsequent_indent="  ", break_long_words=False)
            lines += [back.mark(_fit(f"{indent}{part}", room), room, row, first=False) for part in parts]
    return lines


def _order(scene: Scene) -> list[Box]:
    rank = generations(rows_digraph(scene))
    return sorted(scene.boxes, key=lambda box: rank[box.name])


def _texts(box: Box, arrows: Sequence[Arrow], titles: Mapping[str, str]) -> Iterable[str]:
    """Settings, what it reads, and where versions come from."""
    if box.lines:
        yield " ".join(line.strip() for line in box.lines)
    if box.compares:
        yield f"compares {'; '.join(box.compares)}"
    for arrow in arrows:
        if arrow.target == box.name:
            notes = f" ({', '.join(arrow.notes)})" if arrow.notes else ""
            verb = {"column": "reads", "gate": "gated by", "version": "from", "refill": "asked by"}[arrow.kind]
            what = "" if arrow.kind == "gate" else f": {', '.join(arrow.columns)}"
            yield f"{verb} {titles[arrow.source]}{what}{notes}"


class _Back:
    """The way back up of versions and refills, at the right edge: one rail, from each update to the first that reads
    its model and from each filter to the prompts that it asks for more."""

    def __init__(self, order: Sequence[Box], arrows: Sequence[Arrow]) -> None:
        at = {box.name: i for i, box in enumerate(order)}
        ends = [(at[a.target], at[a.source]) for a in arrows if a.runs_back and at[a.target] < at[a.source]]
        self.rows: Mapping[int, str] = {row: "◀╌" for row, _ in ends} | {row: " ╌" for _, row in ends}
        self.top = min((row for row, _ in ends), default=0)
        self.bottom = max((row for _, row in ends), default=-1)

    def mark(self, line: str, room: int, row: int, *, first: bool) -> str:
        """The line with the rail at its end."""
        if not self.top <= row <= self.bottom or (row == self.bottom and not first):
            return line
        if first and row in self.rows:
            corner = "╮" if row == self.top else "╯" if row == self.bottom else "┤"
            return f"{_pad(line, room)} {self.rows[row]}{corner}"
        return f"{_pad(line, room)}   ╎"


def _columns(left: str, right: str, start: int, width: int) -> str:
    room = width - cells(right) - 2
    return _fit(f"{_pad(_fit(left, max(room, 20)), start)}  {right}", width)


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def _fit(text: str, width: int) -> str:
    """The text on one line of `width` cells."""
    text = " ".join(text.split("\n"))
    if cells(text) <= width:
        return text
    while cells(text) > width - 1:
        text = text[:-1]
    return f"{text}…"

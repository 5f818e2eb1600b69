"""How large text and boxes are drawn, in pixels. Fonts differ between machines: the widths are those of the widest."""

from __future__ import annotations

import unicodedata

from .scene import Arrow, Box, Cluster
from .settings import clip

TITLE, SMALL, TINY = 14.0, 11.0, 9.5
"""Font sizes: of a title, of settings and labels (monospaced), of a kind."""
MONO = 0.62
"""Width of a monospaced character over its font size."""
BOLD = 0.64
"""Mean width of a bold character over its font size; user interface fonts stay below it."""
LINE = 16.0
"""Height of a line of settings."""
LABEL_LINE = 14.0
"""Height of a line of a label."""
PAD = 14.0
"""Between a box's border and its text."""
LABEL_COLUMNS = 5
"""Columns that a label lists; it counts the others."""
LABEL_CHARS = 26
NAME_CHARS = 36


def cells(text: str) -> int:
    """Width in characters: East Asian wide ones take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def mono_width(text: str, size: float = SMALL) -> float:
    """Width of text in the monospaced font."""
    return cells(text) * size * MONO


def bold_width(text: str, size: float = TITLE) -> float:
    """Width of a title."""
    return cells(text) * size * BOLD


def title_of(box: Box) -> str:
    """The title, shortened to what a box holds."""
    return clip(box.title, NAME_CHARS)


def box_size(box: Box) -> tuple[float, float]:
    """Width and height of a box: title and kind in one row, the settings below."""
    head = bold_width(title_of(box)) + 18 + cells(box.kind) * TINY * 0.8
    width = max(head, *(mono_width(line) for line in box.lines), 110.0)
    return round(width + 2 * PAD + 4), round(38 + LINE * len(box.lines) + (6 if box.lines else 0))


def label_lines(arrow: Arrow) -> tuple[tuple[str, bool], ...]:
    """The lines of an arrow's label, and whether each names columns (the others are notes)."""
    columns = () if arrow.kind == "gate" else arrow.columns
    if arrow.runs_back:
        return tuple((clip(line, 40), True) for line in (arrow.heading, *columns) if line)
    shown = [clip(column, LABEL_CHARS) for column in columns[:LABEL_COLUMNS]]
    rows: list[str] = []
    for column in shown:
        if rows and cells(rows[-1]) + cells(column) + 2 <= LABEL_CHARS:
            rows[-1] += f", {column}"
        else:
            rows.append(column)
    if len(columns) > len(shown):
        rows[-1] += f" +{len(columns) - len(shown)}"
    # A gate's dots say what it is; only its bound is worth a label.
    notes = [note for note in arrow.notes if arrow.kind != "gate" or note != arrow.rate]
    return (*((row, True) for row in rows), *((clip(note, 40), False) for note in notes))


def label_size(arrow: Arrow) -> tuple[float, float]:
    """Width and height of an arrow's label, its padding included."""
    lines = label_lines(arrow)
    if not lines:
        return 0.0, 0.0
    return round(max(mono_width(text) for text, _ in lines) + 14), LABEL_LINE * len(lines) + 6


def header_size(cluster: Cluster) -> tuple[float, float]:
    """Width and height of a cluster's heading."""
    width = max(bold_width(cluster.title, 13) + 12 + mono_width(cluster.shape), *map(mono_width, cluster.models), 0.0)
    return round(width + 2 * PAD), round(34 + LABEL_LINE * len(cluster.models) + (6 if cluster.models else 0))

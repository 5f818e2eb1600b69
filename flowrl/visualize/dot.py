"""Graphviz's DOT, written without Graphviz."""

from __future__ import annotations

from .fold import fold
from .measure import label_lines
from .scene import HOST, Arrow, Box, Scene
from .svg import KINDS

_ARROW = {
    "column": "",
    "gate": ', style=dotted, color="#be185d"',
    "version": ', style=dashed, color="#15803d", fontcolor="#15803d", constraint=false',
    "refill": ', style=dashed, color="#be185d", fontcolor="#be185d", constraint=false',
}


def to_dot(scene: Scene) -> str:
    """A digraph with a cluster for each mesh; ``dot -Tsvg`` draws it."""
    scene = fold(scene)
    ids = {box.name: f"n{i}" for i, box in enumerate(scene.boxes)}
    lines = [
        f"digraph {quote(scene.title)} {{",
        '  graph [rankdir=TB, fontname="Helvetica", style=rounded, color="#cbd5e1", bgcolor=transparent];',
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="Helvetica", fontsize=11];',
        '  edge [fontname="Helvetica", fontsize=9, color="#64748b"];',
    ]
    for i, cluster in enumerate(scene.clusters):
        boxes = [_box(ids[box.name], box) for box in scene.boxes if box.cluster == cluster.key]
        if cluster.key == HOST or not boxes:
            lines += [f"  {box}" for box in boxes]
            continue
        label = quote("\n".join([f"{cluster.title}: {cluster.shape}", *cluster.models]))
        lines += [f"  subgraph cluster_{i} {{", f"    label={label};", *(f"    {box}" for box in boxes), "  }"]
    lines += [f"  {ids[arrow.source]} -> {ids[arrow.target]} [{_label(arrow)}];" for arrow in scene.arrows]
    return "\n".join([*lines, "}"]) + "\n"


def quote(text: str) -> str:
    """A quoted string. Backslashes are doubled and ampersands spelled out: Graphviz replaces ``\\N`` and entities."""
    text = text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\r", "").replace("\n", "\\n").replace("\0", "") + '"'


def _box(name: str, box: Box) -> str:
    colour = KINDS.get(box.kind, KINDS["node"])[0]
    label = quote("\n".join([f"{box.title} ({box.kind})", *box.lines]))
    return f'{name} [label={label}, color="{colour}", tooltip={quote(box.at or box.title)}];'


def _label(arrow: Arrow) -> str:
    return f"label={quote(chr(10).join(text for text, _ in label_lines(arrow)))}{_ARROW[arrow.kind]}"

"""Mermaid, which GitHub, GitLab and most wikis draw from a fenced block."""

from __future__ import annotations

from .fold import fold
from .measure import label_lines
from .scene import HOST, Arrow, Box, Scene
from .svg import KINDS

_ARROW = {"column": "-->", "gate": "-.->", "version": "-.->", "refill": "-.->"}


def to_mermaid(scene: Scene) -> str:
    """A flowchart from top to bottom with a subgraph for each mesh."""
    scene = fold(scene)
    ids = {box.name: f"n{i}" for i, box in enumerate(scene.boxes)}
    lines = ["flowchart TB"]
    for i, cluster in enumerate(scene.clusters):
        boxes = [f"{ids[box.name]}[{_box_text(box)}]:::{box.kind}" for box in scene.boxes if box.cluster == cluster.key]
        if not boxes:
            continue
        if cluster.key == HOST:
            lines += [f"  {box}" for box in boxes]
            continue
        title = "<br/>".join(map(quote, [f"{cluster.title}: {cluster.shape}", *cluster.models]))
        lines += [f'  subgraph c{i}["{title}"]', *(f"    {box}" for box in boxes), "  end"]
    lines += [f"  {ids[arrow.source]} {_edge(arrow)} {ids[arrow.target]}" for arrow in scene.arrows]
    kinds = dict.fromkeys(box.kind for box in scene.boxes)
    lines += [f"  classDef {kind} stroke:{KINDS.get(kind, KINDS['node'])[0]},stroke-width:2px" for kind in kinds]
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """Text inside a quoted label: every ASCII character that means something to Mermaid or HTML as an entity code."""
    return "".join(c if c.isalnum() or c in " _.,:=()/+-" or ord(c) > 127 else f"#{ord(c)};" for c in text.strip())


def _box_text(box: Box) -> str:
    lines = "<br/>".join(map(quote, box.lines))
    return f'"<b>{quote(box.title)}</b> <small>{quote(box.kind)}</small>{"<br/>" if lines else ""}{lines}"'


def _edge(arrow: Arrow) -> str:
    label = "<br/>".join(quote(text) for text, _ in label_lines(arrow))
    return f'{_ARROW[arrow.kind]}|"{label}"|' if label else _ARROW[arrow.kind]

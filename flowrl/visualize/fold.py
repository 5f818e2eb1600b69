"""Folding: a graph with more boxes or arrows than anybody can read is drawn in groups.

Three passes, each only while the scene is too large: boxes with the same neighbours become one (a layer), runs of boxes
in single file become one (a chain), and at last neighbouring generations of a mesh become one. All are linear in the
number of arrows; no path is ever enumerated, of which there may be more than atoms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .scene import Arrow, Box, Scene

if TYPE_CHECKING:
    import networkx as nx

MAX_BOXES = 40
"""Boxes that a picture shows without folding; a screen holds about as many."""
MAX_ARROWS = 120
"""Arrows that a picture shows without folding."""


def fold(scene: Scene, max_boxes: int = MAX_BOXES, max_arrows: int = MAX_ARROWS) -> Scene:
    """The scene itself when it is small, else one of at most `max_boxes` boxes (one a mesh at least)."""
    for group in (_layers, _chains):
        if len(scene.boxes) <= max_boxes and len(scene.arrows) <= max_arrows:
            return scene
        scene = _merge(scene, group(scene))
    spans = max_boxes
    while len(scene.boxes) > max_boxes or len(scene.arrows) > max_arrows:
        before = len(scene.boxes)
        scene = _merge(scene, _generations(scene, spans))
        if spans == 1 and len(scene.boxes) == before:
            break
        spans = max(1, spans // 2)
    return scene


def rows_digraph(scene: Scene) -> nx.DiGraph[str]:
    """Boxes and arrows without versions."""
    import networkx as nx

    digraph: nx.DiGraph[str] = nx.DiGraph()
    digraph.add_nodes_from(box.name for box in scene.boxes)
    digraph.add_edges_from((a.source, a.target) for a in scene.arrows if not a.runs_back and a.source != a.target)
    return digraph


def generations(digraph: nx.DiGraph[str]) -> dict[str, int]:
    """The length of the longest path to each box. On a cycle, which the checks refuse, arrows to earlier boxes are left
    out."""
    import networkx as nx

    forward = nx.DiGraph(digraph)
    declared = {name: i for i, name in enumerate(digraph)}
    for cycle in nx.strongly_connected_components(digraph):
        inside = digraph.subgraph(cycle).edges
        forward.remove_edges_from([(a, b) for a, b in inside if declared[a] >= declared[b]])
    return {name: i for i, layer in enumerate(nx.topological_generations(forward)) for name in layer}


def _layers(scene: Scene) -> dict[str, Hashable]:
    ins, outs = _neighbours(scene)
    return {box.name: (box.cluster, box.kind, ins[box.name], outs[box.name]) for box in scene.boxes}


def _neighbours(scene: Scene) -> tuple[dict[str, frozenset[Hashable]], dict[str, frozenset[Hashable]]]:
    ins: dict[str, set[Hashable]] = {box.name: set() for box in scene.boxes}
    outs: dict[str, set[Hashable]] = {box.name: set() for box in scene.boxes}
    for arrow in scene.arrows:
        outs[arrow.source].add((arrow.kind, arrow.target))
        ins[arrow.target].add((arrow.kind, arrow.source))
    return {k: frozenset(v) for k, v in ins.items()}, {k: frozenset(v) for k, v in outs.items()}


def _chains(scene: Scene) -> dict[str, Hashable]:
    """A box joins the chain of its only source, if it is that source's only reader, on its mesh and of its kind."""
    digraph = rows_digraph(scene)
    boxes = {box.name: box for box in scene.boxes}
    special = {name for arrow in scene.arrows if arrow.runs_back for name in (arrow.source, arrow.target)}
    rank = generations(digraph)
    head: dict[str, Hashable] = {}
    for name in sorted(boxes, key=rank.__getitem__):
        before = next(iter(digraph.pred[name]), None)
        joins = (
            before is not None
            and digraph.in_degree(name) == digraph.out_degree(before) == 1
            and (boxes[before].cluster, boxes[before].kind) == (boxes[name].cluster, boxes[name].kind)
            and not special & {name, before}
            and before in head
        )
        head[name] = head[before] if joins and before is not None else name
    return head


def _generations(scene: Scene, spans: int) -> dict[str, Hashable]:
    """Groups of neighbouring generations on one mesh, `spans` groups over the depth of the graph."""
    rank = generations(rows_digraph(scene))
    depth = max(rank.values()) + 1
    return {box.name: (box.cluster, rank[box.name] * spans // depth) for box in scene.boxes}


def _merge(scene: Scene, group_of: Mapping[str, Hashable]) -> Scene:
    groups: dict[Hashable, list[Box]] = {}
    for box in scene.boxes:
        groups.setdefault(group_of[box.name], []).append(box)
    boxes = {group: _one(members) for group, members in groups.items()}
    name = {box.name: boxes[group_of[box.name]].name for box in scene.boxes}
    merged: dict[tuple[str, str, str], list[Arrow]] = {}
    for arrow in scene.arrows:
        ends = (name[arrow.source], name[arrow.target])
        if ends[0] != ends[1]:
            merged.setdefault((*ends, arrow.kind), []).append(arrow)
    arrows = [_one_arrow(source, target, parts) for (source, target, _), parts in merged.items()]
    return replace(scene, boxes=tuple(boxes.values()), arrows=tuple(arrows))


def _one(members: list[Box]) -> Box:
    if len(members) == 1:
        return members[0]
    names = [name for box in members for name in (box.members or (box.name,))]
    kinds = Counter(_kinds(members))
    return Box(
        name=members[0].name,
        title=f"{names[0]} … {names[-1]}",
        kind=members[0].kind if len({box.kind for box in members}) == 1 else "group",
        lines=(f"{len(names)} nodes", *(f"{count} × {kind}" for kind, count in kinds.most_common(3) if len(kinds) > 1)),
        cluster=members[0].cluster,
        at=members[0].at,
        details={"nodes": ", ".join(names[:100]) + (", …" if len(names) > 100 else "")},
        members=tuple(names),
    )


def _kinds(members: Iterable[Box]) -> Iterable[str]:
    for box in members:
        yield from [box.kind] * max(1, len(box.members))


def _one_arrow(source: str, target: str, parts: list[Arrow]) -> Arrow:
    columns = tuple(dict.fromkeys(column for part in parts for column in part.columns))
    rates, bounds = {part.rate for part in parts}, {part.bound for part in parts}
    return Arrow(
        source=source,
        target=target,
        kind=parts[0].kind,
        columns=columns,
        rate=rates.pop() if len(rates) == 1 else "",
        bound=bounds.pop() if len(bounds) == 1 else "",
    )

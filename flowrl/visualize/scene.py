"""What a picture of a graph shows, before any format: boxes, arrows with labels, clusters.

Every renderer draws a `Scene`, so that all formats say the same. Strings in it are the user's: each renderer quotes
them in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.describe import describe
from flowrl.graph import BACK, Binding, EvaluateSpec, FilterSpec, Graph, Node, RolloutSpec
from flowrl.mesh import AXES, Mesh
from flowrl.model import Model
from flowrl.provenance import compared

from .rates import Rate, is_refilled, rates
from .settings import settings_lines

Bounds = Mapping[tuple[str, str], str]
"""The bound of a queue, as text, by its writer and reader."""

ArrowKind = Literal["column", "gate", "version", "refill"]
HOST = "host"
"""Key of the cluster of nodes that have no mesh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A node, or several that are folded into one."""

    name: str
    """Unique in its scene."""
    title: str
    kind: str
    """That of the node; ``missing`` for one that is read but was never declared."""
    lines: tuple[str, ...]
    """The settings that matter."""
    cluster: str
    at: str = ""
    """File and line."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Every setting as a plain value."""
    compares: tuple[str, ...] = ()
    """The log-probs that it reads, each with what it is of."""
    members: tuple[str, ...] = ()
    """Names of the nodes that are folded into it; empty for a node itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """All columns from one box to another, a gate, a model's versions, or a filter's wish for further prompts."""

    source: str
    target: str
    kind: ArrowKind
    columns: tuple[str, ...] = ()
    rate: str = ""
    """Rows a step, as text."""
    bound: str = ""
    """The bound of its queue, as text."""
    heading: str = ""
    """What its label begins with, where several arrows share one line."""

    @property
    def runs_back(self) -> bool:
        """Whether it carries no rows, and stands apart from the order of those that do."""
        return self.kind in BACK

    @property
    def notes(self) -> tuple[str, ...]:
        """What its label says beside the columns."""
        bound = f"bound {self.bound.removeprefix('<= ')}" if self.bound else ""
        return tuple(note for note in (self.rate, bound) if note)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A mesh, or the host process."""

    key: str
    title: str
    shape: str
    """Its axes and the number of its processes."""
    models: tuple[str, ...]
    """One line for each model that lives on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A graph as it is drawn."""

    title: str
    subtitle: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    clusters: tuple[Cluster, ...]


def scene_of(graph: Graph, bounds: Bounds | None = None) -> Scene:
    """Every node as a box and every pair of joined nodes as an arrow; nothing is folded yet."""
    nodes = graph.nodes
    meshes = _meshes(nodes.values())
    boxes = [_box(graph, node, meshes) for node in nodes.values()]
    boxes += [
        Box(name=name, title=name, kind="missing", lines=("never declared",), cluster=HOST)
        for name in graph.digraph.nodes
        if name not in nodes
    ]
    clusters = [_cluster(key, mesh, nodes.values()) for key, mesh in meshes.values()]
    if any(box.cluster == HOST for box in boxes):
        clusters.insert(0, Cluster(key=HOST, title="host", shape="the process of the run", models=()))
    return Scene(
        title=graph.name,
        subtitle=graph.doc.strip().split("\n")[0],
        boxes=tuple(boxes),
        arrows=tuple(_arrows(graph, nodes, bounds or {})),
        clusters=tuple(clusters),
    )


def _meshes(nodes: Iterable[Node]) -> dict[int, tuple[str, Mesh]]:
    """Each mesh once, by identity: two of one shape are two sets of processes."""
    found: dict[int, tuple[str, Mesh]] = {}
    for node in nodes:
        for mesh in (node.mesh, node.model.mesh if node.model else None):
            if mesh is not None:
                found.setdefault(id(mesh), (f"mesh{len(found)}", mesh))
    return found


def _box(graph: Graph, node: Node, meshes: Mapping[int, tuple[str, Mesh]]) -> Box:
    found = compared(graph, node)
    compares = [f"{name}: {each or 'of unknown provenance'}" for name, each in found.items()]
    details = {
        "model": node.model.name if node.model else None,
        "runs on": mesh_title(node.mesh) if node.mesh else HOST,
        "called per": node.per,
        "reads": [f"{_renamed(b)}{b.column} of {b.source}" for b in node.bindings],
        "passes": list(node.gates),
        "writes": list(node.outputs),
        "compares": compares,
        **describe(node.spec),
    }
    return Box(
        name=node.name,
        title=node.name,
        kind=node.kind,
        lines=tuple(settings_lines(node)),
        cluster=meshes[id(node.mesh)][0] if node.mesh else HOST,
        at=str(node.at),
        compares=tuple(compares),
        details={key: value for key, value in details.items() if value not in (None, [], {}, "")},
    )


def _renamed(binding: Binding) -> str:
    return "" if binding.parameter == binding.column else f"{binding.parameter} = "


def mesh_title(mesh: Mesh) -> str:
    """Its name, or its shape when it has none."""
    return mesh.name or str(mesh)


def _cluster(key: str, mesh: Mesh, nodes: Iterable[Node]) -> Cluster:
    if mesh.workers:
        shape = f"{mesh.workers} CPU worker{'s' if mesh.workers > 1 else ''}"
    else:
        axes = [f"{axis}={size}" for axis in AXES if (size := getattr(mesh, axis)) > 1] or ["dp=1"]
        axes += ["sequence parallel"] if mesh.sequence_parallel else []
        shape = f"{' '.join(axes)} · {mesh.world_size} rank{'s' if mesh.world_size > 1 else ''}"
    lives = {id(node.model): _model_line(node.model, "") for node in nodes if node.model and node.model.mesh is mesh}
    for node in nodes:
        if node.model and node.mesh is mesh and node.model.mesh is not mesh:
            lives.setdefault(id(node.model), _model_line(node.model, "replica"))
    return Cluster(key=key, title=mesh_title(mesh), shape=shape, models=tuple(lives.values()))


def _model_line(model: Model, role: str) -> str:
    role = role or ("trained" if model.optimizer else "frozen")
    head = "" if model.head == "lm" else f", {model.head} head"
    return f"{model.name}: {role}{head}, {model.backend} {model.dtype}"


def _arrows(graph: Graph, nodes: Mapping[str, Node], bounds: Bounds) -> Iterable[Arrow]:
    grouped: dict[tuple[str, str, ArrowKind], list[str]] = {}
    for source, target, key, data in graph.digraph.edges(keys=True, data=True):
        grouped.setdefault((source, target, data["kind"]), []).append(key)
    rate_of = rates(graph)
    for (source, target, kind), columns in grouped.items():
        if kind == "version":
            lines = tuple(_version(nodes[source], nodes[target]))
            several = sum(a == source and k == "version" for a, _, k in grouped) > 1
            heading = f"to {target}:" if several else ""
            yield Arrow(source=source, target=target, kind=kind, columns=lines, heading=heading)
            continue
        if kind == "refill":
            yield Arrow(source=source, target=target, kind=kind, columns=(_waves(nodes[source]),))
            continue
        yield Arrow(
            source=source,
            target=target,
            kind=kind,
            columns=("kept rows",) if kind == "gate" else tuple(columns),
            rate=_rate(graph, rate_of.get(source), nodes[target]),
            bound=bounds.get((source, target), ""),
        )


def _rate(graph: Graph, rate: Rate | None, reader: Node) -> str:
    if rate is None:
        return ""
    a_wave = " a wave" if rate.a_wave and not is_refilled(graph, reader) else ""
    return f"{'≤ ' if reader.gates or rate.at_most else ''}{rate.count:,} {rate.unit}{a_wave}"


def _waves(node: Node) -> str:
    """The label of a refill: how often a step may read its prompts."""
    assert isinstance(node.spec, FilterSpec)
    return f"refill (at most {node.spec.refill} waves)"


def _version(update: Node, reader: Node) -> list[str]:
    """The label of a version edge: how stale it may be, and where weights have to travel."""
    if isinstance(reader.spec, RolloutSpec):
        lines = [f"version (staleness {reader.spec.staleness})"]
    elif isinstance(reader.spec, EvaluateSpec):
        lines = [f"version (pinned, every {reader.spec.every})"]
    else:
        lines = ["version"]
    if update.mesh and reader.mesh and reader.mesh is not update.mesh:
        lines.append(f"weights: {mesh_title(update.mesh)} → {mesh_title(reader.mesh)}")
    return lines

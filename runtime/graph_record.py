"""A graph as plain values, for ``graph.json``: what a run really ran, after every default was filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.functions import NodeFunction
from flowrl.graph import Graph, Node
from flowrl.loss import Loss
from flowrl.mesh import AXES, Mesh
from flowrl.model import Model


def graph_record(graph: Graph) -> dict[str, Any]:
    """Name, parameters, meshes, models, nodes and edges, readable by a person and by `json`."""
    return {
        "name": graph.name,
        "doc": graph.doc,
        "at": str(graph.at) if graph.at else None,
        "fingerprint": graph.fingerprint,
        "parameters": {name: describe(value) for name, value in graph.parameters.items()},
        "models": {name: _model(model) for name, model in graph.models.items()},
        "nodes": {name: _node(node) for name, node in graph.nodes.items()},
        "edges": [
            {"from": source, "to": target, "column": key, **data}
            for source, target, key, data in graph.digraph.edges(keys=True, data=True)
        ],
    }


def describe(value: Any) -> Any:
    """A setting as a plain value: meshes by their axes, models and functions by name, losses by their formula."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mesh):
        return _mesh(value)
    if isinstance(value, Model):
        return value.name
    if isinstance(value, Loss):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value] if len(value) <= 16 else f"{type(value).__name__} of {len(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    return _named(value)


def _named(value: Any) -> str:
    function = value.function if isinstance(value, NodeFunction) else value
    name = getattr(function, "__qualname__", None)
    # Never repr(): of a data set it may be pages long, and it holds addresses, which differ from run to run.
    return f"{function.__module__}:{name}" if name else f"{type(value).__module__}:{type(value).__qualname__}"


def _mesh(mesh: Mesh) -> dict[str, Any]:
    if mesh.workers:
        return {"name": mesh.name, "workers": mesh.workers}
    axes = {axis: getattr(mesh, axis) for axis in AXES}
    return {"name": mesh.name, **axes, "sequence_parallel": mesh.sequence_parallel, "device": mesh.device}


def _model(model: Model) -> dict[str, Any]:
    return {
        field.name: describe(getattr(model, field.name)) for field in dataclasses.fields(model) if field.name != "name"
    }


def _node(node: Node) -> dict[str, Any]:
    return {
        "kind": node.kind,
        "at": str(node.at),
        "per": node.per,
        "model": node.model.name if node.model else None,
        "mesh": describe(node.mesh),
        "reads": {b.parameter: f"{b.source}.{b.column}" for b in node.bindings},
        "gates": list(node.gates),
        "writes": list(node.outputs),
        "settings": describe(node.spec),
    }

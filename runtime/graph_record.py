"""A graph as plain values, for ``graph.json``: what a run really ran, after every default was filled in."""

from __future__ import annotations

import dataclasses
from typing import Any

from flowrl.describe import describe
from flowrl.graph import Graph, Node
from flowrl.model import Model
from flowrl.provenance import as_plain, is_logprobs, provenance


def graph_record(graph: Graph) -> dict[str, Any]:
    """Name, parameters, models, nodes and edges, readable by a person and by `json`."""
    return {
        "name": graph.name,
        "doc": graph.doc,
        "at": str(graph.at) if graph.at else None,
        "fingerprint": graph.fingerprint,
        "parameters": {name: describe(value) for name, value in graph.parameters.items()},
        "models": {name: _model(model) for name, model in graph.models.items()},
        "nodes": {name: _node(graph, node) for name, node in graph.nodes.items()},
        "edges": [
            {"from": source, "to": target, "column": key, **data}
            for source, target, key, data in graph.digraph.edges(keys=True, data=True)
        ],
    }


def _model(model: Model) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(model) if field.name != "name"]
    return {name: describe(getattr(model, name)) for name in fields}


def _node(graph: Graph, node: Node) -> dict[str, Any]:
    logprobs = {name: as_plain(provenance(graph, node.name, name)) for name in node.outputs if is_logprobs(name)}
    return {
        "kind": node.kind,
        "at": str(node.at),
        "per": node.per,
        "model": node.model.name if node.model else None,
        "mesh": describe(node.mesh),
        "reads": {b.parameter: f"{b.source}.{b.column}" for b in node.bindings},
        "gates": list(node.gates),
        "writes": list(node.outputs),
        **({"provenance": logprobs} if logprobs else {}),
        "settings": describe(node.spec),
    }

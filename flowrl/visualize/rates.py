"""How many rows a step each node emits, as far as the settings alone tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowrl.graph import FilterSpec, Graph, Node, PromptsSpec, SamplesSpec


@dataclass(frozen=True, slots=True)
class Rate:
    """Rows that a node emits in one step."""

    count: int
    unit: str
    """``prompts`` or ``rows``."""
    at_most: bool = False
    """A filter may drop some."""
    a_wave: bool = False
    """So many in each wave of the step: a filter behind may ask for further prompts."""


def rates(graph: Graph) -> dict[str, Rate]:
    """By node; one whose inputs are unknown, or that lies on a cycle, is left out."""
    import networkx as nx

    nodes, known = graph.nodes, dict[str, Rate]()
    try:
        order = list(nx.topological_sort(graph.rows_graph))
    except nx.NetworkXUnfeasible:
        order = list(nodes)
    for name in order:
        rate = _rate(nodes[name], known) if name in nodes else None
        if rate is not None:
            known[name] = replace(rate, a_wave=_in_waves(graph, nodes[name], known))
    return known


def is_refilled(graph: Graph, node: Node) -> bool:
    """Whether it sees only what a filter that refills lets pass."""
    specs = [graph[gate].spec for gate in node.gates if gate in graph.nodes]
    return any(isinstance(spec, FilterSpec) and spec.refill for spec in specs)


def _in_waves(graph: Graph, node: Node, known: Mapping[str, Rate]) -> bool:
    if isinstance(node.spec, PromptsSpec):
        return any(data["kind"] == "refill" for *_, data in graph.digraph.in_edges(node.name, data=True))
    if is_refilled(graph, node) or (isinstance(node.spec, FilterSpec) and node.spec.refill):
        return False
    return any(known[name].a_wave for name in node.sources if name in known)


def _rate(node: Node, known: Mapping[str, Rate]) -> Rate | None:
    if isinstance(node.spec, PromptsSpec):
        return Rate(node.spec.batch, "prompts")
    inputs = [known[source] for source in node.sources if source in known]
    if not inputs:
        return None
    at_most = isinstance(node.spec, FilterSpec) or any(rate.at_most for rate in inputs)
    if isinstance(node.spec, SamplesSpec):
        prompts = max(rate.count for rate in inputs if rate.unit == "prompts" or len(inputs) == 1)
        return Rate(prompts * node.spec.group_size, "rows", at_most)
    # A column of a prompt's own row goes to each of its samples: rows outrank prompts.
    widest = max(inputs, key=lambda rate: (rate.unit == "rows", rate.count))
    return Rate(widest.count, widest.unit, at_most)

"""Checks of a graph's shape: where its edges lead, and whether somebody reads what flows on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from .adaptive import adaptive_settings
from .errors import FlowrlError, GraphCycle, GraphError, UnknownColumn, UnreadOutput, did_you_mean
from .graph import EvaluateSpec, FilterSpec, Graph, Node, PromptsSpec, SamplesSpec, UpdateSpec
from .loss import REFERENCE
from .origins import Origins
from .sources import open_source

MAX_CYCLES = 20
"""A component of many nodes has more cycles than anyone reads."""


def check_bindings(graph: Graph) -> list[FlowrlError]:
    """Every binding and every gate names a node that exists, and a column that it writes."""
    problems: list[FlowrlError] = []
    nodes = graph.nodes
    for node in nodes.values():
        for binding in node.bindings:
            source = nodes.get(binding.source)
            if source is None:
                problems.append(_no_such_node(node, f"'{binding.parameter}' from", binding.source, nodes))
            elif binding.column not in source.outputs and not _may_write(source, binding.column):
                outputs = ", ".join(source.outputs)
                problem = (
                    f"node '{node.name}' reads column '{binding.column}', which node '{source.name}' does not write"
                )
                problems.append(
                    UnknownColumn(
                        problem,
                        at=node.at,
                        node=node.name,
                        found=f"columns {outputs}" if outputs else "no column",
                        wanted=f"a column '{binding.column}'",
                        fix=did_you_mean(binding.column, source.outputs) or "bind one of the columns that it writes",
                    )
                )
        problems += [_no_such_node(node, "the rows that pass", gate, nodes) for gate in node.gates if gate not in nodes]
    return problems


def _may_write(source: Node, column: str) -> bool:
    """A source that did not open when the graph was traced may have any column; `check_data` says why it did not."""
    if not isinstance(source.spec, PromptsSpec) or column in source.outputs:
        return False
    try:
        return column in open_source(source.spec.source).columns
    except FlowrlError:
        return True


def _no_such_node(node: Node, what: str, name: str, nodes: Mapping[str, Node]) -> UnknownColumn:
    return UnknownColumn(
        f"node '{node.name}' reads {what} node '{name}', which is not declared",
        at=node.at,
        node=node.name,
        found=f"'{name}'",
        wanted=", ".join(nodes),
        fix=did_you_mean(name, nodes) or f"declare a node '{name}'",
    )


def check_cycles(graph: Graph) -> list[FlowrlError]:
    """Rows flow one way: each cycle of nodes is a problem of its own, self loops included."""
    return [_cycle_error(graph, path) for path in islice(_cycles(graph), MAX_CYCLES)]


def _cycles(graph: Graph) -> Iterator[list[str]]:
    """Each cycle once, from the node that is declared first."""
    import networkx as nx

    order = {name: place for place, name in enumerate(graph.nodes)}
    single = nx.DiGraph(graph.rows_graph)
    single.remove_nodes_from([name for name in single if name not in order])
    for component in sorted(
        nx.strongly_connected_components(single), key=lambda names: min(map(order.__getitem__, names))
    ):
        for cycle in nx.simple_cycles(single.subgraph(component)):
            first = cycle.index(min(cycle, key=order.__getitem__))
            yield cycle[first:] + cycle[:first]


def _cycle_error(graph: Graph, path: list[str]) -> GraphCycle:
    first, last = graph[path[0]], graph[path[-1]]
    if len(path) == 1:
        problem = f"node '{first.name}' reads its own output: {first.name} -> {first.name}"
    else:
        problem = f"nodes wait for each other in a cycle: {' -> '.join([*path, path[0]])}"
    columns = [b.column for b in first.bindings if b.source == last.name] or ["rows"]
    if isinstance(last.spec, UpdateSpec):
        fix = f"rollouts get an update's weights by naming the same model: take '{last.name}' out of '{first.name}'"
    else:
        fix = f"take column '{columns[0]}' of '{last.name}' out of '{first.name}'"
    return GraphCycle(
        problem,
        at=first.at,
        node=first.name,
        found="; ".join(f"{name} ({graph[name].at})" for name in path),
        wanted="rows flow one way; the only feedback edge is a model's version: fl.update publishes it, and fl.rollout "
        "of the same model reads it, staleness= versions late",
        fix=fix,
    )


def check_read(graph: Graph) -> list[FlowrlError]:
    """Every node's output is read, in a graph that trains or evaluates; a metric is written to the run's record."""
    nodes = graph.nodes
    if not any(isinstance(node.spec, UpdateSpec | EvaluateSpec) for node in nodes.values()):
        return []
    followed = {setting.update for setting in adaptive_settings(graph)}
    read = {source for node in nodes.values() for source in _needs(node, node.name in followed)}
    ends = (UpdateSpec, EvaluateSpec)
    unread = [n for n in nodes.values() if n.name not in read and not isinstance(n.spec, ends) and n.kind != "metric"]
    return [_unread(node, graph) for node in unread]


def _needs(node: Node, is_followed: bool) -> tuple[str, ...]:
    """Nodes that a node reads for more than a metric of its own: a reference that no loss holds to is a mistake."""
    if not isinstance(node.spec, UpdateSpec) or is_followed or REFERENCE in node.spec.loss.reads:
        return node.sources
    return (*(binding.source for binding in node.bindings if binding.parameter != REFERENCE), *node.gates)


def _unread(node: Node, graph: Graph) -> UnreadOutput:
    updates = [other.name for other in graph.nodes.values() if isinstance(other.spec, UpdateSpec)]
    reader = f"fl.update ('{updates[0]}')" if updates else "another node"
    if isinstance(node.spec, FilterSpec):
        problem = f"nobody reads what filter '{node.name}' lets pass: it drops nothing"
        fix = "samples = fl.filter(samples, ...), and give these samples to the nodes behind it"
        return UnreadOutput(problem, at=node.at, node=node.name, found="no reader", wanted="a reader", fix=fix)
    columns = ", ".join(f"'{column}'" for column in node.outputs[:6])
    what = "scores" if node.kind == "reward" else "output"
    fix = f"give its handle to {reader}, remove the node, or write a number of it with @fl.node(out=fl.Metrics)"
    return UnreadOutput(
        f"nobody reads the {what} of node '{node.name}'",
        at=node.at,
        node=node.name,
        found=f"{columns} with no reader",
        wanted="a node that reads it",
        fix=fix,
    )


def check_joins(graph: Graph) -> list[FlowrlError]:
    """The rows of a node come from one rollout: those of two have different keys."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        rollouts = origins.rollouts[node.name]
        if len(rollouts) > 1:
            problems.append(
                GraphError(
                    f"node '{node.name}' joins the samples of {len(rollouts)} rollouts{_temperatures(rollouts)}",
                    at=node.at,
                    node=node.name,
                    found=" and ".join(f"'{rollout.name}' ({rollout.at})" for rollout in rollouts),
                    wanted="columns of one rollout: rows of two have different keys",
                    fix="give it the handles of one rollout, and declare a second node for the other",
                )
            )
    return problems


def _temperatures(makers: Sequence[Node]) -> str:
    """What joining their log-probs would compare, when they differ."""
    found = {maker.spec.temperature for maker in makers if isinstance(maker.spec, SamplesSpec)}
    return f", drawn at temperatures {' and '.join(f'{each:g}' for each in sorted(found))}" if len(found) > 1 else ""

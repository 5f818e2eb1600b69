"""Refill: filters that replace the groups which they drop, and what that asks of a graph.

Dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2). A step with such a filter reads its prompts in
*waves*, at most as many as the filter says: the next one when all groups of the last are decided and some are missing.
So what reads all rows of a step waits until the step is *closed* to new prompts, and nothing that decides a group may
wait for that. Nodes *behind* the filter see the groups that passed; nodes before and beside it see all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .errors import FlowrlError, GraphError
from .graph import FilterSpec, FunctionSpec, Graph, Node, SamplesSpec, UpdateSpec
from .origins import Origins


@dataclass(frozen=True, kw_only=True, slots=True)
class Refill:
    """A filter that replaces what it drops."""

    filter: str
    rollout: str
    """Whose groups it drops."""
    prompts: str
    """Where the further prompts come from."""
    waves: int
    """Most reads of these prompts in one step."""
    behind: frozenset[str]
    """Nodes that see only what it lets pass."""


def refills(graph: Graph) -> dict[str, Refill]:
    """The refilling filter of each rollout that has one, by rollout; of a graph that `check_refill` refuses, the first.

    The graph must have no cycle, and no binding to a node that is not there.
    """
    filters = _refilling(graph)
    origins = Origins.of(graph) if filters else None
    found: dict[str, Refill] = {}
    for node in filters:
        assert origins is not None
        assert isinstance(node.spec, FilterSpec)
        for rollout, prompts in zip(origins.rollouts[node.name], origins.prompts[node.name], strict=False):
            refill = Refill(
                filter=node.name,
                rollout=rollout.name,
                prompts=prompts.name,
                waves=node.spec.refill or 1,
                behind=_behind(graph, node.name),
            )
            found.setdefault(rollout.name, refill)
    return found


def check_refill(graph: Graph) -> list[FlowrlError]:
    """A refilling filter is the only one of its rollout and prompts, and the gate of whatever trains on its samples."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    for node in _refilling(graph):
        rollouts = set(origins.rollouts[node.name])
        same = [each for each in graph.nodes.values() if rollouts & set(origins.rollouts[each.name])]
        problems += [
            *_two_filters(node, same),
            *_no_gate(graph, node, same),
            *_waits_for_the_step(graph, node),
            *_shared_prompts(graph, origins, node),
        ]
    return problems


def _refilling(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes.values() if isinstance(node.spec, FilterSpec) and node.spec.refill]


def _behind(graph: Graph, name: str) -> frozenset[str]:
    import networkx as nx

    return frozenset(nx.descendants(graph.rows_graph, name))


def _two_filters(node: Node, same: Iterable[Node]) -> Iterator[FlowrlError]:
    first = next(each for each in same if isinstance(each.spec, FilterSpec) and each.spec.refill)
    if first is not node:
        yield GraphError(
            f"filters '{first.name}' and '{node.name}' both refill the batch of one rollout",
            at=node.at,
            node=node.name,
            found=f"refill={_waves(first)} in '{first.name}' ({first.at}) and refill={_waves(node)} here",
            wanted="one filter that says which groups are missing",
            fix=f"leave refill= out of one of them, or let the keep= of '{first.name}' decide for both",
        )


def _no_gate(graph: Graph, node: Node, same: Iterable[Node]) -> Iterator[FlowrlError]:
    updates = [each for each in same if isinstance(each.spec, UpdateSpec)]
    behind = _behind(graph, node.name)
    beside = [update for update in updates if update.name not in behind]
    if beside and len(beside) < len(updates):
        yield GraphError(
            f"node '{beside[0].name}' trains on groups that filter '{node.name}' has dropped",
            at=beside[0].at,
            node=beside[0].name,
            found=f"samples that have not passed '{node.name}' ({node.at}), which refills a step for its updates",
            wanted=f"samples behind '{node.name}': a step then has the batch of each update",
            fix=f"give it the samples that '{node.name}' returns",
        )
    elif graph.readers(node.name) and len(beside) == len(updates):  # one without any reader is told of by `check_read`
        yield GraphError(
            f"filter '{node.name}' refills the batch of no update",
            at=node.at,
            node=node.name,
            found=f"no update behind '{node.name}'"
            + (f"; '{beside[0].name}' ({beside[0].at}) trains on what it drops too" if beside else ""),
            wanted="an update of the samples that it lets pass",
            fix="give the samples that it returns to fl.update, or leave refill= out",
        )


def _waits_for_the_step(graph: Graph, node: Node) -> Iterator[FlowrlError]:
    import networkx as nx

    above = nx.ancestors(graph.rows_graph, node.name)
    functions = [each for name, each in graph.nodes.items() if name in above and isinstance(each.spec, FunctionSpec)]
    whole = [each for each in functions if each.per == "batch"]
    for each in whole[:1]:
        yield GraphError(
            f"filter '{node.name}' waits for node '{each.name}', which waits for all groups of the step",
            at=node.at,
            node=node.name,
            found=f"per='batch' in '{each.name}' ({each.at}), before a filter that asks for further groups",
            wanted="nodes per row and per group before a filter with refill=",
            fix=f"call '{each.name}' with the samples that the filter returns, or leave refill= out",
        )


def _shared_prompts(graph: Graph, origins: Origins, node: Node) -> Iterator[FlowrlError]:
    own = {rollout.name for rollout in origins.rollouts[node.name]}
    for prompts in origins.prompts[node.name]:
        others = [r for r in graph.readers(prompts.name) if isinstance(r.spec, SamplesSpec) and r.name not in own]
        for other in others[:1]:
            yield GraphError(
                f"filter '{node.name}' refills from prompts that rollout '{other.name}' answers too",
                at=node.at,
                node=node.name,
                found=f"'{prompts.name}' is read by {', '.join(repr(r) for r in sorted(own))} and '{other.name}' "
                f"({other.at}), whose steps would grow with it",
                wanted="prompts of its own for a rollout that is refilled",
                fix=f"give '{other.name}' another fl.prompts of the same source",
            )


def _waves(node: Node) -> int | None:
    return node.spec.refill if isinstance(node.spec, FilterSpec) else None

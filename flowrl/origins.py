"""Where the rows of each node come from: the rollout (or given responses) that made them, and their prompts."""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Graph, Node, PromptsSpec, SamplesSpec, UpdateSpec


@dataclass(frozen=True, slots=True)
class Origins:
    """Of every node of a graph without cycles, by name."""

    rollouts: dict[str, tuple[Node, ...]]
    """Rollouts and given responses that made its rows, in the order of declaration; itself for one of them."""
    prompts: dict[str, tuple[Node, ...]]
    """Prompts behind its rows; itself for prompts."""
    versions: dict[str, int]
    """By rollout: prompts that the largest update of its samples consumes, a step's when nothing trains on them."""

    @classmethod
    def of(cls, graph: Graph) -> Origins:
        """Follow the edges once, from the sources on. Bindings to nodes that are not there are passed over."""
        import networkx as nx

        nodes = graph.nodes
        order = {name: place for place, name in enumerate(nodes)}
        origins = cls({}, {}, {})
        for name in nx.topological_sort(nx.DiGraph(graph.rows_graph)):
            if name in nodes:
                node, sources = nodes[name], [source for source in nodes[name].sources if source in nodes]
                for table, kind in ((origins.rollouts, SamplesSpec), (origins.prompts, PromptsSpec)):
                    own = isinstance(node.spec, kind)
                    found = {name} if own else {other.name for source in sources for other in table[source]}
                    table[name] = tuple(nodes[other] for other in sorted(found, key=order.__getitem__))
        origins._add_versions(nodes)
        return origins

    def _add_versions(self, nodes: dict[str, Node]) -> None:
        for node in nodes.values():
            if isinstance(node.spec, SamplesSpec):
                self.versions[node.name] = 0
        for node in nodes.values():
            if isinstance(node.spec, UpdateSpec):
                for rollout in self.rollouts[node.name]:
                    size = node.spec.batch or self.step_size(node.name)
                    self.versions[rollout.name] = max(self.versions[rollout.name], size)
        for name, size in self.versions.items():
            self.versions[name] = size or self.step_size(name)

    def group_size(self, name: str) -> int:
        """Samples of a prompt in the rows of a node; 0 when no rollout made them."""
        specs = [node.spec for node in self.rollouts[name]]
        return min((spec.group_size for spec in specs if isinstance(spec, SamplesSpec)), default=0)

    def longest_response(self, name: str) -> int:
        """Tokens of the longest response in the rows of a node; 0 where no rollout makes them, or none is limited."""
        specs = [node.spec for node in self.rollouts[name]]
        return max((spec.longest_response for spec in specs if isinstance(spec, SamplesSpec)), default=0)

    def step_size(self, name: str) -> int:
        """Prompts a step of the prompts behind a node; 0 when there are none."""
        specs = [node.spec for node in self.prompts[name]]
        return max((spec.batch for spec in specs if isinstance(spec, PromptsSpec)), default=0)

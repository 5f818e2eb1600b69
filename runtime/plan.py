"""The plan: a graph made ready for the scheduler.

Each node becomes a `Stage` on a `Pool` of workers, with its sources sorted into those that it waits for row by row and
those that its prompts have brought already. What the language leaves unsaid is added here: a ``record`` stage that writes
every sample, and a weight sync for each rollout on a mesh of its own. A plan holds names and numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flowrl.errors import GraphError, RateError
from flowrl.graph import (
    EvaluateSpec,
    FilterSpec,
    ForwardSpec,
    FunctionSpec,
    Graph,
    Node,
    Per,
    PromptsSpec,
    RolloutSpec,
    UpdateSpec,
)
from flowrl.loss import Loss
from flowrl.mesh import Mesh

from .events import Action

HOST = "host"
RECORD = "record"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Workers of one kind: the host process, CPU workers, or the ranks of a mesh."""

    name: str
    kind: Literal["host", "cpu", "model"]
    size: int
    mesh: Mesh | None = None
    models: tuple[str, ...] = ()
    """Models that each of its ranks holds."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of its workers, by rank."""
        return (self.name,) if self.kind == "host" else tuple(f"{self.name}.{rank}" for rank in range(self.size))

    def rank_of(self, prompt: int, num_prompts: int) -> int:
        """The replica that a prompt and its samples belong to: contiguous shares in order of the keys."""
        return min(prompt * self.size // num_prompts, self.size - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A node as the scheduler sees it."""

    name: str
    action: Action
    per: Per
    pool: str
    space: str
    """The rollout whose samples its rows are; a prompts stage's own name."""
    waits_for: tuple[str, ...]
    """Stages that a row must have passed first."""
    reads: tuple[tuple[str, tuple[str, ...]], ...]
    """Columns by the stage that writes them."""
    depth: int
    """Longest path from the prompts: later stages of a step go first."""
    terminal: bool = False
    """A row that passes it is consumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All stages and pools of a run."""

    graph: Graph
    stages: dict[str, Stage]
    """In topological order."""
    pools: dict[str, Pool]
    prompts_per_step: dict[str, int]
    """By prompts stage."""
    samples_per_prompt: dict[str, int]
    """By rollout."""
    staleness: dict[str, int]
    """By rollout."""

    def workers(self) -> list[str]:
        """Names of all workers."""
        return [worker for pool in self.pools.values() for worker in pool.workers]

    def readers(self, stage: str) -> list[Stage]:
        """Stages that wait for `stage`."""
        return [reader for reader in self.stages.values() if stage in reader.waits_for]

    def loss(self, update: str) -> Loss:
        """What an update minimises."""
        spec = self.graph[update].spec
        assert isinstance(spec, UpdateSpec)
        return spec.loss


def compile_plan(graph: Graph) -> Plan:
    """Place the nodes of a checked graph.

    Raises:
        GraphError: a node joins the samples of two rollouts, or no node reads prompts.
        RateError: an update's batch is no multiple of its prompts' batch.
    """
    spaces = _spaces(graph)
    pools = _pools(graph)
    stages: dict[str, Stage] = {}
    for node in _topological(graph):
        stages[node.name] = _stage(graph, node, spaces, stages)
    for number, rollout in enumerate(node for node in graph.nodes.values() if isinstance(node.spec, RolloutSpec)):
        name = RECORD if number == 0 else f"{RECORD}_{number + 1}"
        stages[name] = _record(name, rollout.name, graph, spaces, stages)
    return Plan(
        graph=graph,
        stages=stages,
        pools=pools,
        prompts_per_step=_prompts_per_step(graph, spaces),
        samples_per_prompt={n.name: n.spec.sampling.n for n in graph.nodes.values() if isinstance(n.spec, RolloutSpec)},
        staleness={n.name: n.spec.staleness for n in graph.nodes.values() if isinstance(n.spec, RolloutSpec)},
    )


def _stage(graph: Graph, node: Node, spaces: dict[str, str], before: dict[str, Stage]) -> Stage:
    reads: dict[str, dict[str, None]] = {}
    for binding in node.bindings:
        reads.setdefault(binding.source, {})[binding.column] = None
    sources = [source for source in node.sources if isinstance(node.spec, RolloutSpec) or source in _samplers(graph)]
    if isinstance(node.spec, RolloutSpec | EvaluateSpec):
        sources = [source for source in node.sources if isinstance(graph[source].spec, PromptsSpec)]
    return Stage(
        name=node.name,
        action=_action(node),
        per=node.per,
        pool=graph.mesh_name(node.mesh),
        space=spaces[node.name],
        waits_for=tuple(dict.fromkeys(sources)),
        reads=tuple((source, tuple(columns)) for source, columns in reads.items()),
        depth=1 + max((before[source].depth for source in node.sources), default=-1),
        terminal=isinstance(node.spec, UpdateSpec),
    )


def _record(name: str, rollout: str, graph: Graph, spaces: dict[str, str], stages: dict[str, Stage]) -> Stage:
    members = [graph[member] for member, space in spaces.items() if space == rollout]
    prompts = next(binding.source for binding in graph[rollout].bindings)
    columns = tuple(c for c in ("response", "stop", "versions", "response_ids") if c in graph[rollout].outputs)
    scored = [(node.name, node.outputs) for node in members if node.kind == "reward" or "scores" in node.outputs]
    return Stage(
        name=name,
        action="record",
        per="batch",
        pool=HOST,
        space=rollout,
        waits_for=tuple(node.name for node in members if not isinstance(node.spec, UpdateSpec)),
        reads=((prompts, ("prompt",)), (rollout, columns), *scored),
        depth=1 + max(stage.depth for stage in stages.values()),
        terminal=not any(isinstance(node.spec, UpdateSpec) for node in members),
    )


def _action(node: Node) -> Action:
    match node.spec:
        case PromptsSpec():
            return "prompts"
        case RolloutSpec():
            return "rollout"
        case ForwardSpec():
            return "forward"
        case FunctionSpec():
            return "function"
        case FilterSpec():
            return "filter"
        case UpdateSpec():
            return "backward"
        case EvaluateSpec():
            return "evaluate"


def _samplers(graph: Graph) -> set[str]:
    """Nodes whose rows are samples, not prompts."""
    return {node.name for node in graph.nodes.values() if not isinstance(node.spec, PromptsSpec | EvaluateSpec)}


def _spaces(graph: Graph) -> dict[str, str]:
    """The rollout that made the rows of each node; a node that reads prompts alone is its own space."""
    spaces: dict[str, str] = {}
    for node in _topological(graph):
        made_by = {spaces[source] for source in node.sources if not isinstance(graph[source].spec, PromptsSpec)}
        if len(made_by) > 1:
            raise GraphError(
                f"node '{node.name}' joins the samples of two rollouts",
                at=node.at,
                node=node.name,
                found=" and ".join(f"'{space}'" for space in sorted(made_by)),
                wanted="columns of one rollout: rows of two have different keys",
                fix="join them in one rollout, or update once for each",
            )
        spaces[node.name] = next(iter(made_by), node.name)
    return spaces


def _prompts_per_step(graph: Graph, spaces: dict[str, str]) -> dict[str, int]:
    counts = {name: node.spec.batch for name, node in graph.nodes.items() if isinstance(node.spec, PromptsSpec)}
    for node in graph.nodes.values():
        if not isinstance(node.spec, UpdateSpec) or node.spec.batch is None:
            continue
        prompts = graph[spaces[node.name]].bindings[0].source
        declared = graph[prompts].spec
        assert isinstance(declared, PromptsSpec)
        if node.spec.batch % declared.batch:
            raise RateError(
                f"node '{node.name}' consumes a batch that steps of '{prompts}' do not add up to",
                at=node.at,
                node=node.name,
                found=f"batch={node.spec.batch}, {declared.batch} prompts a step",
                wanted=f"a multiple of {declared.batch}",
                fix=f"batch={max(1, round(node.spec.batch / declared.batch)) * declared.batch}",
            )
        counts[prompts] = node.spec.batch
    return counts


def _pools(graph: Graph) -> dict[str, Pool]:
    """The host, and one pool for each mesh that a node or a model is placed on."""
    pools: dict[str, Pool] = {HOST: Pool(name=HOST, kind="host", size=1)}
    models: dict[str, dict[str, None]] = {}
    for node in graph.nodes.values():
        if node.mesh is None:
            continue
        name = graph.mesh_name(node.mesh)
        kind: Literal["cpu", "model"] = "cpu" if node.mesh.workers else "model"
        if node.model is not None:
            models.setdefault(name, {})[node.model.name] = None
        pools[name] = Pool(
            name=name, kind=kind, size=node.mesh.world_size, mesh=node.mesh, models=tuple(models.get(name, ()))
        )
    return pools


def _topological(graph: Graph) -> Iterable[Node]:
    import networkx as nx

    order = {name: i for i, name in enumerate(graph.nodes)}
    return [graph[name] for name in nx.lexicographical_topological_sort(graph.rows_graph, key=order.__getitem__)]

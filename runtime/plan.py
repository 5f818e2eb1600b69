"""The plan: a graph made ready for the scheduler.

Each node becomes a `Stage` on a `Pool` of workers, with its sources sorted into those that it waits for row by row and
those that its prompts have brought already. What the language leaves unsaid is added here: a ``record`` stage that
writes every sample. A plan holds names and numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from flowrl.adaptive import AdaptiveSetting, adaptive_settings
from flowrl.errors import GraphError, RateError
from flowrl.graph import (
    EvaluateSpec,
    FilterSpec,
    ForwardSpec,
    FunctionSpec,
    Graph,
    JudgeSpec,
    Node,
    Per,
    PromptsSpec,
    ResponsesSpec,
    RolloutSpec,
    SamplesSpec,
    UpdateSpec,
)
from flowrl.loss import Loss
from flowrl.mesh import Mesh
from flowrl.refill import Refill, refills

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
    workers: tuple[str, ...] = field(init=False)
    """Names of its workers, by rank."""

    def __post_init__(self) -> None:
        ranks = tuple(f"{self.name}.{rank}" for rank in range(self.size))
        object.__setattr__(self, "workers", (self.name,) if self.kind == "host" else ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A node as the scheduler sees it."""

    name: str
    action: Action
    per: Per
    pool: str
    space: str
    """The rollout, or given responses, whose samples its rows are; a prompts stage's own name."""
    waits_for: tuple[str, ...]
    """Stages that a row must have passed first; those that they wait for themselves are left out."""
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
    every: dict[str, int]
    """By prompts stage: steps from one batch to the next."""
    readers: dict[str, tuple[Stage, ...]] = field(init=False)
    """By stage: those that wait for it."""
    in_space: dict[str, tuple[Stage, ...]] = field(init=False)
    """By rollout: the stages whose rows are its samples, itself included."""
    model_of: dict[str, str] = field(init=False)
    """By stage: the name of the model that it runs."""
    refills: dict[str, Refill] = field(init=False)
    """By rollout: the filter that replaces groups which it drops, if it has one."""
    prefixes: dict[str, str] = field(init=False)
    """By update: what the names of its metrics begin with. Those of the update that trains the policy have plain names:
    the first whose model samples, or the first of all where none does. Of the others it is ``MODEL/``."""
    adaptive: tuple[AdaptiveSetting, ...] = field(init=False)
    """Settings of functions that updates move."""
    reward: str | None = field(init=False)
    """The node whose scores are a run's reward: the only one whose scores make no other scores."""

    def __post_init__(self) -> None:
        stages = self.stages.values()
        nodes = self.graph.nodes.items()
        object.__setattr__(self, "model_of", {name: node.model.name for name, node in nodes if node.model is not None})
        readers = {name: tuple(s for s in stages if name in s.waits_for) for name in self.stages}
        object.__setattr__(self, "readers", readers)
        in_space = {name: tuple(s for s in stages if s.space == name) for name in self.samples_per_prompt}
        object.__setattr__(self, "in_space", in_space)
        object.__setattr__(self, "refills", refills(self.graph))
        object.__setattr__(self, "prefixes", _prefixes(self.graph))
        object.__setattr__(self, "adaptive", adaptive_settings(self.graph))
        object.__setattr__(self, "reward", _reward(self.graph))

    def behind(self, rollout: str) -> frozenset[str]:
        """Stages of a rollout's rows that see only what a filter that refills lets pass."""
        refill = self.refills.get(rollout)
        return refill.behind if refill else frozenset()

    def workers(self) -> list[str]:
        """Names of all workers."""
        return [worker for pool in self.pools.values() for worker in pool.workers]

    def loss(self, update: str) -> Loss:
        """What an update minimises."""
        spec = self.graph[update].spec
        assert isinstance(spec, UpdateSpec)
        return spec.loss


def compile_plan(graph: Graph) -> Plan:
    """Place the nodes of a checked graph.

    Raises:
        GraphError: a node belongs to the samples of two rollouts, or of none.
        RateError: an update's batch is no multiple of its prompts' batch, or another than that of an update beside it.
    """
    spaces = _spaces(graph)
    pools = _pools(graph)
    stages: dict[str, Stage] = {}
    for node in _topological(graph):
        stages[node.name] = _stage(graph, node, spaces, stages)
    for number, rollout in enumerate(node for node in graph.nodes.values() if isinstance(node.spec, SamplesSpec)):
        name = RECORD if number == 0 else f"{RECORD}_{number + 1}"
        stages[name] = _record(name, rollout.name, graph, spaces, stages)
    return Plan(
        graph=graph,
        stages=stages,
        pools=pools,
        prompts_per_step=_prompts_per_step(graph, spaces),
        samples_per_prompt={n.name: n.spec.group_size for n in graph.nodes.values() if isinstance(n.spec, SamplesSpec)},
        staleness={n.name: n.spec.staleness for n in graph.nodes.values() if isinstance(n.spec, SamplesSpec)},
        every={n.name: n.spec.every for n in graph.nodes.values() if isinstance(n.spec, PromptsSpec)},
    )


def _stage(graph: Graph, node: Node, spaces: dict[str, str], before: dict[str, Stage]) -> Stage:
    reads: dict[str, dict[str, None]] = {}
    for binding in node.bindings:
        reads.setdefault(binding.source, {})[binding.column] = None
    if isinstance(node.spec, SamplesSpec | EvaluateSpec):
        waits_for = node.sources
    else:
        sources = [source for source in node.sources if not isinstance(graph[source].spec, PromptsSpec)]
        waits_for = _direct(sources, before) or ((spaces[node.name],) if node.sources else ())
    return Stage(
        name=node.name,
        action=_action(node),
        per=node.per,
        pool=graph.mesh_name(node.mesh),
        space=spaces[node.name],
        waits_for=waits_for,
        reads=tuple((source, tuple(columns)) for source, columns in reads.items()),
        depth=1 + max((before[source].depth for source in (*node.sources, *waits_for)), default=-1),
        terminal=isinstance(node.spec, UpdateSpec),
    )


def _direct(sources: Iterable[str], stages: dict[str, Stage]) -> tuple[str, ...]:
    """The sources that no other source waits for: a row that has passed those has passed all."""
    implied = {above for source in sources for above in _above(source, stages)}
    return tuple(dict.fromkeys(source for source in sources if source not in implied))


def _above(name: str, stages: dict[str, Stage]) -> set[str]:
    """All stages that a stage waits for, directly or not."""
    found: set[str] = set()
    todo = list(stages[name].waits_for)
    while todo:
        source = todo.pop()
        if source not in found:
            found.add(source)
            todo += stages[source].waits_for
    return found


def _record(name: str, rollout: str, graph: Graph, spaces: dict[str, str], stages: dict[str, Stage]) -> Stage:
    members = [graph[member] for member, space in spaces.items() if space == rollout]
    prompts = next(binding.source for binding in graph[rollout].bindings)
    columns = tuple(c for c in ("response", "stop", "versions", "response_ids") if c in graph[rollout].outputs)
    scored = [(node.name, node.outputs) for node in members if "scores" in node.outputs]
    scored.sort(key=lambda score: score[0] != _reward(graph))  # what a sample's reward is stands first
    return Stage(
        name=name,
        action="record",
        per="batch",
        pool=HOST,
        space=rollout,
        waits_for=_direct([node.name for node in members if not isinstance(node.spec, UpdateSpec)], stages),
        reads=((prompts, ("prompt",)), (rollout, columns), *scored),
        depth=-1,  # nobody waits for it: everything else goes first
        terminal=not any(isinstance(node.spec, UpdateSpec) for node in members),
    )


def _action(node: Node) -> Action:
    match node.spec:
        case PromptsSpec():
            return "prompts"
        case RolloutSpec():
            return "rollout"
        case ResponsesSpec():
            return "responses"
        case ForwardSpec():
            return "forward"
        case JudgeSpec():
            return "judge"
        case FunctionSpec():
            return "function"
        case FilterSpec():
            return "filter"
        case UpdateSpec():
            return "backward"
        case EvaluateSpec():
            return "evaluate"


def _spaces(graph: Graph) -> dict[str, str]:
    """The rollout that made the rows of each node; prompts, rollouts and evaluations are their own."""
    spaces: dict[str, str] = {}
    for node in _topological(graph):
        if isinstance(node.spec, PromptsSpec | SamplesSpec | EvaluateSpec):
            spaces[node.name] = node.name
            continue
        made_by = {spaces[source] for source in node.sources if not isinstance(graph[source].spec, PromptsSpec)}
        rollouts = sorted(made_by or _rollouts_of(graph, node))
        if len(rollouts) != 1:
            raise GraphError(
                f"node '{node.name}' belongs to no single rollout",
                at=node.at,
                node=node.name,
                found=" and ".join(f"'{rollout}'" for rollout in rollouts) or "columns that no rollout samples",
                wanted="columns of one rollout: rows of two have different keys",
                fix="read a column of the rollout that it is about, and of no other",
            )
        spaces[node.name] = rollouts[0]
    return spaces


def _rollouts_of(graph: Graph, node: Node) -> set[str]:
    """Rollouts that answer the prompts which a node reads."""
    readers = (reader for source in node.sources for reader in graph.readers(source))
    return {reader.name for reader in readers if isinstance(reader.spec, SamplesSpec)}


def _prompts_per_step(graph: Graph, spaces: dict[str, str]) -> dict[str, int]:
    declared = {name: node.spec.batch for name, node in graph.nodes.items() if isinstance(node.spec, PromptsSpec)}
    wanted: dict[str, int] = {}
    for node in graph.nodes.values():
        if not isinstance(node.spec, UpdateSpec):
            continue
        prompts = graph[spaces[node.name]].bindings[0].source
        batch = node.spec.batch or declared[prompts]
        step = declared[prompts]
        multiple = max(1, round(batch / step)) * step
        first = wanted.setdefault(prompts, multiple)
        if batch != first:
            raise RateError(
                f"node '{node.name}' consumes a batch that steps of '{prompts}' do not add up to",
                at=node.at,
                node=node.name,
                found=f"batch={batch}, {step} prompts a step",
                wanted=f"a multiple of {step}" if first == multiple else f"batch={first}, as the update before it",
                fix=f"batch={first}",
            )
    return declared | wanted


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


def _prefixes(graph: Graph) -> dict[str, str]:
    nodes = graph.nodes.values()
    updates = [node for node in nodes if isinstance(node.spec, UpdateSpec)]
    samplers = [node.model for node in nodes if isinstance(node.spec, RolloutSpec)]
    main = next((node for node in updates if node.model in samplers), updates[0] if updates else None)
    return {node.name: "" if node is main or node.model is None else f"{node.model.name}/" for node in updates}


def _reward(graph: Graph) -> str | None:
    import networkx as nx

    scoring = [node.name for node in graph.nodes.values() if "scores" in node.outputs]
    parts = set[str]().union(*(nx.ancestors(graph.rows_graph, name) for name in scoring))
    last = [name for name in scoring if name not in parts]
    return last[0] if len(last) == 1 else None


def _topological(graph: Graph) -> list[Node]:
    """Sources first, in order of declaration; what reads samples comes after all rollouts."""
    import networkx as nx

    order = {name: i for i, name in enumerate(graph.nodes)}
    nodes = [graph[name] for name in nx.lexicographical_topological_sort(graph.rows_graph, key=order.__getitem__)]
    return sorted(nodes, key=lambda node: not isinstance(node.spec, PromptsSpec | SamplesSpec))

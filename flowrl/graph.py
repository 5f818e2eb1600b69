"""The graph: nodes under names, and between them the columns that flow.

A `Graph` is a `networkx.MultiDiGraph` with a name and the parameters it was traced with: node attribute ``node``
holds a `Node`; each edge is one column (its key), and carries ``kind``:

* ``column``: the reader binds that column,
* ``gate``: a filter decides which rows the reader sees (from a rollout whose columns it does not read: ``column``),
* ``version``: the one way back of data, from an update to what reads its model; ``tokens`` is the staleness,
* ``refill``: from a filter that asks for further prompts to where they come from; ``tokens`` is the most reads a step.

What a node does is its `spec`, one frozen record a kind. A `Node` holds no process, socket or tensor.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .backend import Output, Sampling
from .errors import Location
from .loss import Loss
from .mesh import Mesh
from .model import Model

if TYPE_CHECKING:
    import networkx as nx

Per = Literal["row", "group", "batch"]
"""What one call of a node function sees."""
BACK = frozenset({"version", "refill"})
"""Kinds of edges that carry no rows, and may run backwards."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A parameter of a node and the column that fills it."""

    parameter: str
    source: str
    """Name of the node that writes the column."""
    column: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsSpec:
    """`fl.prompts`: rows of a data source."""

    source: Any
    batch: int
    """Prompts a step."""
    shuffle: bool
    seed: int
    column: str
    """Data set column that holds the prompt: text, or a list of chat messages."""
    chat: bool = False
    """A text is what a user says: it goes through the chat template."""
    max_prompt_tokens: int | None
    on_too_long: Literal["error", "drop", "left"]
    on_missing: Literal["error", "drop"]
    last: Literal["drop", "short", "wrap"]
    epochs: int | None
    every: int = 1
    """Steps from one batch to the next."""
    model: Model | None = None
    """The model whose tokenizer makes ``prompt_ids``: that of the first rollout that reads these prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesSpec(ABC):
    """What gives each prompt its samples, and so makes a space of rows: a rollout, or answers of the data set."""

    staleness: int
    """How many versions older than the trainer's a response may start."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Samples of a prompt."""

    @property
    @abstractmethod
    def longest_response(self) -> int:
        """Tokens of the longest response; 0 where no limit is declared."""

    @property
    @abstractmethod
    def temperature(self) -> float:
        """That log-probs of these samples are taken at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec(SamplesSpec):
    """`fl.rollout`: responses of one model."""

    sampling: Sampling
    tool: ToolSpec | None = None
    """What answers its turns."""

    @property
    def group_size(self) -> int:
        """Samples of a prompt."""
        return self.sampling.group_size

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response."""
        return self.sampling.max_new_tokens

    @property
    def temperature(self) -> float:
        """That of the sampling; greedy responses are compared at 1."""
        return self.sampling.temperature or 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesSpec(SamplesSpec):
    """`fl.responses`: responses that stand in the data set, tokenized. No model samples, so no version is read."""

    staleness: int = 1
    """Steps that they may be read ahead of the trainer: a row is the same whenever it is read."""
    model: Model
    """Whose tokenizer makes the ids."""
    columns: tuple[str, ...]
    """Data set column of each sample of a prompt."""
    preference: tuple[float | str, ...]
    """That of each sample, or the data set column that holds it."""
    trained: tuple[bool, ...]
    """Whether each sample's tokens are trained."""
    max_new_tokens: int | None
    on_too_long: Literal["error", "drop", "cut"]

    @property
    def group_size(self) -> int:
        """Samples of a prompt: one a column."""
        return len(self.columns)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response; 0 where no limit is declared."""
        return self.max_new_tokens or 0

    @property
    def temperature(self) -> float:
        """1: log-probs are those of the model itself."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSpec:
    """`fl.logprobs`, `fl.topk`, `fl.values`, `fl.score`: a forward pass without a gradient."""

    outputs: tuple[Output, ...]
    """What the model computes: the node's columns, in order."""
    temperature: float
    k: int = 0
    """Ids a token that ``topk_ids`` and ``topk_logprobs`` are about."""
    text: bool = False
    """The model reads the text of prompt and response in its own tokens, not the ids of the one that sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionSpec:
    """`@fl.reward`, `@fl.advantage`, `@fl.node`: a function over columns."""

    function: Callable[..., Any]
    settings: Mapping[str, Any]
    timeout_s: float | None
    """Longest that one call may take."""
    on_error: Literal["fail", "drop", "tell"]
    """What a call that raises, times out or gives no number does to its rows; a tool may tell the model."""
    retries: int
    """Calls after the first before `on_error` applies."""
    max_failure_rate: float
    """The run fails once more than this share of a step's calls has failed."""
    role: Literal["reward", "advantage", "node", "metric", "tool"]
    min_group: int = 1
    """Fewest samples of a prompt that the function is defined for."""
    needs: Callable[[], None] | None = None
    """Raises a `FlowrlError` where this machine cannot run the function; asked before the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSpec:
    """`fl.judge`: a language model is asked about each sample, and its answer is read as a score."""

    ask: FunctionSpec
    """From columns to what the judge is asked: text, or chat messages."""
    read: FunctionSpec
    """From the text of its answer to a score."""
    sampling: Sampling
    max_prompt_tokens: int | None
    """Longest question; None is limited by the judge's length alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """``tool=`` of a rollout or an evaluation: what answers the model's turns."""

    call: FunctionSpec
    per: Literal["row", "batch"]
    """What one call sees: a turn, or those of all responses that a round leaves open."""
    role: str | None
    """Of its answers in a chat; None appends them as text to whatever stands there."""
    max_answer_tokens: int | None
    """Longest answer."""
    on_too_long: Literal["right", "left", "drop", "error"]
    """What becomes of a longer one: it is cut on that side, its row is dropped, or the run ends."""
    max_turns: int | None
    """Most turns of the model in a response; None sets no limit beside the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterSpec:
    """`fl.filter`: drops rows or whole groups."""

    keep: Callable[..., Any]
    reason: str
    refill: int | None = None
    """Most times that a step reads its prompts' batch to replace dropped groups; None never replaces them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSpec:
    """`fl.update`: trains a model and publishes a version."""

    loss: Loss
    batch: int | None
    """Prompts that one version consumes; None is one step's."""
    minibatches: int
    """Optimizer steps that an epoch over the batch is split into."""
    epochs: int
    """Passes over the batch."""
    max_tokens: int | None
    """Most padded tokens of one forward and backward pass; None takes a rank's whole share."""
    clip_grad: float | None
    """Largest global gradient norm."""
    temperature: float
    """Of the rollout that made the samples: the trainer divides its logits by the same."""
    max_mismatch: float | None = None
    """Largest mean ``mismatch_kl`` that the optimizer may step on, in nats; None is no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateSpec:
    """`fl.evaluate`: scores one pinned version on held-out prompts."""

    score: FunctionSpec
    every: int
    """Versions between two evaluations."""
    sampling: Sampling
    tool: ToolSpec | None = None
    """What answers its turns."""


Spec = (
    PromptsSpec
    | RolloutSpec
    | ResponsesSpec
    | ForwardSpec
    | JudgeSpec
    | FunctionSpec
    | FilterSpec
    | UpdateSpec
    | EvaluateSpec
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Node:
    """One declared node."""

    name: str
    spec: Spec
    per: Per
    bindings: tuple[Binding, ...]
    gates: tuple[str, ...]
    """Filters that each of its rows has passed. Of a node that reads only columns of the prompts and is behind no
    filter, the rollout whose samples it is about."""
    outputs: tuple[str, ...]
    """Columns that it writes; a filter and an update write none."""
    at: Location
    model: Model | None = None
    mesh: Mesh | None = None
    """Where it runs: its model's mesh, or CPU workers; None is the host process."""

    @property
    def kind(self) -> str:
        """``prompts``, ``rollout``, ``responses``, ``forward``, ``judge``, ``reward``, ``advantage``, ``node``,
        ``metric``, ``filter``, ``update`` or ``evaluate``."""
        return self.spec.role if isinstance(self.spec, FunctionSpec) else type(self.spec).__name__[:-4].lower()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the nodes that it waits for, each once."""
        return tuple(dict.fromkeys([*(binding.source for binding in self.bindings), *self.gates]))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes and the columns between them."""

    name: str
    digraph: nx.MultiDiGraph[str]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the graph function was called with, defaults filled in."""
    doc: str = ""
    at: Location | None = None

    @classmethod
    def build(
        cls,
        name: str,
        nodes: Iterable[Node],
        parameters: Mapping[str, Any] | None = None,
        *,
        doc: str = "",
        at: Location | None = None,
    ) -> Graph:
        """Join nodes by their bindings. Names must differ (the tracer sees to that)."""
        import networkx as nx

        digraph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=name)
        nodes = list(nodes)
        for node in nodes:
            digraph.add_node(node.name, node=node)
        samplers = {node.name for node in nodes if isinstance(node.spec, SamplesSpec)}
        for node in nodes:
            for binding in node.bindings:
                digraph.add_edge(binding.source, node.name, key=binding.column, kind="column")
            for gate in node.gates:
                digraph.add_edge(gate, node.name, key="rows", kind="column" if gate in samplers else "gate")
        for node in nodes:
            if isinstance(node.spec, FilterSpec) and node.spec.refill:
                for prompts in _prompts_above(node, nodes):
                    digraph.add_edge(node.name, prompts, key="prompts", kind="refill", tokens=node.spec.refill)
        for update in (node for node in nodes if isinstance(node.spec, UpdateSpec)):
            for reader in nodes:
                if reader is not update and reader.model is update.model:
                    tokens = reader.spec.staleness if isinstance(reader.spec, RolloutSpec) else 0
                    digraph.add_edge(update.name, reader.name, key="version", kind="version", tokens=tokens)
        return cls(name, digraph, parameters or {}, doc, at)

    @property
    def nodes(self) -> dict[str, Node]:
        """By name, in the order of declaration. A binding to a node that was never declared has no entry."""
        attributes = self.digraph.nodes(data=True)
        return {name: data["node"] for name, data in attributes if "node" in data}

    def __getitem__(self, name: str) -> Node:
        node: Node = self.digraph.nodes[name]["node"]
        return node

    @property
    def rows_graph(self) -> nx.MultiDiGraph[str]:
        """The graph of its rows alone, without versions and refills: what must have no cycle."""
        import networkx as nx

        forward = nx.MultiDiGraph()
        forward.add_nodes_from(self.digraph.nodes(data=True))
        edges = self.digraph.edges(keys=True, data=True)
        forward.add_edges_from((a, b, key, data) for a, b, key, data in edges if data["kind"] not in BACK)
        return forward

    def mesh_name(self, mesh: Mesh | None) -> str:
        """How a mesh is called: its own name, or ``mesh``, ``mesh_2`` in order of use; ``host`` for None."""
        if mesh is None:
            return "host"
        unnamed: list[int] = []
        for node in self.nodes.values():
            if node.mesh is not None and not node.mesh.name and id(node.mesh) not in unnamed:
                unnamed.append(id(node.mesh))
        if mesh.name:
            return mesh.name
        number = unnamed.index(id(mesh)) + 1
        return "mesh" if number == 1 else f"mesh_{number}"

    def readers(self, name: str) -> list[Node]:
        """Nodes that bind a column of `name` or are gated by it."""
        return [node for node in self.nodes.values() if name in node.sources]

    @property
    def fingerprint(self) -> str:
        """A hash of names, kinds, bindings and placement: two processes that traced one file must agree on it."""
        digest = hashlib.sha256()
        for node in self.nodes.values():
            model = (node.model.name, node.model.source, node.model.backend) if node.model else None
            digest.update(
                repr((node.name, node.kind, node.per, node.bindings, node.gates, model, str(node.mesh))).encode()
            )
        return digest.hexdigest()[:16]

    @property
    def models(self) -> dict[str, Model]:
        """By name."""
        return {node.model.name: node.model for node in self.nodes.values() if node.model is not None}


def _prompts_above(node: Node, nodes: Iterable[Node]) -> list[str]:
    """Prompts that a node's rows come from."""
    by_name = {each.name: each for each in nodes}
    found, todo = dict.fromkeys(node.sources), list(node.sources)
    while todo:
        for source in by_name[name].sources if (name := todo.pop()) in by_name else ():
            if source not in found:
                found[source] = None
                todo.append(source)
    return [name for name in found if name in by_name and isinstance(by_name[name].spec, PromptsSpec)]

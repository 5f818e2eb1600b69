"""Rows that flow a version, the bound of every queue, and the proof that these bounds cannot deadlock.

A graph is a synchronous dataflow graph (Lee & Messerschmitt 1987, "Synchronous Data Flow", Proc. IEEE 75(9)): each
firing of a node takes and gives a fixed number of rows. A dropped row still counts: it passes every edge as a mark that
it was dropped, so that filters do not change a rate. One firing of

* ``prompts`` gives a step: ``batch`` prompts,
* ``rollout`` takes a prompt and gives its ``n`` samples; so do ``responses``, without a version,
* a node per row, group or batch takes and gives 1, ``n`` or, like the update, ``batch x n`` samples,
* ``update`` takes ``batch x n`` samples, its own batch, and gives one version.

A node that reads a column of the prompts takes the prompt's row once for all samples of its group: 1/n a sample. The
version edge carries *permits to start a step*, and a step is what one version consumes: an update gives one, a rollout
takes ``1/batch`` of one a prompt, where ``batch`` is the update's, and ``staleness + 1`` lie there at the start, for
version 0 exists before anything ran.
`fl.evaluate` is left out: it reads one pinned batch whenever its version comes, so nothing flows.

A filter with ``refill=W`` makes the longest step the iteration: all `W` waves are read, and one row in `W` passes. So a
group gives ``n / W`` rows there, and what a node behind it takes from before or beside it is `W` times as much. The
filter gives its prompts a *permit* for each group that it has decided, and a prompt takes one: ``(staleness + 1)``
batches of them lie there at the start, for a step is read while no earlier one may still ask (runtime/cursor.py). A
shorter step is a part of the longest: each node fires less often, and the queues hold less.

*No deadlock*: by their theorem it is enough that one iteration (every node as often as its repetition says) runs to its
end from the initial permits in bounded queues: the queues are then as they were, and it can run again. A firing takes
nothing from another that was ready, so the order in which the simulation fires does not matter.

*Bound*: the rows of at most ``staleness + 1`` updates are between admission and consumption, so no queue holds more; of
each the rows of `W` waves, where a filter may still drop some, or has yet to be joined with what it lets pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from .errors import RateError
from .graph import EvaluateSpec, FunctionSpec, Graph, Node, PromptsSpec, RolloutSpec, SamplesSpec, UpdateSpec
from .origins import Origins
from .refill import Refill, refills

TEXTS_OF_PROMPT = frozenset({"prompt", "prompt_ids"})
SCALARS = frozenset({"scores", "stop"})
"""Columns of one number a row: no tokens flow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """An edge with its rates."""

    source: str
    target: str
    columns: tuple[str, ...]
    """Empty for a gate, a version edge and a refill."""
    gives: Fraction
    """Rows (permits, on a version edge and a refill) that one firing of the source puts on it."""
    takes: Fraction
    """Rows that one firing of the target takes."""
    tokens: int = 0
    """Permits that lie on it at the start."""
    capacity: int | None = None
    """Most rows that it may hold; None for permits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The most that an edge can hold."""

    rows: int
    unit: str
    """``prompts`` or ``samples``."""
    num_tokens: int | None
    """Tokens of these rows at their longest; None where no length is declared, or no tokens flow."""
    peak: int
    """Most rows that the simulated iteration put on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What is known of a graph's flow before it runs."""

    edges: Mapping[tuple[str, str], Bound]
    """By source and target."""
    repetitions: Mapping[str, int]
    """Firings of each node in one iteration: the smallest whole numbers that leave every queue as it was."""


@dataclass(slots=True)
class _Queue:
    flow: Flow
    held: Fraction
    peak: Fraction = field(default_factory=Fraction)

    def ready(self) -> int:
        """Firings of the target that it can feed."""
        return math.floor(self.held / self.flow.takes)

    def room(self) -> int | None:
        """Firings of the source that it can take; None without a bound."""
        if self.flow.capacity is None:
            return None
        return math.floor((self.flow.capacity - self.held) / self.flow.gives)


def bounds(graph: Graph) -> Bounds:
    """Balance the rates, bound the queues and prove that the bounds do not deadlock.

    The graph must have no cycle, and no binding to a node that is not there.

    Raises:
        RateError: two paths bring rows at different rates, an update's batch is not made of whole steps, or the bounded
            queues deadlock: with the repetition vector, or who waits for what.
    """
    origins = Origins.of(graph)
    edges = flows(graph, origins)
    times = repetitions(graph, edges)
    queues = _run_one_iteration(graph, origins, edges, times)
    held = {
        (queue.flow.source, queue.flow.target): _bound(graph, origins, queue)
        for queue in queues
        if queue.flow.capacity is not None
    }
    return Bounds(edges=held, repetitions=times)


def bound_texts(graph: Graph) -> dict[tuple[str, str], str]:
    """The bound of each queue, for a picture; none of a graph that has no repetition vector."""
    try:
        return {edge: f"{bound.rows} {bound.unit}" for edge, bound in bounds(graph).edges.items()}
    except RateError:
        return {}


def flows(graph: Graph, origins: Origins) -> list[Flow]:
    """Every edge with its rates, one for all columns between two nodes."""
    result = []
    nodes, refilled = graph.nodes, refills(graph)
    for node in nodes.values():
        if isinstance(node.spec, EvaluateSpec):
            continue
        for source in node.sources:
            result.append(_refilled(graph, _row_flow(origins, nodes[source], node), origins, refilled))
        if isinstance(node.spec, UpdateSpec):
            result += _version_flows(origins, node, refilled)
    return result + [_permits(origins, graph, refill) for refill in refilled.values()]


def repetitions(graph: Graph, edges: list[Flow]) -> dict[str, int]:
    """The repetition vector: the smallest whole solution of the balance equations.

    Raises:
        RateError: there is none.
    """
    times: dict[str, Fraction] = {}
    beside: dict[str, list[Flow]] = {}
    for flow in edges:
        beside.setdefault(flow.source, []).append(flow)
        beside.setdefault(flow.target, []).append(flow)
    for node in graph.nodes.values():
        if isinstance(node.spec, EvaluateSpec) or node.name in times:
            continue
        times[node.name] = Fraction(1)
        reached = [node.name]
        while reached:
            name = reached.pop()
            for flow in beside.get(name, ()):
                other, rate = _across(flow, name, times)
                if other not in times:
                    times[other] = rate
                    reached.append(other)
                elif times[other] != rate:
                    raise _unbalanced(graph, flow, times)
    whole = math.lcm(*(value.denominator for value in times.values()))
    firings = {name: int(value * whole) for name, value in times.items()}
    shared = math.gcd(*firings.values())
    return {name: count // shared for name, count in firings.items()}


def _across(flow: Flow, name: str, times: Mapping[str, Fraction]) -> tuple[str, Fraction]:
    """The node at the other end of an edge and its firings, by the balance of the edge."""
    if name == flow.source:
        return flow.target, times[name] * flow.gives / flow.takes
    return flow.source, times[name] * flow.takes / flow.gives


def _samples_a_firing(origins: Origins, node: Node) -> int:
    """Rows that one firing of a node behind a rollout takes."""
    n, step = max(1, origins.group_size(node.name)), max(1, origins.step_size(node.name))
    if isinstance(node.spec, UpdateSpec):
        return (node.spec.batch or step) * n
    whole = max([step, *(origins.versions[rollout.name] for rollout in origins.rollouts[node.name])])
    return {"row": 1, "group": n, "batch": whole * n}[node.per]


def _row_flow(origins: Origins, source: Node, target: Node) -> Flow:
    columns = tuple(dict.fromkeys(b.column for b in target.bindings if b.source == source.name))
    if isinstance(source.spec, PromptsSpec):
        n = max(1, origins.group_size(target.name))
        single = isinstance(target.spec, SamplesSpec)
        gives = Fraction(source.spec.batch)
        takes = Fraction(1) if single else Fraction(_samples_a_firing(origins, target), n)
        unit = 1
    else:
        unit = max(1, origins.group_size(source.name))
        gives = Fraction(unit if isinstance(source.spec, SamplesSpec) else _samples_a_firing(origins, source))
        takes = Fraction(_samples_a_firing(origins, target))
    return Flow(
        source=source.name,
        target=target.name,
        columns=columns,
        gives=gives,
        takes=takes,
        capacity=_capacity(origins, source, target) * unit,
    )


def _capacity(origins: Origins, source: Node, target: Node) -> int:
    """Prompts between admission and consumption at most."""
    rollouts = origins.rollouts[target.name]
    bound = [
        (rollout.spec.staleness + 1) * origins.versions[rollout.name]
        for rollout in rollouts
        if isinstance(rollout.spec, SamplesSpec)
    ]
    step = source.spec.batch if isinstance(source.spec, PromptsSpec) else 1
    return max([*bound, step])


def _refilled(graph: Graph, flow: Flow, origins: Origins, refilled: Mapping[str, Refill]) -> Flow:
    """The edge of the longest step, where a filter refills it."""
    for rollout in origins.rollouts[flow.target]:
        refill = refilled.get(rollout.name)
        if refill is None or flow.source in refill.behind:
            continue
        assert flow.capacity is not None
        if flow.source == refill.filter:
            return replace(flow, gives=flow.gives / refill.waves)
        gives = refill.waves if _waits_for_the_step(graph[flow.source]) else 1
        takes = refill.waves if flow.target in refill.behind or _waits_for_the_step(graph[flow.target]) else 1
        return replace(flow, gives=flow.gives * gives, takes=flow.takes * takes, capacity=flow.capacity * refill.waves)
    return flow


def _waits_for_the_step(node: Node) -> bool:
    return node.per == "batch" and isinstance(node.spec, FunctionSpec)


def _permits(origins: Origins, graph: Graph, refill: Refill) -> Flow:
    """Permits to read a prompt: one for each group that the filter has decided."""
    prompts, rollout = graph[refill.prompts].spec, graph[refill.rollout].spec
    assert isinstance(prompts, PromptsSpec)
    assert isinstance(rollout, SamplesSpec)
    return Flow(
        source=refill.filter,
        target=refill.prompts,
        columns=(),
        gives=Fraction(1),
        takes=Fraction(prompts.batch),
        tokens=(rollout.staleness + 1) * origins.versions[refill.rollout],
    )


def _version_flows(origins: Origins, update: Node, refilled: Mapping[str, Refill]) -> list[Flow]:
    """Permits from an update to the rollouts of its model that it trains on."""
    assert isinstance(update.spec, UpdateSpec)
    result = []
    for rollout in origins.rollouts[update.name]:
        step = origins.step_size(rollout.name)
        if rollout.model is update.model and isinstance(rollout.spec, RolloutSpec) and step:
            waves = refilled[rollout.name].waves if rollout.name in refilled else 1
            result.append(
                Flow(
                    source=update.name,
                    target=rollout.name,
                    columns=(),
                    gives=Fraction(1),
                    takes=Fraction(1, (update.spec.batch or step) * waves),
                    tokens=rollout.spec.staleness + 1,
                )
            )
    return result


def _run_one_iteration(graph: Graph, origins: Origins, edges: list[Flow], times: Mapping[str, int]) -> list[_Queue]:
    """Fire every node as often as the vector says, as soon as its rows and the room for its rows are there.

    Raises:
        RateError: nothing can fire any more, and the iteration is not at its end.
    """
    queues = [_Queue(flow, Fraction(flow.tokens)) for flow in edges]
    left = dict(times)
    inputs: dict[str, list[_Queue]] = {name: [] for name in left}
    outputs: dict[str, list[_Queue]] = {name: [] for name in left}
    for queue in queues:
        inputs[queue.flow.target].append(queue)
        outputs[queue.flow.source].append(queue)
    open_ = dict.fromkeys(name for name in graph.nodes if name in left)
    while open_:
        name = next(iter(open_))
        del open_[name]
        limits = [queue.ready() for queue in inputs[name]]
        limits += [room for queue in outputs[name] if (room := queue.room()) is not None]
        if (count := min([left[name], *limits])) > 0:
            _fire(inputs[name], outputs[name], count)
            left[name] -= count
            open_.update(dict.fromkeys(queue.flow.source for queue in inputs[name]))
            open_.update(dict.fromkeys(queue.flow.target for queue in outputs[name]))
    if any(left.values()):
        raise _deadlock(graph, queues, left)
    return queues


def _fire(inputs: list[_Queue], outputs: list[_Queue], count: int) -> None:
    for queue in inputs:
        queue.held -= queue.flow.takes * count
    for queue in outputs:
        queue.held += queue.flow.gives * count
        queue.peak = max(queue.peak, queue.held)


def _bound(graph: Graph, origins: Origins, queue: _Queue) -> Bound:
    flow = queue.flow
    assert flow.capacity is not None
    source = graph[flow.source]
    from_prompts = isinstance(source.spec, PromptsSpec)
    length = _longest_prompt(source) if from_prompts else origins.longest_response(flow.source)
    wanted = TEXTS_OF_PROMPT.intersection(flow.columns) if from_prompts else set(flow.columns) - SCALARS
    return Bound(
        rows=flow.capacity,
        unit="prompts" if from_prompts else "samples",
        num_tokens=flow.capacity * length if length and wanted else None,
        peak=math.ceil(queue.peak),
    )


def _longest_prompt(node: Node) -> int | None:
    return node.spec.max_prompt_tokens if isinstance(node.spec, PromptsSpec) else None


def _unbalanced(graph: Graph, flow: Flow, times: Mapping[str, Fraction]) -> RateError:
    node = graph[flow.target]
    return RateError(
        f"node '{flow.target}' gets rows at different rates: no repetition vector exists",
        at=node.at,
        node=flow.target,
        found=f"'{flow.source}' fires {times[flow.source]} times and gives {flow.gives} rows each; "
        f"'{flow.target}' fires {times[flow.target]} times and takes {flow.takes}",
        wanted=f"{flow.source} x {flow.gives} = {flow.target} x {flow.takes}",
        fix="give its rollouts the same n and its prompts the same batch",
    )


def _deadlock(graph: Graph, queues: list[_Queue], left: Mapping[str, int]) -> RateError:
    """Who waits for what when nothing can fire."""
    waits = [
        f"'{queue.flow.target}' waits for '{queue.flow.source}'"
        for queue in queues
        if left[queue.flow.target] and not queue.ready()
    ]
    return RateError("the bounded queues deadlock", at=graph.at, found="; ".join(waits), wanted="one full iteration")

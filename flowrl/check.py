"""Static checks: what can be known to be wrong before a process starts, one function each.

What is wrong in one call (types, columns, names, settings) is raised at that call while the graph is traced. Here is
what takes the whole graph: its shape (`shape`), its sizes and lengths, its rates (`rates`) and its placement
(`placement`). Every check returns its problems, so that all are shown at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import gcd

from .adaptive import check_adaptive
from .backend import HEAD_OF, ModelFacts
from .errors import (
    DataError,
    FlowrlError,
    GraphError,
    GroupError,
    LengthError,
    MeshError,
    RateError,
    WrongType,
    did_you_mean,
)
from .graph import EvaluateSpec, FunctionSpec, Graph, JudgeSpec, Node, PromptsSpec, RolloutSpec, UpdateSpec
from .loss import TRAINED
from .model import Model
from .origins import Origins
from .placement import (
    check_function_meshes,
    check_layout,
    check_ranks,
    check_shares,
    describe_models,
    placement_notes,
    visible_gpus,
)
from .provenance import check_provenance, provenance_notes
from .rates import bounds
from .refill import check_refill
from .selected import check_selected
from .shape import check_bindings, check_cycles, check_joins, check_read
from .sources import open_source
from .vocabulary import check_tokenizers, check_vocabularies


def check(
    graph: Graph, *, describe: Callable[[Model], ModelFacts] | None = None, gpus: int | None = None
) -> list[FlowrlError]:
    """Everything that is wrong with a graph.

    Args:
        graph: traced, or made by `Graph.build`.
        describe: a model's facts from its backend; raises BackendError. Left out, no backend is asked.
        gpus: CUDA devices to place meshes on; None counts those of this machine.

    Returns:
        Nothing for a graph that may start.
    """
    # The other checks follow the edges: they need these to lead somewhere and to end.
    shape = [*check_bindings(graph), *check_cycles(graph)]
    if shape:
        return shape
    facts, problems = describe_models(graph, describe) if describe else ({}, [])
    problems = [
        *check_read(graph),
        *check_joins(graph),
        *check_provenance(graph),
        *check_trained(graph),
        *check_adaptive(graph),
        *check_heads(graph),
        *check_groups(graph),
        *check_selected(graph),
        *check_needs(graph),
        *check_minibatches(graph),
        *check_data(graph),
        *problems,
        *check_lengths(graph, facts),
        *check_tokenizers(graph, facts),
        *check_vocabularies(graph, facts),
        *check_function_meshes(graph),
        *check_ranks(graph, visible_gpus() if gpus is None else gpus),
        *check_layout(graph, facts),
        *check_shares(graph),
    ]
    rates = [*check_refill(graph), *check_batches(graph)] or check_slow_prompts(graph) or check_rates(graph)
    return [*problems, *rates]


def notes(graph: Graph, *, cores: int) -> list[str]:
    """What is no error, and worth a line: slow placements, mini-batches that leave ranks without a row, and log-probs
    of which nobody knows where they come from."""
    return [*placement_notes(graph, cores), *_minibatch_notes(graph), *provenance_notes(graph)]


def check_trained(graph: Graph) -> list[FlowrlError]:
    """In a graph that trains, a model with an optimizer is trained, and by one update."""
    problems: list[FlowrlError] = []
    updates = [node for node in graph.nodes.values() if isinstance(node.spec, UpdateSpec)]
    for name, model in graph.models.items():
        own = [node for node in updates if node.model is model]
        if len(own) > 1:
            problems.append(
                GraphError(
                    f"{len(own)} nodes train model '{name}'",
                    at=own[1].at,
                    node=own[1].name,
                    found=" and ".join(f"'{node.name}' ({node.at})" for node in own),
                    wanted="one update a model: a version says what it was trained on",
                    fix="add the losses: fl.update(..., loss=first + second), or train a second fl.Model",
                )
            )
        elif updates and not own and model.optimizer is not None:
            user = next(node for node in graph.nodes.values() if node.model is model)
            problems.append(
                GraphError(
                    f"model '{name}' has an optimizer, and no update trains it",
                    at=model.at or user.at,
                    node=user.name,
                    found=f"optimizer={model.optimizer}",
                    wanted=f"fl.update with model '{name}', or no optimizer",
                    fix=f"declare fl.update for '{name}', or leave optimizer= out",
                )
            )
    return problems


def check_heads(graph: Graph) -> list[FlowrlError]:
    """A model samples with an ``lm`` head, and has the head that its loss reads."""
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if node.model is None:
            continue
        for reads, head in _heads(node):
            if node.model.head != head:
                problems.append(
                    WrongType(
                        f"node '{node.name}' needs a model with another head",
                        at=node.at,
                        node=node.name,
                        found=f"model '{node.model.name}' has head='{node.model.head}'",
                        wanted=f"head='{head}', {reads}",
                        fix=f"fl.Model(..., head='{head}')",
                    )
                )
    return problems


def _heads(node: Node) -> Iterator[tuple[str, str]]:
    if isinstance(node.spec, RolloutSpec | EvaluateSpec | JudgeSpec):
        yield "which samples tokens", "lm"
    if isinstance(node.spec, UpdateSpec):
        heads = {HEAD_OF[column]: column for column in node.spec.loss.reads if column in TRAINED}
        yield from ((f"since its loss reads '{column}'", head) for head, column in heads.items())


def check_groups(graph: Graph) -> list[FlowrlError]:
    """A function over groups, or a loss that compares samples, gets as many of a prompt as it is defined for."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        n, least = origins.group_size(node.name), _smallest_group(node)
        if not 0 < n < least:
            continue
        rollout = min(origins.rollouts[node.name], key=lambda rollout: origins.group_size(rollout.name))
        problems.append(
            GroupError(
                f"node '{node.name}' needs {least} samples of a prompt; {rollout.kind} '{rollout.name}' makes {n}",
                at=node.at,
                node=node.name,
                found=f"n={n} ({rollout.at})",
                wanted=f"n >= {least}",
                fix=f"{_larger_group(rollout, least)}, or {_alone(node)}",
            )
        )
    return problems


def _smallest_group(node: Node) -> int:
    if isinstance(node.spec, UpdateSpec):
        return 2 if node.spec.loss.couples else 1
    return node.spec.min_group if isinstance(node.spec, FunctionSpec) else 1


def _alone(node: Node) -> str:
    """What does with one sample of a prompt."""
    compares = isinstance(node.spec, UpdateSpec)
    return "a loss that compares no samples" if compares else "an estimator without a group baseline"


def _larger_group(rollout: Node, least: int) -> str:
    if isinstance(rollout.spec, RolloutSpec):
        return f"fl.rollout(..., n={least}) or more"
    return f"fl.responses(..., columns=) with {least} columns or more"


def check_needs(graph: Graph) -> list[FlowrlError]:
    """This machine has what the functions need: a package, or a kernel that isolates programs. Each is asked once."""
    problems: list[FlowrlError] = []
    asked = set()
    for node, spec in ((each, spec) for each in graph.nodes.values() for spec in _called(each)):
        if spec.needs is None or spec.needs in asked:
            continue
        asked.add(spec.needs)
        try:
            spec.needs()
        except FlowrlError as error:
            error.problem, error.node, error.at = f"node '{node.name}': {error.problem}", node.name, node.at
            problems.append(error)
    return problems


def _called(node: Node) -> Iterator[FunctionSpec]:
    """The functions of a user's that a node calls."""
    if isinstance(node.spec, FunctionSpec):
        yield node.spec
    if isinstance(node.spec, EvaluateSpec):
        yield node.spec.score
    if isinstance(node.spec, RolloutSpec | EvaluateSpec) and node.spec.tool:
        yield node.spec.tool.call


def check_minibatches(graph: Graph) -> list[FlowrlError]:
    """An update's batch is split between prompts: it has one for each mini-batch."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if not isinstance(node.spec, UpdateSpec):
            continue
        batch = node.spec.batch or origins.step_size(node.name)
        if 0 < batch < node.spec.minibatches:
            problems.append(
                MeshError(
                    f"node '{node.name}' splits {batch} prompts into {node.spec.minibatches} mini-batches",
                    at=node.at,
                    node=node.name,
                    found=f"minibatches={node.spec.minibatches}, batch={batch}",
                    wanted=f"1 <= minibatches <= {batch}",
                    fix=f"minibatches={batch}, or a larger batch",
                )
            )
    return problems


def _minibatch_notes(graph: Graph) -> list[str]:
    lines = []
    origins = Origins.of(graph)
    for node in graph.nodes.values():
        if isinstance(node.spec, UpdateSpec) and node.mesh is not None:
            batch = node.spec.batch or origins.step_size(node.name)
            share = batch // node.spec.minibatches
            if 0 < share < node.mesh.dp:
                lines.append(f"node '{node.name}': a mini-batch has {share} prompts, so some of dp={node.mesh.dp} wait")
    return lines


def check_lengths(graph: Graph, facts: Mapping[str, ModelFacts]) -> list[FlowrlError]:
    """The longest prompt and the longest response fit into every model that reads them."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    seen: set[tuple[str, int]] = set()  # One line for each model and length: the first of its readers.
    for node in graph.nodes.values():
        limit = facts[node.model.name].max_length if node.model and node.model.name in facts else None
        if limit is None or node.model is None:
            continue
        response = _longest_response(origins, node)
        prompt, prompts = _longest_prompt(origins, node)
        if response + prompt <= limit or (node.model.name, response + prompt) in seen:
            continue
        seen.add((node.model.name, response + prompt))
        assumed = f"max_prompt_tokens={prompt}" if prompts else "a prompt of 1 token"
        room = limit - prompt
        fix = f"max_new_tokens={room}" if room > 0 else f"max_prompt_tokens={max(1, limit - response)}"
        problems.append(
            LengthError(
                f"node '{node.name}' may get {prompt} + {response} = {prompt + response} tokens, more than model "
                f"'{node.model.name}' takes",
                at=node.at,
                node=node.name,
                found=f"{assumed} + max_new_tokens={response}",
                wanted=f"prompt + response <= {limit}",
                fix=fix + (" or less" if room > 0 else ", and a shorter response"),
            )
        )
    return problems


def _longest_response(origins: Origins, node: Node) -> int:
    if isinstance(node.spec, EvaluateSpec | JudgeSpec):
        return node.spec.sampling.max_new_tokens
    return origins.longest_response(node.name)


def _longest_prompt(origins: Origins, node: Node) -> tuple[int, bool]:
    """Tokens of the longest prompt, and whether a setting says so: at least one otherwise."""
    if isinstance(node.spec, JudgeSpec):  # what it is asked is made while the run goes on
        return (node.spec.max_prompt_tokens, True) if node.spec.max_prompt_tokens else (1, False)
    specs = [prompts.spec for prompts in origins.prompts[node.name]]
    declared = [spec.max_prompt_tokens for spec in specs if isinstance(spec, PromptsSpec) and spec.max_prompt_tokens]
    return (max(declared), True) if declared else (1, False)


def check_batches(graph: Graph) -> list[FlowrlError]:
    """An update consumes whole steps of its prompts, and as many as every other update of these prompts."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    first: dict[str, tuple[Node, int]] = {}
    for node in graph.nodes.values():
        step = origins.step_size(node.name)
        if not isinstance(node.spec, UpdateSpec) or not step:
            continue
        batch = node.spec.batch or step
        prompts = " and ".join(f"'{p.name}'" for p in origins.prompts[node.name])
        beside, other = first.setdefault(prompts, (node, batch))
        if batch % step:
            problems.append(_no_whole_steps(node, batch, step, prompts))
        elif batch != other:
            problems.append(
                RateError(
                    f"nodes '{beside.name}' and '{node.name}' consume different batches of {prompts}",
                    at=node.at,
                    node=node.name,
                    found=f"{other} prompts a version ({beside.at}) and {batch}",
                    wanted="one batch: the versions of both models then belong to the same rows",
                    fix=f"batch={other} in '{node.name}', or batch={batch} in '{beside.name}'",
                )
            )
    return problems


def _no_whole_steps(node: Node, batch: int, step: int, prompts: str) -> RateError:
    nearest, shared = max(1, round(batch / step)) * step, gcd(batch, step)
    vector = f"{batch // shared} steps of {prompts} for {step // shared} versions"
    return RateError(
        f"node '{node.name}' consumes {batch} prompts a version, which steps of {step} do not add up to",
        at=node.at,
        node=node.name,
        found=f"batch={batch}; the repetition vector is {vector}",
        wanted=f"a multiple of {step}: {', '.join(str(step * i) for i in range(1, 5))}, ...",
        fix=f"batch={nearest} in '{node.name}', or batch={shared} in fl.prompts",
    )


def check_slow_prompts(graph: Graph) -> list[FlowrlError]:
    """Prompts that do not come in every step (``every=``) are for what is measured beside others that do."""
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    slow = {n.name: n.spec.every for n in graph.nodes.values() if isinstance(n.spec, PromptsSpec) and n.spec.every > 1}
    for node in graph.nodes.values():
        behind = [prompts.name for prompts in origins.prompts[node.name] if prompts.name in slow]
        if behind and isinstance(node.spec, UpdateSpec):
            problems.append(_slow(node, f"node '{node.name}' trains in every step", behind[0], slow[behind[0]]))
    every_step = any(isinstance(node.spec, PromptsSpec) and node.name not in slow for node in graph.nodes.values())
    if slow and not every_step and not problems:
        name = next(iter(slow))
        problems.append(_slow(graph[name], "nothing happens in most steps", name, slow[name]))
    return problems


def _slow(node: Node, what: str, prompts: str, every: int) -> RateError:
    return RateError(
        f"{what}, and prompts '{prompts}' come in one of {every}",
        at=node.at,
        node=node.name,
        found=f"every={every} in '{prompts}'",
        wanted="prompts of every step",
        fix=f"leave every= out of '{prompts}', or give the node other prompts",
    )


def check_rates(graph: Graph) -> list[FlowrlError]:
    """The rates balance, and the bounded queues do not deadlock."""
    try:
        bounds(graph)
    except RateError as error:
        return [error]
    return []


def check_data(graph: Graph) -> list[FlowrlError]:
    """Every source opens, has the prompt's column, and fills a batch."""
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if isinstance(node.spec, PromptsSpec):
            problems += _data_problems(node, node.spec)
    return problems


def _data_problems(node: Node, spec: PromptsSpec) -> list[FlowrlError]:
    try:
        source = open_source(spec.source)
    except FlowrlError as error:
        return [
            DataError(
                f"node '{node.name}': {error.problem}",
                at=node.at,
                node=node.name,
                found=error.found or repr(spec.source),
                wanted=error.wanted or "rows: a .jsonl, .json or .parquet file, a data set, or a list of dicts",
                fix=error.fix or "give the path of a file that is there, from the folder that flowrl is started in",
            )
        ]
    problems: list[FlowrlError] = []
    names = ("prompt", "messages", "prompt_ids") if spec.column == "prompt" else (spec.column,)
    if not any(name in source.columns for name in names):
        problems.append(
            DataError(
                f"node '{node.name}': {source.name} has no column '{spec.column}' for the prompt",
                at=node.at,
                node=node.name,
                found=f"columns {', '.join(source.columns)}",
                wanted=" or ".join(f"'{name}'" for name in names),
                fix=did_you_mean(spec.column, source.columns) or "fl.prompts(..., column='NAME')",
            )
        )
    if source.num_rows is not None and source.num_rows < spec.batch and spec.last == "drop":
        rows = source.num_rows
        problems.append(
            DataError(
                f"node '{node.name}': {source.name}: {rows} usable of {rows} rows, batch needs {spec.batch}",
                at=node.at,
                node=node.name,
                found=f"{rows} rows",
                wanted=f">= {spec.batch} rows: the last rows that fill no batch are dropped",
                fix=f"batch={rows} or less, more rows, or last='short' or 'wrap'",
            )
        )
    return problems

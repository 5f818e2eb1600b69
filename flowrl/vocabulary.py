"""Checks of vocabularies: a model has the tokens that are asked of it, and an id means the same to all that read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .backend import ModelFacts
from .errors import FlowrlError, GraphError, ProvenanceError
from .graph import ForwardSpec, Graph, JudgeSpec, Node, PromptsSpec, ResponsesSpec, UpdateSpec
from .model import Model

IDS = frozenset({"prompt_ids", "response_ids", "student_ids", "teacher_ids"})


def check_vocabularies(graph: Graph, facts: Mapping[str, ModelFacts]) -> list[FlowrlError]:
    """`fl.topk` asks a model for no more tokens than it has, as far as its configuration says how many these are."""
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if node.model is None or node.model.name not in facts or not isinstance(node.spec, ForwardSpec):
            continue
        model, k, size = node.model.name, node.spec.k, facts[node.model.name].vocab_size
        if size is None or k <= size:
            continue
        problems.append(
            GraphError(
                f"node '{node.name}' wants the {k} most likely tokens of model '{model}', which has {size}",
                at=node.at,
                node=node.name,
                found=f"k={k}",
                wanted=f"1 <= k <= {size}",
                fix=f"k={size} is its whole vocabulary; 16 hold nearly all of the probability at most places",
            )
        )
    return problems


def check_tokenizers(graph: Graph, facts: Mapping[str, ModelFacts]) -> list[FlowrlError]:
    """Whatever reads the ids of another model has the tokens of that model, under the same ids.

    It may have more. A model whose folder does not say which tokens it has is taken at the number of its ids.
    """
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        for owner in dict.fromkeys(_owners(graph, node)):
            reader = node.model
            if reader is None or (owner.backend, owner.source) == (reader.backend, reader.source):
                continue
            if owner.name in facts and reader.name in facts:
                found = _difference(owner, facts[owner.name], reader, facts[reader.name])
                problems += [] if found is None else [_error(node, owner, reader, found)]
                break  # one line a node
    return problems


def _owners(graph: Graph, node: Node) -> Iterator[Model]:
    """The models whose tokenizer made the ids that a node's model reads."""
    if isinstance(node.spec, JudgeSpec):  # what it is asked is tokenized for it
        return
    for binding in node.bindings if node.model is not None else ():
        source = graph[binding.source]
        for named in source.bindings:
            if named.parameter == "topk_ids":  # it gives the ids on that it was asked about
                source = graph[named.source]
        spec = source.spec
        owner = spec.model if isinstance(spec, PromptsSpec | ResponsesSpec) else source.model
        if binding.column in IDS and owner is not None:
            yield owner


def _difference(owner: Model, made: ModelFacts, reader: Model, read: ModelFacts) -> str | None:
    """The first id of a maker that means something else to a reader, in words."""
    tokens, known = made.vocabulary(), read.vocabulary()
    if tokens is None:
        return None
    if known is None:
        largest = max(tokens.values(), default=-1)
        small = read.vocab_size is not None and largest >= read.vocab_size
        return f"'{owner.name}' has ids up to {largest}, '{reader.name}' {read.vocab_size} of them" if small else None
    differing = {number: token for token, number in tokens.items() if known.get(token) != number}
    if not differing:
        return None
    number = min(differing)
    other = next((repr(token) for token, at in known.items() if at == number), "no token")
    return f"id {number} is {differing[number]!r} to '{owner.name}', and {other} to '{reader.name}'"


def _error(node: Node, owner: Model, reader: Model, found: str) -> ProvenanceError:
    fix = f"a model with the tokenizer of '{owner.name}'"
    if isinstance(node.spec, ForwardSpec) and node.spec.outputs == ("scores",):
        fix = f"fl.score({reader.name}, samples, text=True): it then reads the text in its own tokens"
    elif isinstance(node.spec, UpdateSpec):
        fix += (
            f"; where only tokens that '{reader.name}' lacks differ: fl.topk(..., at=fl.topk({reader.name}, samples))"
        )
    return ProvenanceError(
        f"node '{node.name}' gives token ids of model '{owner.name}' to model '{reader.name}', to which they mean "
        "something else",
        at=node.at,
        node=node.name,
        found=found,
        wanted=f"the tokens of {owner.source}, under the same ids",
        fix=fix,
    )

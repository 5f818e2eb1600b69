"""Checks of vocabularies: a model has the tokens that are asked of it."""

from __future__ import annotations

from collections.abc import Mapping

from .backend import ModelFacts
from .errors import FlowrlError, GraphError
from .graph import ForwardSpec, Graph


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

"""Adaptive coefficients as settings of functions, ``advantages.token_rewards(..., kl_coef=fl.Adaptive(...))``.

One follows the KL that an update measures of its model from the reference: of the update that trains on what the
function gives. Which one that is follows from the graph; where there is none, or more than one, nothing could say how
the coefficient moves, and the graph is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .coefficients import Adaptive, Coefficient
from .errors import FlowrlError, GraphError, WrongType
from .graph import EvaluateSpec, FunctionSpec, Graph, Node, RolloutSpec, UpdateSpec
from .loss import REFERENCE


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveSetting:
    """A setting of a node's function that an update moves."""

    node: str
    setting: str
    update: str
    coefficient: Adaptive

    @property
    def name(self) -> str:
        """Of its value in a checkpoint."""
        return f"{self.node}.{self.setting}"


def adaptive_settings(graph: Graph) -> tuple[AdaptiveSetting, ...]:
    """All of a graph; of one that `check_adaptive` refuses, those that something moves.

    The graph must have no cycle.
    """
    found: list[AdaptiveSetting] = []
    for node in graph.nodes.values():
        moved = coefficients_of(node.spec) if isinstance(node.spec, FunctionSpec) else {}
        updates = _measuring(graph, node) if moved else []
        for setting, value in moved.items():
            if isinstance(value, Adaptive) and len(updates) == 1:
                one = AdaptiveSetting(node=node.name, setting=setting, update=updates[0].name, coefficient=value)
                found.append(one)
    return tuple(found)


def coefficients_of(spec: FunctionSpec) -> dict[str, Coefficient]:
    """Settings of a function that are no numbers yet, given or by default."""
    parameters = inspect.signature(spec.function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: value for name, value in {**defaults, **spec.settings}.items() if isinstance(value, Coefficient)}


def expect_numbers(function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuse to call a function with a coefficient that nothing has put a number in place of.

    Raises:
        WrongType: it has no value here.
    """
    for name, value in settings.items():
        if isinstance(value, Coefficient):
            raise WrongType(
                f"the coefficient '{name}' of '{function.__name__}' has no value outside a run",
                found=f"{name}={value}",
                wanted="a number, where the function is called with values",
                fix=f"{name}=0.1, or call it with handles inside a graph function",
            )


def check_adaptive(graph: Graph) -> list[FlowrlError]:
    """An adaptive setting follows one update, which measures the KL from the reference that its function reads."""
    return [
        problem
        for node in graph.nodes.values()
        for spec in _functions(node)
        for setting, value in coefficients_of(spec).items()
        for problem in _problems(graph, node, setting, value)
    ]


def _functions(node: Node) -> Iterator[FunctionSpec]:
    if isinstance(node.spec, FunctionSpec):
        yield node.spec
    if isinstance(node.spec, EvaluateSpec):
        yield node.spec.score
    if isinstance(node.spec, EvaluateSpec | RolloutSpec) and node.spec.tool:
        yield node.spec.tool.call


def _trained_on(graph: Graph, node: Node) -> list[Node]:
    """Updates that train on what a function gives."""
    import networkx as nx

    below = nx.descendants(graph.rows_graph, node.name) if isinstance(node.spec, FunctionSpec) else ()
    return [each for name, each in graph.nodes.items() if name in below and isinstance(each.spec, UpdateSpec)]


def _measuring(graph: Graph, node: Node) -> list[Node]:
    """Those of them that measure a KL from the reference that the function reads, or from any if it reads none."""
    wanted = _reference(node)
    updates = [(update, _reference(update)) for update in _trained_on(graph, node)]
    return [update for update, found in updates if found is not None and wanted in (None, found)]


def _reference(node: Node) -> str | None:
    """The node whose log-probs of a reference it reads; a function may call them as it likes."""
    own = () if isinstance(node.spec, UpdateSpec) else tuple(b.source for b in node.bindings if b.column == REFERENCE)
    return next(iter((*(b.source for b in node.bindings if b.parameter == REFERENCE), *own)), None)


def _problems(graph: Graph, node: Node, setting: str, value: Coefficient) -> Iterator[FlowrlError]:
    updates, measuring = _trained_on(graph, node), _measuring(graph, node)
    named = f"'{setting}' of node '{node.name}'"
    if not isinstance(value, Adaptive):
        yield WrongType(
            f"{named} is a coefficient that moves in a loss alone",
            at=node.at,
            node=node.name,
            found=str(value),
            wanted="a number, or fl.Adaptive, which follows a KL",
            fix=f"{setting}=fl.Adaptive(initial=0.1, target=0.05)",
        )
    elif not updates:
        yield GraphError(
            f"{named} is adaptive, and no update trains on what it gives",
            at=node.at,
            node=node.name,
            found=str(value),
            wanted="an update behind it, whose KL moves it",
            fix=f"{setting}=0.1",
        )
    elif not measuring:
        yield GraphError(
            f"{named} is adaptive, and no update behind it measures the KL that it follows",
            at=node.at,
            node=node.name,
            found="; ".join(f"'{update.name}' ({update.at}) reads {_reads(update)}" for update in updates),
            wanted=f"an update that reads '{REFERENCE}'" + (f" of '{_reference(node)}'" if _reference(node) else ""),
            fix="give the handle of fl.logprobs(policy.frozen(), samples) to fl.update of the policy too",
        )
    elif len(measuring) > 1:
        yield GraphError(
            f"{named} is adaptive, and {len(measuring)} updates behind it measure a KL",
            at=node.at,
            node=node.name,
            found=" and ".join(f"'{update.name}' ({update.at})" for update in measuring),
            wanted="one, for it to follow",
            fix=f"declare one '{node.name}' for each model that is trained, or {setting}=0.1",
        )


def _reads(update: Node) -> str:
    found = _reference(update)
    return f"'{REFERENCE}' of '{found}'" if found else f"no '{REFERENCE}'"

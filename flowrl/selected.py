"""A check: a loss that is about some rows alone, such as pairs, finds some among the columns of `flowrl.responses`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import FlowrlError, GraphError
from .graph import Graph, Node, ResponsesSpec, UpdateSpec
from .rows import GROUP

if TYPE_CHECKING:
    import torch
else:
    from ._lazy import lazy

    torch = lazy("torch")


def check_selected(graph: Graph) -> list[FlowrlError]:
    """Where preferences are declared, the loss of an update is about one of a prompt's trained columns at least."""
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if isinstance(node.spec, UpdateSpec) and (given := _declared(graph, node)):
            why = _refused(node.spec, given)
            if why is not None:
                problems.append(_error(node, given, why))
    return problems


def _declared(graph: Graph, node: Node) -> ResponsesSpec | None:
    """The responses whose declared preferences and columns alone say which rows the loss of an update is about."""
    assert isinstance(node.spec, UpdateSpec)
    selects_by = {name for name in node.spec.loss.selects_by if name != GROUP}
    sources = {b.source for b in node.bindings if b.parameter in ("preference", "mask")}
    if selects_by != {"preference"} or len(sources) != 1:
        return None
    spec = graph[sources.pop()].spec
    declared = isinstance(spec, ResponsesSpec) and not any(isinstance(each, str) for each in spec.preference)
    return spec if declared and isinstance(spec, ResponsesSpec) else None


def _refused(update: UpdateSpec, given: ResponsesSpec) -> str | None:
    """Why the loss is about none of a prompt's responses; None when it is about some."""
    trained = [value for value, on in zip(given.preference, given.trained, strict=True) if on]
    preference = torch.tensor(trained, dtype=torch.float32)
    columns = {"preference": preference, GROUP: torch.zeros(len(trained), dtype=torch.int64)}
    try:
        some = bool(update.loss.select(columns).any())
    except Exception as error:  # of whatever function says which rows a loss is about
        return str(error)
    return None if some else "it leaves out every response of a prompt"


def _error(node: Node, given: ResponsesSpec, why: str) -> GraphError:
    assert isinstance(node.spec, UpdateSpec)
    columns = zip(given.columns, given.preference, given.trained, strict=True)
    shown = ", ".join(f"{name}: {value:g}{'' if on else ' (not trained)'}" for name, value, on in columns)
    return GraphError(
        f"node '{node.name}' has nothing to train: {why}",
        at=node.at,
        node=node.name,
        found=shown,
        wanted=f"trained columns that {node.spec.loss} is about",
        fix='columns={"chosen": 1, "rejected": -1} in fl.responses, and trained= left out, or of both',
    )

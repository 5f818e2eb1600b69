"""Coefficients of losses that move from one optimizer step to the next (`flowrl.coefficients`), on one rank.

The scheduler tells every rank the same sums over the mini-batch with each ``step``, so that all ranks hold the same
numbers. They lie in a model's checkpoint beside its weights, and a resumed run goes on with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.backend import Metrics, Sum
from flowrl.coefficients import Coefficient
from flowrl.errors import BackendError, CheckpointError
from flowrl.graph import UpdateSpec
from flowrl.loss import Loss

if TYPE_CHECKING:
    from .worker import Worker

FILE = "flowrl_coefficients.json"


def loss_of(worker: Worker, node: str) -> Loss:
    """The loss of an update as it is now: numbers in place of what is adaptive."""
    loss = _declared(worker, node)
    return loss.at(_now(worker, node)) if loss.adaptive else loss


def move(worker: Worker, node: str, settings: dict[str, Any]) -> Metrics:
    """Move an update's coefficients by what the mini-batch just made has measured; what they were, as metrics.

    Args:
        settings: of the ``step``: ``observed``, by metric a sum and its weight, and ``rows``.
    """
    adaptive = _declared(worker, node).adaptive
    if not adaptive:
        return {}
    now = _now(worker, node)
    observed = {name: Sum(*each) for name, each in settings["observed"].items()}
    worker.coefficients[node] = [
        _after(each, value, observed[each.metric], settings["rows"]) for each, value in zip(adaptive, now, strict=True)
    ]
    metrics: Metrics = {}
    for each, value in zip(adaptive, now, strict=True):
        label = each.label if each.label not in metrics else f"{each.label}_{len(metrics) + 1}"
        metrics[label] = Sum(value, 1.0)
    return metrics


def expect_measured(worker: Worker, node: str, metrics: Metrics) -> None:
    """See that a pass has measured the KL that a setting of a function follows (adaptive.py).

    Raises:
        BackendError: it has trained on rows, and says nothing of it.
    """
    if not any(setting.update == node for setting in worker.plan.adaptive):
        return
    rows = metrics["rows"]
    if isinstance(rows, Sum) and rows.total and "kl" not in metrics:
        model = worker.plan.model_of[node]
        raise BackendError(
            f"the backend of model '{model}' measures no KL, which a coefficient follows",
            node=node,
            found=f"metrics {', '.join(metrics)}",
            wanted="'kl', from the column 'ref_logprobs'",
            fix="a number in place of fl.Adaptive(...)",
        )


def save(worker: Worker, model: str, folder: Path) -> None:
    """Write the coefficients of a model's update beside its weights; ranks hold the same, and rank 0 writes."""
    nodes = _updates(worker, model)
    if nodes and worker.rank.rank == 0:
        found = {node: _now(worker, node) for node in nodes}
        (folder / FILE).write_text(json.dumps(found, indent=2) + "\n")


def load(worker: Worker, model: str, folder: Path) -> None:
    """Read what `save` wrote.

    Raises:
        CheckpointError: it is not there, or not of these updates.
    """
    nodes = _updates(worker, model)
    if not nodes:
        return
    path = folder / FILE
    found = json.loads(path.read_text()) if path.is_file() else {}
    wanted = {node: len(_declared(worker, node).adaptive) for node in nodes}
    if {node: len(values) for node, values in found.items()} != wanted:
        raise CheckpointError(
            f"the checkpoint of model '{model}' does not hold the adaptive coefficients of its loss",
            found=f"{found} in '{path}'" if path.is_file() else f"no '{path}'",
            wanted=", ".join(f"{count} of node '{node}'" for node, count in wanted.items()),
            fix="resume from a checkpoint of this graph, or start in a new --run-dir",
        )
    worker.coefficients |= found


def _after(coefficient: Coefficient, value: float, observed: Sum, num_rows: float) -> float:
    return coefficient.after(value, observed.mean, round(num_rows)) if observed.weight else value


def _declared(worker: Worker, node: str) -> Loss:
    spec = worker.plan.graph[node].spec
    assert isinstance(spec, UpdateSpec)
    return spec.loss


def _now(worker: Worker, node: str) -> list[float]:
    return worker.coefficients.get(node) or [adaptive.initial for adaptive in _declared(worker, node).adaptive]


def _updates(worker: Worker, model: str) -> list[str]:
    """Updates of a model whose loss has an adaptive coefficient."""
    nodes = worker.plan.graph.nodes.values()
    updates = [n for n in nodes if isinstance(n.spec, UpdateSpec) and n.model is not None and n.model.name == model]
    return [node.name for node in updates if _declared(worker, node.name).adaptive]

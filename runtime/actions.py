"""What a worker does for each action: a generator of what it makes, and last a dict of metrics.

Every action is given the worker, the firing and the content of its inputs. Rows that it makes are `Emitted` as soon as
they exist, so that the next nodes can start; everything is keyed, and nothing here knows where rows go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowrl.backend import Metrics, Sum, Tokenizer
from flowrl.checksum import weights_checksum
from flowrl.columns import positional, slots
from flowrl.data import PromptReader, PromptSettings
from flowrl.errors import BackendError
from flowrl.graph import (
    EvaluateSpec,
    FilterSpec,
    ForwardSpec,
    FunctionSpec,
    Node,
    PromptsSpec,
    UpdateSpec,
)
from flowrl.rows import Column, Key, Rows

from . import coefficients
from .calls import Called, call_filter, call_function
from .checkpoint import partial_folder
from .events import Action, Firing
from .given import responses
from .judging import judge
from .made import Emitted, Made, Parts, reward_metrics, sum_of_scores
from .own_tokens import in_own_tokens
from .registry import describe
from .rollouts import answered, rollout

if TYPE_CHECKING:
    from .worker import Worker


# --- rows -----------------------------------------------------------------------------------------------------------


def prompts(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Read a step's prompts, or a further wave of them; nothing is emitted once the source is used up.

    A step may take several batches (``fl.update(batch=)``). When the source ends within one, `last` decides as it does
    for a batch: the step is dropped, is short, or is filled up from the start.
    """
    found = _read(worker, firing)
    if found:
        merged = Rows.concat(found)
        first = firing.settings.get("first_prompt", 0)
        yield Emitted(Rows([Key(firing.step, first + i) for i in range(len(merged))], merged.columns))
    yield {}


def forward(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Log-probs, likely tokens, values or scores of responses."""
    node = worker.plan.graph[firing.node]
    assert isinstance(node.spec, ForwardSpec)
    spec, model, columns = node.spec, worker.model_of(firing), worker.arguments(firing, parts)
    rows = _own_tokens(node, model.tokenizer, firing.keys, columns) if spec.text else Rows(firing.keys, columns)
    found = model.forward(rows, spec.outputs, spec.temperature, spec.k)
    made = Rows(found.keys, {name: found[output] for name, output in zip(node.outputs, spec.outputs, strict=True)})
    yield Emitted(made)
    yield reward_metrics(worker.plan, node, made)


def function(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Call a user's function."""
    node = worker.plan.graph[firing.node]
    assert isinstance(node.spec, FunctionSpec)
    columns = worker.arguments(firing, parts)
    spec = replace(node.spec, settings={**node.spec.settings, **firing.settings})
    called = call_function(node, spec, firing.keys, columns)
    if called.rows is not None or called.dropped:
        yield Emitted(called.rows, called.dropped)
    values = {name: Sum(value, 1) for name, value in called.values.items()}
    yield {
        **values,
        **reward_metrics(worker.plan, node, called.rows),
        **_correction(node, firing.keys, columns, called.rows),
    }


def filter(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Ask a filter which rows pass."""
    node = worker.plan.graph[firing.node]
    assert isinstance(node.spec, FilterSpec)
    called = call_filter(node, node.spec, firing.keys, worker.arguments(firing, parts))
    yield Emitted(called.rows, called.dropped)
    yield {}


def record(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Write a step's samples down."""
    assert worker.recorder is not None
    worker.recorder.write(firing, parts)
    yield {}


# --- training -------------------------------------------------------------------------------------------------------


def backward(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Add the gradients of rows."""
    spec = worker.plan.graph[firing.node].spec
    assert isinstance(spec, UpdateSpec)
    columns = worker.arguments(firing, parts)
    if firing.settings.get("moved"):  # an optimizer step since the sampling: what that changed is no mismatch
        columns.pop("sampler_logprobs", None)
    rows = Rows(firing.keys, columns)
    loss = coefficients.loss_of(worker, firing.node)
    metrics = worker.model_of(firing).backward(rows, loss, spec.temperature, spec.max_tokens)
    coefficients.expect_measured(worker, firing.node, metrics)
    yield metrics


def step(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Divide, clip, optimise; with the last mini-batch of a step, publish the version."""
    spec = worker.plan.graph[firing.node].spec
    assert isinstance(spec, UpdateSpec)
    model = worker.model_of(firing)
    metrics = model.step(firing.settings["denominator"], clip_grad=spec.clip_grad)
    metrics |= coefficients.move(worker, firing.node, firing.settings)
    if firing.settings["publish"]:
        model.publish(firing.version)
    yield metrics


def evaluate(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Answer held-out prompts with a pinned version, and score the answers."""
    node = worker.plan.graph[firing.node]
    assert isinstance(node.spec, EvaluateSpec)
    columns = worker.arguments(firing, parts)
    made, failed = answered(worker, firing, node.spec, columns)
    shared = Rows.join(made.keys, [Rows(firing.keys, columns)])
    called = _score(worker, node.name, node.spec, shared.with_columns(**made.columns))
    metrics: Metrics = {node.name: sum_of_scores(called.rows)}
    if "drop" in _policies(node.spec):  # a failed call is no score of 0: the share of them stands beside the mean
        metrics[f"{node.name}/failed"] = Sum(len(called.dropped) + failed, len(made) + failed)
    yield metrics


# --- weights --------------------------------------------------------------------------------------------------------


def export(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Take a copy of a model's weights, for replicas on other meshes."""
    model = worker.models[firing.settings["model"]]
    yield Emitted({name: tensor.detach().clone().cpu() for name, tensor in model.export_weights()})
    yield {}


def import_(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Replace a replica's weights; what it then holds must be what came."""
    name = firing.settings["model"]
    held = worker.models[name].import_weights(parts[0], firing.version)
    sent = weights_checksum(parts[0].items())
    if held != sent:
        raise BackendError(
            f"model '{name}' does not hold version {firing.version} after its import",
            found=f"checksum {held[:16]}",
            wanted=f"checksum {sent[:16]}, that of the tensors that came",
            fix="its backend's export_weights and import_weights must name and store the same state",
        )
    yield {}


def save(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Write models aside; the checkpoint is published by whoever asked for it, once all ranks have written."""
    for name in firing.settings["models"]:
        folder = partial_folder(Path(firing.settings["folder"]), firing.version) / name
        worker.models[name].save(folder)
        coefficients.save(worker, name, folder)
    yield {}


def load(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Read models of a checkpoint."""
    for name in firing.settings["models"]:
        folder = Path(firing.settings["folder"]) / name
        worker.models[name].load(folder)
        coefficients.load(worker, name, folder)
        worker.models[name].publish(firing.version)
    yield {}


ACTIONS: dict[Action, Callable[[Worker, Firing, Parts], Made]] = {
    "prompts": prompts,
    "rollout": rollout,
    "responses": responses,
    "forward": forward,
    "judge": judge,
    "function": function,
    "filter": filter,
    "record": record,
    "backward": backward,
    "step": step,
    "evaluate": evaluate,
    "export": export,
    "import": import_,
    "save": save,
    "load": load,
}


# --- parts of actions -----------------------------------------------------------------------------------------------


def _policies(spec: EvaluateSpec) -> tuple[str, ...]:
    """What an evaluation does when something of a response fails."""
    tool = (spec.tool.call.on_error, spec.tool.on_too_long) if spec.tool else ()
    return (spec.score.on_error, *tool)


def _read(worker: Worker, firing: Firing) -> list[Rows]:
    """The batches of a step, by number where its firing names them; none once the source is used up."""
    spec = worker.plan.graph[firing.node].spec
    assert isinstance(spec, PromptsSpec)
    reader = _reader(worker, firing.node)
    count = worker.plan.prompts_per_step[firing.node] // spec.batch
    num_rows = reader.epochs.num_rows
    end = spec.epochs * num_rows if spec.last == "wrap" and spec.epochs and num_rows else None
    first = firing.step // spec.every * count
    batches: Sequence[int] = firing.settings.get("batches") or range(first, first + count)
    if end is not None and batches[0] * spec.batch >= end:
        return []  # the reader goes on for ever: the last step of all may take rows of one epoch more
    found = [reader.read(number) for number in batches]
    rows = [batch for batch in found if batch is not None]
    begins = not firing.settings.get("first_prompt")  # a later wave takes what there is
    if begins and spec.last == "drop" and 0 < len(rows) < count:
        left, size = sum(map(len, rows)), count * spec.batch
        verb = "rows at the end fill" if left > 1 else "row at the end fills"
        what = f"{left} {verb} no step of {size}, and {'are' if left > 1 else 'is'} dropped"
        print(f"node '{firing.node}': {what}", file=sys.stderr, flush=True)
        return []
    return rows


def _reader(worker: Worker, node: str) -> PromptReader:
    """The reader of a prompts node, made at its first firing."""
    if node not in worker.readers:
        spec = worker.plan.graph[node].spec
        assert isinstance(spec, PromptsSpec)
        read = {b.column for reader in worker.plan.graph.readers(node) for b in reader.bindings if b.source == node}
        settings = PromptSettings(
            batch=spec.batch,
            shuffle=spec.shuffle,
            seed=spec.seed,
            column=spec.column,
            chat=spec.chat,
            required=tuple(sorted(read)),
            max_prompt_tokens=spec.max_prompt_tokens,
            on_too_long=spec.on_too_long,
            on_missing=spec.on_missing,
            last=spec.last,
            epochs=None if spec.last == "wrap" else spec.epochs,  # see _read
        )
        assert spec.model is not None, "prompts that no rollout reads are not fired"
        reader = worker.readers[node] = PromptReader(spec.source, worker.tokenizer_of(spec.model), settings)
        print(f"node '{node}' reads {reader.source.name}: {reader.report()}", file=sys.stderr, flush=True)
    return worker.readers[node]


def _score(worker: Worker, name: str, spec: EvaluateSpec, rows: Rows) -> Called:
    """Call an evaluation's reward function on its responses."""
    node = replace(worker.plan.graph[name], spec=spec.score, per="row", outputs=("scores",))
    wanted = [slot for p in positional(spec.score.function) for slot in slots(p, rows.columns)]
    return call_function(node, spec.score, rows.keys, {name: rows[name] for name in wanted})


def _correction(node: Node, keys: Sequence[Key], columns: Mapping[str, Column], rows: Rows | None) -> Metrics:
    """Of a node that weighs trained tokens or narrows their mask: the mean weight, and the share that is left out."""
    if rows is None or "mask" not in columns or not {"mask", "importance_weights"} & {*node.outputs}:
        return {}
    trained = Rows(keys, {"mask": columns["mask"]}).select(rows.keys)["mask"].values.astype(bool)
    num_trained = float(trained.sum())
    metrics: Metrics = {}
    for name in {"mask", "importance_weights"} & {*node.outputs}:
        found = rows[name].values[trained]
        metrics[f"{node.name}/rejected"] = Sum(num_trained - float(np.count_nonzero(found)), num_trained)
        if name == "importance_weights":
            metrics[f"{node.name}/weight"] = Sum(float(found.sum(dtype=np.float64)), num_trained)
    return metrics


def _own_tokens(node: Node, tokenizer: Tokenizer, keys: Sequence[Key], columns: Mapping[str, Column]) -> Rows:
    """What a model reads that has its own tokenizer."""
    assert node.model is not None
    max_length = describe(node.model.backend, node.model.source).max_length
    return in_own_tokens(tokenizer, keys, columns, max_length=max_length, at=node.at)

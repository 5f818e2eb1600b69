"""The built-in nodes: prompts, rollout, forward passes, filter, update, evaluate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from .backend import HEAD_OF, Output, Sampling
from .columns import bind, positional, settings
from .errors import FlowrlError, Location, ProvenanceError, UnknownName, did_you_mean
from .expect import (
    expect,
    expect_counts,
    expect_counts_or_none,
    expect_head,
    expect_loss,
    expect_mesh,
    expect_model,
    expect_optimizer,
    expect_policy,
    expect_sampling,
    wrong,
)
from .functions import NodeFunction, gates_of, with_rollout
from .graph import (
    Binding,
    EvaluateSpec,
    FilterSpec,
    ForwardSpec,
    Node,
    PromptsSpec,
    RolloutSpec,
    UpdateSpec,
)
from .location import caller
from .loss import TRAINED, Loss
from .mesh import Mesh
from .model import Model
from .sources import Source, open_source
from .stream import ANY, LogProbs, Prompts, Samples, Scores, Stream, Values
from .trace import tracer

RESPONSE_COLUMNS = ("response_ids", "response", "mask", "logprobs", "stop", "versions")
"""What a rollout writes: int32 ids, text, bool mask (1 = trained), float32 log-probs of the sampler, why it ended, and
the policy version of each token."""
BEFORE = {"old_logprobs": "logprobs", "old_values": "values"}
"""What a loss calls a column that the trained model writes again, and the column of a stream that it means."""


def prompts(
    source: Any,
    *,
    batch: int,
    shuffle: bool = True,
    seed: int = 0,
    column: str = "prompt",
    chat: bool = False,
    max_prompt_tokens: int | None = None,
    on_too_long: Literal["error", "drop", "left"] = "error",
    on_missing: Literal["error", "drop"] = "error",
    last: Literal["drop", "short", "wrap"] = "drop",
    epochs: int | None = None,
    name: str | None = None,
) -> Prompts:
    """Rows of a data source, `batch` a step.

    Args:
        source: a .jsonl or .parquet file, a Hugging Face data set, any iterable of dicts, or anything with ``[index]``
            that gives dicts.
        batch: prompts a step.
        shuffle: a new order each epoch, a function of `seed` and the epoch.
        seed: of the order.
        column: holds the prompt: text, or a list of chat messages for the chat template.
        chat: a text is what a user says, for the chat template too: what a model tuned to instructions expects.
        max_prompt_tokens: longest prompt.
        on_too_long: a longer one is an error, is dropped and counted, or keeps its last tokens (``"left"``).
        on_missing: a row without a value that the graph reads is an error, or is dropped and counted.
        last: the last rows of an epoch that fill no batch are dropped and counted, make a short step, or are filled up
            from the next epoch.
        epochs: passes over the source; None repeats for ever.
    """
    at = caller()
    label = name or "prompts"
    expect_counts(label, at, batch=batch)
    expect_counts_or_none(label, at, max_prompt_tokens=max_prompt_tokens, epochs=epochs)
    expect_policy(label, at, "on_too_long", on_too_long, ("error", "drop", "left"))
    expect_policy(label, at, "on_missing", on_missing, ("error", "drop"))
    expect_policy(label, at, "last", last, ("drop", "short", "wrap"))
    opened = _opened(source)
    spec = PromptsSpec(
        source=opened or source,
        batch=batch,
        shuffle=shuffle,
        seed=seed,
        column=column,
        chat=chat,
        max_prompt_tokens=max_prompt_tokens,
        on_too_long=on_too_long,
        on_missing=on_missing,
        last=last,
        epochs=epochs,
    )
    columns = dict.fromkeys(("prompt", "prompt_ids", *(opened.columns if opened else (ANY,))))
    node = tracer().add(
        lambda final: Node(
            name=final,
            spec=spec,
            per="batch",
            bindings=(),
            gates=(),
            outputs=tuple(c for c in columns if c != ANY),
            at=at,
        ),
        name=name,
        default="prompts",
    )
    return Prompts(node.name, dict.fromkeys(columns, node.name))


def rollout(
    model: Model,
    prompts: Prompts,
    *,
    n: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    staleness: int = 0,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> Samples:
    """Sample `n` responses to each prompt.

    Args:
        model: the policy.
        prompts: what it answers.
        n: responses to a prompt; together they are a group.
        max_new_tokens: longest response.
        temperature: divides the logits; the trainer divides by the same, so that the ratio on unchanged weights is 1.
        top_p, top_k: keep only likely tokens. Log-probs stay those of the full vocabulary.
        stop: strings that end a response.
        ignore_eos: sample to `max_new_tokens` always.
        staleness: how many versions behind the trainer a response may start; 0 is on-policy.
        mesh: its own ranks, which hold a replica of the weights; None shares the model's.
    """
    at = caller()
    label = name or "rollout"
    expect_model(model, label, at)
    expect(prompts, Prompts, node=label, parameter="prompts", at=at)
    expect_sampling(label, at, n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    expect_counts(label, at, least=0, top_k=top_k, staleness=staleness)
    expect_mesh(mesh, label, at)
    sampling = Sampling(
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=top_k,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=ignore_eos,
    )
    active = tracer()
    node = active.add(
        lambda final: Node(
            name=final,
            spec=RolloutSpec(sampling=sampling, staleness=staleness),
            per="row",
            bindings=(Binding("prompt_ids", prompts.columns["prompt_ids"], "prompt_ids"),),
            gates=prompts.gates,
            outputs=RESPONSE_COLUMNS,
            at=at,
            model=model,
            mesh=mesh or model.mesh,
        ),
        name=name,
        default="rollout",
    )
    active.read_by(prompts.columns["prompt_ids"], model)
    return Samples(node.name, {**prompts.columns, **dict.fromkeys(RESPONSE_COLUMNS, node.name)}, prompts.gates)


def logprobs(model: Model, samples: Samples, *, temperature: float | None = None, name: str | None = None) -> LogProbs:
    """Log-probs of the response tokens under `model`: ``ref_logprobs`` of a frozen model, else ``old_logprobs``.

    Args:
        temperature: divides the logits; None takes the rollout's, so that ratios and KL compare like with like.
    """
    column = "old_logprobs" if model.optimizer else "ref_logprobs"
    return LogProbs(*_forward("logprobs", model, samples, "logprobs", column, temperature, name))


def values(model: Model, samples: Samples, *, name: str | None = None) -> Values:
    """A value for each response token, of a model with ``head="value"``."""
    return Values(*_forward("values", model, samples, "values", "values", 1.0, name))


def score(model: Model, samples: Samples, *, name: str | None = None) -> Scores:
    """A score for each response, of a reward model (``head="score"``)."""
    return Scores(*_forward("score", model, samples, "scores", "scores", 1.0, name))


def filter(
    samples: Samples,
    *streams: Stream,
    keep: Callable[..., Any],
    per: Literal["row", "group"] = "row",
    reason: str | None = None,
    name: str | None = None,
) -> Samples:
    """Let pass only rows, or whole groups, for which `keep` is true; the others are dropped, counted, with a reason.

    Args:
        samples: what is filtered.
        *streams: more columns for `keep`.
        keep: a function of columns by parameter name; with ``per="group"`` it sees tensors of the whole group.
        reason: what is written beside a dropped row; the node's name when left out.
    """
    at = caller()
    expect(samples, Samples, node=name or "filter", parameter="samples", at=at)
    for stream in streams:
        expect(stream, Stream, node=name or "filter", parameter="input", at=at)
    if per not in ("row", "group"):
        fix = "per='row' drops samples, per='group' drops prompts with all their samples"
        raise wrong(name or "filter", at, "per= has an unknown value", per, "'row' or 'group'", fix)

    def declare(final: str) -> Node:
        bindings = bind(positional(keep), (samples, *streams), {}, node=final, at=at)
        return Node(
            name=final,
            spec=FilterSpec(keep=keep, reason=reason or final),
            per=per,
            bindings=bindings,
            gates=with_rollout(gates_of([samples, *streams]), bindings, samples),
            outputs=(),
            at=at,
        )

    node = tracer().add(declare, name=name, default="filter")
    return Samples(node.name, samples.columns, (*samples.gates, node.name))


def update(
    model: Model,
    samples: Samples,
    *streams: Stream,
    loss: Loss,
    batch: int | None = None,
    minibatches: int = 1,
    epochs: int = 1,
    max_tokens: int | None = None,
    clip_grad: float | None = 1.0,
    name: str | None = None,
    **named: Stream,
) -> None:
    """Train `model` on samples and publish its next version.

    Args:
        model: needs an optimizer.
        samples: rows with ``prompt_ids``, ``response_ids`` and ``mask``.
        *streams: more columns that the loss reads.
        loss: what is minimised.
        batch: prompts that one version consumes, a multiple of a step's; None is one step's.
        minibatches: optimizer steps over the batch; it is split between prompts, in order of their keys.
        epochs: passes over the batch.
        max_tokens: most padded tokens in one forward and backward pass.
        clip_grad: largest global gradient norm; None does not clip.
        **named: a handle for one column of the loss, by name.
    """
    at = caller()
    label = name or "update"
    expect_model(model, label, at)
    expect(samples, Samples, node=label, parameter="samples", at=at)
    for stream in (*streams, *named.values()):
        expect(stream, Stream, node=label, parameter="input", at=at)
    expect_optimizer(model, label, at)
    expect_loss(loss, label, at)
    expect_counts(label, at, minibatches=minibatches, epochs=epochs)
    expect_counts_or_none(label, at, batch=batch, max_tokens=max_tokens)
    wanted = dict.fromkeys(("prompt_ids", "response_ids", "mask", "old_logprobs", *loss.reads))
    unknown = [key for key in named if key not in wanted]
    if unknown:
        raise UnknownName(
            f"node '{label}' has no input '{unknown[0]}'",
            at=at,
            node=label,
            found=f"{unknown[0]}=",
            wanted=", ".join(wanted),
            fix=did_you_mean(unknown[0], wanted) or "name a column that the loss reads",
        )
    columns = [_parameter(column) for column in wanted if column not in TRAINED]
    active = tracer()
    active.add(
        lambda final: Node(
            name=final,
            spec=UpdateSpec(
                loss=loss,
                batch=batch,
                minibatches=minibatches,
                epochs=epochs,
                max_tokens=max_tokens,
                clip_grad=clip_grad,
                temperature=_temperature(samples, final, at),
            ),
            per="row",
            bindings=bind(columns, (samples, *streams), named, node=final, at=at, aliases=BEFORE),
            gates=gates_of([samples, *streams, *named.values()]),
            outputs=(),
            at=at,
            model=model,
            mesh=model.mesh,
        ),
        name=name,
        default="update",
    )


def evaluate(
    model: Model,
    prompts: Prompts,
    score: NodeFunction[Any, Any, Scores],
    *,
    every: int,
    n: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
    name: str | None = None,
) -> None:
    """Score one pinned version on held-out prompts: all rows of `prompts`' first batch, each `every` versions.

    Args:
        score: a reward function (called for each response on the model's mesh).
        every: versions between two evaluations; version 0 is evaluated too.
        temperature: 0 is greedy.
        max_new_tokens: None takes the longest of the model's rollouts that are declared before.
    """
    at = caller()
    label = name or "evaluate"
    expect_model(model, label, at)
    expect(prompts, Prompts, node=label, parameter="prompts", at=at)
    if not isinstance(score, NodeFunction) or score.handle is not Scores:
        fix = "pass the function itself, not what calling it gives"
        raise wrong(label, at, "score is no reward function", score, "a function under @fl.reward", fix)
    if score.per != "row":
        fix = "score the responses of an evaluation one by one"
        raise wrong(label, at, "score sees several rows", f"per={score.per!r}", "per='row'", fix)
    given = settings(score.function, {}, node=label, at=at)
    expect_counts(label, at, every=every)
    active = tracer()
    lengths = [
        node.spec.sampling.max_new_tokens for node in active.nodes.values()
        if isinstance(node.spec, RolloutSpec) and node.model is model
    ]  # fmt: skip
    length = max(lengths, default=None) if max_new_tokens is None else max_new_tokens
    if length is None:
        found = f"no rollout of model '{model.name}' before this line"
        raise wrong(label, at, "max_new_tokens is not known", found, "max_new_tokens=N", "give max_new_tokens=")
    expect_sampling(label, at, n=n, max_new_tokens=length, temperature=temperature, top_p=1.0)
    made = dict.fromkeys(RESPONSE_COLUMNS)
    own = [parameter for parameter in positional(score.function) if parameter.name not in made]
    active.add(
        lambda final: Node(
            name=final,
            spec=EvaluateSpec(
                score=score.spec(given),
                every=every,
                sampling=Sampling(n=n, max_new_tokens=length, temperature=float(temperature)),
            ),
            per="batch",
            bindings=(
                Binding("prompt_ids", prompts.columns["prompt_ids"], "prompt_ids"),
                *(b for b in bind(own, (prompts,), {}, node=final, at=at) if b.parameter != "prompt_ids"),
            ),
            gates=prompts.gates,
            outputs=(),
            at=at,
            model=model,
            mesh=model.mesh,
        ),
        name=name,
        default="evaluate",
    )
    active.read_by(prompts.columns["prompt_ids"], model)


def _forward(
    default: str,
    model: Model,
    samples: Samples,
    output: Output,
    column: str,
    temperature: float | None,
    name: str | None,
) -> tuple[str, dict[str, str], tuple[str, ...]]:
    at = caller()
    label = name or default
    expect_model(model, label, at)
    expect(samples, Samples, node=label, parameter="samples", at=at)
    sampled_at = _temperature(samples, label, at)
    if output == "logprobs" and temperature is not None and temperature != sampled_at:
        raise ProvenanceError(
            f"node '{label}' takes log-probs at another temperature than the samples were drawn at",
            at=at,
            node=label,
            found=f"temperature={temperature}",
            wanted=f"temperature={sampled_at}, as rollout '{samples.columns['logprobs']}'",
            fix="leave temperature= out",
        )
    expect_head(model, HEAD_OF[output], label, at)
    node = tracer().add(
        lambda final: Node(
            name=final,
            spec=ForwardSpec(output=output, temperature=sampled_at if output == "logprobs" else 1.0),
            per="row",
            bindings=bind([_parameter("prompt_ids"), _parameter("response_ids")], (samples,), {}, node=final, at=at),
            gates=samples.gates,
            outputs=(column,),
            at=at,
            model=model,
            mesh=model.mesh,
        ),
        name=name,
        default=default,
    )
    return node.name, {column: node.name}, node.gates


def _temperature(samples: Samples, node: str, at: Location) -> float:
    """The temperature that the samples' rollout draws at."""
    spec = tracer().nodes[samples.columns["response_ids"]].spec
    assert isinstance(spec, RolloutSpec), f"'{node}' at {at} reads samples that no rollout made"
    return spec.sampling.temperature or 1.0


def _parameter(name: str) -> Any:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _opened(source: Any) -> Source | None:
    """The rows of a data source: opened once, since an iterable can be read no second time. None while it cannot be
    opened: the checks will say why."""
    try:
        return open_source(source)
    except FlowrlError:
        return None

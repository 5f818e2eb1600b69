"""Update: what trains a model and publishes its next version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.columns import bind, parameter
from flowrl.errors import Location, UnknownColumn, UnknownName, did_you_mean
from flowrl.expect import (
    expect,
    expect_clip,
    expect_counts,
    expect_counts_or_none,
    expect_loss,
    expect_model,
    expect_optimizer,
    unfit,
    wrong,
)
from flowrl.functions import gates_of
from flowrl.graph import Binding, ForwardSpec, FunctionSpec, Node, ResponsesSpec, RolloutSpec, UpdateSpec
from flowrl.location import caller
from flowrl.loss import REFERENCE, TOPK_IDS, TRAINED, Loss
from flowrl.model import Model
from flowrl.stream import Samples, Stream
from flowrl.trace import tracer

from .sampling import temperature_of

BEFORE = {"old_logprobs": "logprobs", "old_values": "values"}
"""What a loss calls a column that the trained model writes again, and the column of a stream that it means."""


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
    max_mismatch: float | None = None,
    name: str | None = None,
    **named: Stream,
) -> None:
    """Train `model` on samples and publish its next version.

    Args:
        model: needs an optimizer.
        samples: rows with ``prompt_ids``, ``response_ids`` and ``mask``.
        *streams: more columns that the loss reads. With ``ref_logprobs`` among them, from ``fl.logprobs`` of a frozen
            model, the metric ``kl`` is the KL of the trained model from that reference, also where the loss has none.
        loss: what is minimised.
        batch: prompts that one version consumes, a multiple of a step's; None is one step's.
        minibatches: optimizer steps over the batch; it is split between prompts, in order of their keys.
        epochs: passes over the batch.
        max_tokens: most padded tokens in one forward and backward pass.
        clip_grad: largest global gradient norm; None does not clip.
        max_mismatch: the run stops before an optimizer step on samples whose sampler is further from the model than
            this, in nats a token (``mismatch_kl``, see below); None never stops it.
        **named: a handle for one column of the loss, by name.

    Three metrics say how far the sampler is from the trainer, from the ratio ``exp(trainer - sampler)`` of each trained
    token: ``mismatch_kl`` (KL of the sampler from the trainer, the mean of k3), ``ess`` (the effective sample size of
    the ratios as weights, over the number of tokens; 1 is the best) and ``max_ratio``. They are taken in a version's
    first mini-batch, before the optimizer's first step: what the sampler's policy has lost since, by training on its
    own samples in further mini-batches and epochs, is no mismatch. At staleness 0 they show what should not be there:
    another precision, engine or temperature, or weights that did not arrive. With staleness they hold in addition how
    far the policy has moved in the versions between. The sampler's log-probs are those that the update is given as
    ``old_logprobs``, or the rollout's own where these are the model's (``fl.logprobs``). A model that was not sampled
    from has none of this.

    In the record of a step the metrics of the update that trains the policy have plain names (``loss``): that is the
    first whose model samples, or the first of all where none does. Those of another begin with its model's name
    (``critic/loss``).
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
    expect_clip(label, at, clip_grad)
    before = ("old_logprobs",) if model.head == "lm" else ()
    wanted = dict.fromkeys(("prompt_ids", "response_ids", "mask", *before, *loss.reads))
    if "topk_logprobs" in wanted:
        wanted[TOPK_IDS] = None
    if model.head == "lm" and (REFERENCE in named or len(_writers(REFERENCE, streams)) == 1):
        wanted[REFERENCE] = None  # the KL from it is measured, whether the loss reads it or not
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
    if isinstance(tracer().nodes[samples.columns["response_ids"]].spec, ResponsesSpec):
        _expect_old_logprobs(loss, (samples, *streams), named, label, at)
    # for metrics alone when the loss does not read it: given answers were sampled by nobody
    optional = loss.optional | ({"old_logprobs"} - set(loss.reads))
    columns = [parameter(column, optional=column in optional) for column in wanted if column not in TRAINED]

    def declare(final: str) -> Node:
        bindings = bind(columns, (samples, *streams), named, node=final, at=at, aliases=BEFORE)
        sampler = _sampler(model, samples, bindings)
        if max_mismatch is not None:
            _expect_threshold(max_mismatch, sampler, model, final, at)
        return Node(
            name=final,
            spec=UpdateSpec(
                loss=loss,
                batch=batch,
                minibatches=minibatches,
                epochs=epochs,
                max_tokens=max_tokens,
                clip_grad=clip_grad,
                temperature=temperature_of(samples, final, at),
                max_mismatch=None if max_mismatch is None else float(max_mismatch),
            ),
            per="row",
            bindings=(*bindings, *sampler),
            gates=gates_of([samples, *streams, *named.values()]),
            outputs=(),
            at=at,
            model=model,
            mesh=model.mesh,
        )

    tracer().add(declare, name=name, default="update")


def _sampler(model: Model, samples: Samples, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
    """The log-probs of the sampler, if it sampled from the model: what the mismatch metrics are taken of."""
    nodes = tracer().nodes
    old = next((binding for binding in bindings if binding.parameter == "old_logprobs"), None)
    if old is None or model.head != "lm":
        return ()
    source, column = old.source, old.column
    if isinstance(nodes[source].spec, ForwardSpec):  # the trainer's own, which differ from it by nothing
        source, column = samples.columns.get("logprobs", source), "logprobs"
    writer = nodes[source]
    ours = writer.model is model if isinstance(writer.spec, RolloutSpec) else isinstance(writer.spec, FunctionSpec)
    return (Binding("sampler_logprobs", source, column),) if ours else ()


def _expect_threshold(value: object, sampler: tuple[Binding, ...], model: Model, node: str, at: Location) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        fix = "max_mismatch=0.05 stops a run that samples from wrong weights; leave room for staleness"
        raise wrong(node, at, "max_mismatch is no limit", value, "a number of nats > 0, or None", fix)
    if not sampler:
        found = f"no log-probs of a rollout of model '{model.name}'"
        fix = "leave max_mismatch= out: what another model sampled, or nobody, has no mismatch"
        raise unfit(node, at, "max_mismatch has nothing to hold to", found, "samples of the trained model", fix)


def _writers(column: str, streams: Sequence[Stream]) -> set[str]:
    return {stream.columns[column] for stream in streams if column in stream.columns}


def _expect_old_logprobs(
    loss: Loss, streams: Sequence[Stream], named: Mapping[str, Stream], node: str, at: Location
) -> None:
    """A loss with a ratio needs log-probs from before the update, which given responses have of no sampler."""
    brought = "old_logprobs" in named or any("old_logprobs" in stream.columns for stream in streams)
    if "old_logprobs" in set(loss.reads) - loss.optional and not brought:
        raise UnknownColumn(
            f"node '{node}': the loss reads 'old_logprobs', and responses of the data set have no sampler's",
            at=at,
            node=node,
            found=str(loss),
            wanted="log-probs of the policy before the update, or a loss without a ratio",
            fix="fl.update(..., fl.logprobs(policy, samples), ...), or a loss such as losses.sft() or losses.dpo()",
        )

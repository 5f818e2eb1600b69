"""Update: what trains a model and publishes its next version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.columns import bind, parameter
from flowrl.errors import Location, UnknownColumn, UnknownName, did_you_mean
from flowrl.expect import expect, expect_counts, expect_counts_or_none, expect_loss, expect_model, expect_optimizer
from flowrl.functions import gates_of
from flowrl.graph import Node, ResponsesSpec, UpdateSpec
from flowrl.location import caller
from flowrl.loss import TOPK_IDS, TRAINED, Loss
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
    if "topk_logprobs" in wanted:
        wanted[TOPK_IDS] = None
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
                temperature=temperature_of(samples, final, at),
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

"""Forward passes without a gradient: log-probs, likely tokens, values and scores of samples."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.backend import HEAD_OF, Output
from flowrl.columns import bind, parameter
from flowrl.errors import ProvenanceError
from flowrl.expect import expect, expect_counts, expect_head, expect_model, wrong
from flowrl.functions import gates_of
from flowrl.graph import Binding, ForwardSpec, Node
from flowrl.location import caller
from flowrl.model import Model
from flowrl.stream import LogProbs, Samples, Scores, Stream, TopK, Values
from flowrl.trace import tracer

from .sampling import temperature_of

DEFAULT_K = 16
"""Tokens of `topk`: as many as keep nearly all of a language model's probability at nearly every place."""
TEXT = ("prompt", "prompt_messages", "response", "stop")
"""What a model reads that has its own tokenizer."""


def logprobs(model: Model, samples: Samples, *, temperature: float | None = None, name: str | None = None) -> LogProbs:
    """Log-probs of the response tokens under `model`: ``ref_logprobs`` of a frozen model, else ``old_logprobs``.

    Args:
        temperature: divides the logits; None takes the rollout's, so that ratios and KL compare like with like.
    """
    column = "old_logprobs" if model.optimizer else "ref_logprobs"
    return LogProbs(*_forward("logprobs", model, samples, {column: "logprobs"}, name, temperature=temperature))


def topk(
    model: Model, samples: Samples, *, k: int | None = None, at: TopK | None = None, name: str | None = None
) -> TopK:
    """The `k` most likely tokens at each place of a response, and their log-probs, [response tokens, k] each:
    ``teacher_ids`` and ``teacher_logprobs`` of a frozen model, ``student_ids`` and ``student_logprobs`` of one that is
    trained.

    Log-probs are those of the full vocabulary at the rollout's temperature; the likeliest token stands first. It is
    what `flowrl.losses.distill` compares the trained model with. Ids that only fill a vocabulary up are left out.

    Args:
        k: tokens; 16 unless it is given.
        at: take log-probs at these tokens instead, as ``fl.topk(teacher, samples, at=fl.topk(policy, samples))``: where
            the student puts its probability is what a reverse KL looks at.
    """
    line = caller()
    label = name or "topk"
    if at is not None:
        if not isinstance(at, TopK):
            fix = "at=fl.topk(policy, samples), or k= for the most likely tokens of the model itself"
            raise wrong(label, line, "at names no tokens", at, "what fl.topk returns", fix)
        if k is not None:
            fix = "leave k= out: it is that of the node that names the tokens"
            raise wrong(label, line, "k is given beside the tokens themselves", k, "k=, or at=", fix)
        named = tracer().nodes[at.node].spec
        assert isinstance(named, ForwardSpec)
        k = named.k
    k = DEFAULT_K if k is None else k
    expect_counts(label, line, k=k)
    role = "student" if isinstance(model, Model) and model.optimizer else "teacher"
    columns: dict[str, Output] = {f"{role}_ids": "topk_ids", f"{role}_logprobs": "topk_logprobs"}
    return TopK(*_forward("topk", model, samples, columns, name, k=k, ids=at))


def logit_energy(model: Model, samples: Samples, *, name: str | None = None) -> Stream:
    """How much each response token puts into the gradient: the squared norm of its log-prob's gradient with respect to
    the logits, as the column ``logit_energy`` (what `flowrl.advantages.otb` weighs by).

    With the probabilities p of all tokens it is ``1 - 2 p[token] + sum of p squared``, at the rollout's temperature.
    """
    return Stream(*_forward("logit_energy", model, samples, {"logit_energy": "logit_energy"}, name))


def values(model: Model, samples: Samples, *, name: str | None = None) -> Values:
    """A value for each response token, of a model with ``head="value"``."""
    return Values(*_forward("values", model, samples, {"values": "values"}, name))


def score(model: Model, samples: Samples, *, text: bool = False, name: str | None = None) -> Scores:
    """A score for each response, of a reward model (``head="score"``).

    Args:
        text: the reward model reads the text of prompt and response in its own tokens, as it must when its tokenizer is
            not the policy's. Chat messages go through its own chat template with the response as the assistant's turn;
            a text and its response are tokenized as one, with one beginning-of-sequence token, and with an
            end-of-sequence token where the response ended by one. The score is that of the last token.
    """
    return Scores(*_forward("score", model, samples, {"scores": "scores"}, name, text=text))


def _forward(
    default: str,
    model: Model,
    samples: Samples,
    columns: Mapping[str, Output],
    name: str | None,
    *,
    temperature: float | None = None,
    k: int = 0,
    ids: TopK | None = None,
    text: bool = False,
) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Declare the node: `columns` by what the model computes for them, about `k` tokens, or those that `ids` names."""
    at = caller()
    label = name or default
    expect_model(model, label, at)
    expect(samples, Samples, node=label, parameter="samples", at=at)
    sampled_at = temperature_of(samples, label, at)
    if temperature is not None and temperature != sampled_at:
        maker = tracer().nodes[samples.columns["response_ids"]]
        raise ProvenanceError(
            f"node '{label}' takes log-probs at another temperature than the samples were drawn at",
            at=at,
            node=label,
            found=f"temperature={temperature}",
            wanted=f"temperature={sampled_at}, as {maker.kind} '{maker.name}'",
            fix="leave temperature= out",
        )
    head = HEAD_OF[next(iter(columns.values()))]
    expect_head(model, head, label, at)
    named = [] if ids is None else [Binding("topk_ids", ids.node, next(c for c in ids.columns if c.endswith("_ids")))]
    reads = [parameter(column) for column in (TEXT if text else ("prompt_ids", "response_ids"))]
    temperature = sampled_at if head == "lm" else 1.0
    node = tracer().add(
        lambda final: Node(
            name=final,
            spec=ForwardSpec(outputs=tuple(columns.values()), temperature=temperature, k=k, text=text),
            per="row",
            bindings=(*bind(reads, (samples,), {}, node=final, at=at), *named),
            gates=gates_of([samples, *([] if ids is None else [ids])]),
            outputs=tuple(columns),
            at=at,
            model=model,
            mesh=model.mesh,
        ),
        name=name,
        default=default,
    )
    return node.name, dict.fromkeys(columns, node.name), node.gates

"""Forward passes without a gradient: log-probs, values and scores of samples."""

from __future__ import annotations

from flowrl.backend import HEAD_OF, Output
from flowrl.columns import bind, parameter
from flowrl.errors import ProvenanceError
from flowrl.expect import expect, expect_head, expect_model
from flowrl.graph import ForwardSpec, Node
from flowrl.location import caller
from flowrl.model import Model
from flowrl.stream import LogProbs, Samples, Scores, Stream, Values
from flowrl.trace import tracer

from .sampling import temperature_of


def logprobs(model: Model, samples: Samples, *, temperature: float | None = None, name: str | None = None) -> LogProbs:
    """Log-probs of the response tokens under `model`: ``ref_logprobs`` of a frozen model, else ``old_logprobs``.

    Args:
        temperature: divides the logits; None takes the rollout's, so that ratios and KL compare like with like.
    """
    column = "old_logprobs" if model.optimizer else "ref_logprobs"
    return LogProbs(*_forward("logprobs", model, samples, "logprobs", column, temperature, name))


def logit_energy(model: Model, samples: Samples, *, name: str | None = None) -> Stream:
    """How much each response token puts into the gradient: the squared norm of its log-prob's gradient with respect to
    the logits, as the column ``logit_energy`` (what `flowrl.advantages.otb` weighs by).

    With the probabilities p of all tokens it is ``1 - 2 p[token] + sum of p squared``, at the rollout's temperature.
    """
    return Stream(*_forward("logit_energy", model, samples, "logit_energy", "logit_energy", None, name))


def values(model: Model, samples: Samples, *, name: str | None = None) -> Values:
    """A value for each response token, of a model with ``head="value"``."""
    return Values(*_forward("values", model, samples, "values", "values", 1.0, name))


def score(model: Model, samples: Samples, *, name: str | None = None) -> Scores:
    """A score for each response, of a reward model (``head="score"``)."""
    return Scores(*_forward("score", model, samples, "scores", "scores", 1.0, name))


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
    sampled_at = temperature_of(samples, label, at)
    if output == "logprobs" and temperature is not None and temperature != sampled_at:
        maker = tracer().nodes[samples.columns["response_ids"]]
        raise ProvenanceError(
            f"node '{label}' takes log-probs at another temperature than the samples were drawn at",
            at=at,
            node=label,
            found=f"temperature={temperature}",
            wanted=f"temperature={sampled_at}, as {maker.kind} '{maker.name}'",
            fix="leave temperature= out",
        )
    expect_head(model, HEAD_OF[output], label, at)
    node = tracer().add(
        lambda final: Node(
            name=final,
            spec=ForwardSpec(output=output, temperature=sampled_at if HEAD_OF[output] == "lm" else 1.0),
            per="row",
            bindings=bind([parameter("prompt_ids"), parameter("response_ids")], (samples,), {}, node=final, at=at),
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

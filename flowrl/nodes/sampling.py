"""Rollout: responses that a model samples."""

from __future__ import annotations

from typing import Any

from flowrl.backend import Sampling
from flowrl.errors import Location
from flowrl.expect import expect, expect_counts, expect_mesh, expect_model, expect_sampling, stop_strings
from flowrl.graph import Binding, Node, RolloutSpec, SamplesSpec
from flowrl.location import caller
from flowrl.mesh import Mesh
from flowrl.model import Model
from flowrl.stream import Prompts, Samples
from flowrl.tool import Tool
from flowrl.trace import tracer

from .turns import TURN_COLUMNS, declare_tool

RESPONSE_COLUMNS = ("response_ids", "response", "mask", "logprobs", "stop", "versions")
"""What a rollout writes: int32 ids, text, bool mask (1 = trained), float32 log-probs of the sampler, why it ended, and
the policy version of each token."""


def rollout(
    model: Model,
    prompts: Prompts,
    *,
    n: int = 1,
    greedy: int = 0,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    tool: Tool[Any, Any] | None = None,
    max_turns: int | None = None,
    staleness: int = 0,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> Samples:
    """Sample `n` responses to each prompt.

    Args:
        model: the policy.
        prompts: what it answers.
        n: responses to a prompt; together they are a group.
        greedy: responses beside those that take the most likely token each time (ReMax has one). They come last in
            their group, are not trained on (their mask is False), and a column ``greedy`` tells them apart.
        max_new_tokens: longest response, with a tool that of all turns and answers together.
        temperature: divides the logits; the trainer divides by the same, so that the ratio on unchanged weights is 1.
        top_k, top_p, min_p: keep only likely tokens, in this order: the `top_k` most likely, of these the fewest that
            hold the share `top_p` of their probability, of these the ones at least `min_p` times as likely as the most
            likely. Log-probs stay those of the full vocabulary, for the trainer and the sampler alike.
        stop: strings that end a response, with a tool a turn of it.
        ignore_eos: sample to `max_new_tokens` always.
        tool: answers each turn of the model, which then goes on (see `fl.tool`). Its answers are part of the response,
            are not trained on (their mask is False, their log-probs are 0), and a column ``turns`` holds the messages
            of each response.
        max_turns: most turns of the model in a response; None takes as many as there are tokens for. A response whose
            tool still had an answer then, or whose tokens were used up, has ``stop="length"``.
        staleness: how many versions behind the trainer a response may start; 0 is on-policy.
        mesh: its own ranks, which hold a replica of the weights; None shares the model's.
    """
    at = caller()
    label = name or "rollout"
    expect_model(model, label, at)
    expect(prompts, Prompts, node=label, parameter="prompts", at=at)
    expect_sampling(label, at, n, max_new_tokens, temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expect_counts(label, at, least=0, greedy=greedy, staleness=staleness)
    expect_mesh(mesh, label, at)
    sampling = Sampling(
        n=n,
        greedy=greedy,
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=top_k,
        min_p=float(min_p),
        stop=stop_strings(label, at, stop),
        ignore_eos=ignore_eos,
    )
    use, bindings = declare_tool(tool, prompts, max_turns=max_turns, sampling=sampling, node=label, at=at)
    columns = (*RESPONSE_COLUMNS, *(("greedy",) if greedy else ()), *(TURN_COLUMNS if use else ()))
    active = tracer()
    node = active.add(
        lambda final: Node(
            name=final,
            spec=RolloutSpec(sampling=sampling, staleness=staleness, tool=use),
            per="row",
            bindings=(Binding("prompt_ids", prompts.columns["prompt_ids"], "prompt_ids"), *bindings),
            gates=prompts.gates,
            outputs=columns,
            at=at,
            model=model,
            mesh=mesh or model.mesh,
        ),
        name=name,
        default="rollout",
    )
    active.read_by(prompts.columns["prompt_ids"], model)
    return Samples(node.name, {**prompts.columns, **dict.fromkeys(columns, node.name)}, prompts.gates)


def temperature_of(samples: Samples, node: str, at: Location) -> float:
    """The temperature that the samples' rollout draws at; 1 for given responses."""
    spec = tracer().nodes[samples.columns["response_ids"]].spec
    assert isinstance(spec, SamplesSpec), f"'{node}' at {at} reads samples that nothing made"
    return spec.temperature

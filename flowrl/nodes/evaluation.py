"""Evaluate: one pinned version on held-out prompts."""

from __future__ import annotations

from typing import Any

from flowrl.backend import Sampling
from flowrl.columns import bind, positional, settings
from flowrl.expect import expect, expect_counts, expect_model, expect_sampling, stop_strings, unfit, wrong
from flowrl.functions import NodeFunction
from flowrl.graph import Binding, EvaluateSpec, Node, RolloutSpec
from flowrl.location import caller
from flowrl.model import Model
from flowrl.stream import Prompts, Scores
from flowrl.tool import Tool
from flowrl.trace import tracer

from .sampling import RESPONSE_COLUMNS
from .turns import TURN_COLUMNS, declare_tool


def evaluate(
    model: Model,
    prompts: Prompts,
    score: NodeFunction[Any, Any, Scores],
    *,
    every: int,
    n: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_new_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    tool: Tool[Any, Any] | None = None,
    max_turns: int | None = None,
    name: str | None = None,
) -> None:
    """Score one pinned version on held-out prompts: all rows of `prompts`' first batch, each `every` versions.

    Args:
        score: a reward function (called for each response on the model's mesh).
        every: versions between two evaluations; version 0 is evaluated too.
        temperature: 0 is greedy.
        top_k, top_p, min_p: as for `rollout`.
        max_new_tokens: None takes the longest of the model's rollouts that are declared before.
        stop: strings that end a response, with a tool a turn of it.
        tool, max_turns: as for `rollout`; a model that is trained with a tool is evaluated with it.
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
        raise unfit(label, at, "score sees several rows", f"per={score.per!r}", "per='row'", fix)
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
        raise unfit(label, at, "max_new_tokens is not known", found, "max_new_tokens=N", "give max_new_tokens=")
    expect_sampling(label, at, n, length, temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    sampling = Sampling(
        n=n,
        max_new_tokens=length,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=top_k,
        min_p=float(min_p),
        stop=stop_strings(label, at, stop),
    )
    use, bindings = declare_tool(tool, prompts, max_turns=max_turns, sampling=sampling, node=label, at=at)
    made = dict.fromkeys(RESPONSE_COLUMNS + (TURN_COLUMNS if use else ()))
    own = [p for p in positional(score.function) if p.kind is p.VAR_POSITIONAL or p.name not in made]
    active.add(
        lambda final: Node(
            name=final,
            spec=EvaluateSpec(score=score.spec(given), every=every, sampling=sampling, tool=use),
            per="batch",
            bindings=tuple(
                dict.fromkeys(
                    [
                        Binding("prompt_ids", prompts.columns["prompt_ids"], "prompt_ids"),
                        *bindings,
                        *bind(own, (prompts,), {}, node=final, at=at),
                    ]
                )
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

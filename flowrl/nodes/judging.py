"""Judge: a language model that is asked what each sample is worth."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from flowrl.backend import Sampling
from flowrl.columns import bind, positional, settings
from flowrl.errors import Location
from flowrl.expect import (
    expect,
    expect_counts_or_none,
    expect_head,
    expect_model,
    expect_policy,
    expect_sampling,
    stop_strings,
    unfit,
    wrong,
)
from flowrl.functions import call_options, gates_of, with_rollout
from flowrl.graph import FunctionSpec, JudgeSpec, Node
from flowrl.location import caller
from flowrl.model import Model
from flowrl.stream import Samples, Scores, Stream
from flowrl.trace import tracer

CALL_S = 60.0
"""Longest that one call of ``prompt`` or ``parse`` may take; the judge's own time has no limit."""


def judge(
    model: Model,
    samples: Samples,
    *streams: Stream,
    prompt: Callable[..., Any],
    parse: Callable[[str], float | None],
    max_new_tokens: int,
    temperature: float = 0.0,
    stop: tuple[str, ...] = (),
    max_prompt_tokens: int | None = None,
    on_error: Literal["fail", "drop"] = "fail",
    max_failure_rate: float = 0.5,
    name: str | None = None,
) -> Scores:
    """Ask a language model about each sample, and read its answer as a score (a generative reward model).

    The judge reads and writes text through its own tokenizer, on its own mesh and by any backend. Its answer is a
    function of the question, the run's seed and the row's key. The answers stand in ``samples.jsonl``::

        def ask(prompt: str, response: str) -> list[dict[str, str]]:
            return [{"role": "user", "content": f"Grade 0 to 10.\\nQuestion: {prompt}\\nAnswer: {response}\\nGrade:"}]

        def grade(text: str) -> float | None:
            found = re.search(r"\\d+", text)
            return int(found[0]) / 10 if found else None

        scores = fl.judge(fl.Model("path", name="judge"), samples, prompt=ask, parse=grade, max_new_tokens=4)

    Args:
        model: the judge, with a language model's head. One that is trained judges with the version that it has.
        samples: what is judged.
        *streams: more columns for `prompt`.
        prompt: a function of columns by parameter name that gives the question: text, or chat messages for the judge's
            chat template.
        parse: a function of the answer's text that gives the score; None, like an exception, is a failure.
        max_new_tokens: longest answer.
        temperature: 0 takes the most likely token each time.
        stop: strings that end an answer.
        max_prompt_tokens: longest question in the judge's tokens. A longer one is a failure, as is one that leaves no
            room for the answer.
        on_error: ``"fail"`` ends the run at a failure; ``"drop"`` drops the row with the reason. It is never a 0.
        max_failure_rate: with ``"drop"``, the run fails once more than this share of a step's rows has failed.
    """
    at = caller()
    label = name or "judge"
    expect_model(model, label, at)
    expect(samples, Samples, node=label, parameter="samples", at=at)
    for stream in streams:
        expect(stream, Stream, node=label, parameter="input", at=at)
    expect_head(model, "lm", label, at)
    _expect_functions(prompt, parse, label, at)
    expect_sampling(label, at, 1, max_new_tokens, temperature, top_p=1.0, top_k=0, min_p=0.0)
    expect_counts_or_none(label, at, max_prompt_tokens=max_prompt_tokens)
    expect_policy(label, at, "on_error", on_error, ("fail", "drop"))
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        stop=stop_strings(label, at, stop),
    )

    options = call_options("reward", CALL_S, on_error, 0, max_failure_rate)

    def called(function: Callable[..., Any]) -> FunctionSpec:
        return FunctionSpec(function=function, settings={}, **options)

    def declare(final: str) -> Node:
        bindings = bind(positional(prompt), (samples, *streams), {}, node=final, at=at)
        return Node(
            name=final,
            spec=JudgeSpec(
                ask=called(prompt), read=called(parse), sampling=sampling, max_prompt_tokens=max_prompt_tokens
            ),
            per="row",
            bindings=bindings,
            gates=with_rollout(gates_of([samples, *streams]), bindings, samples),
            outputs=("scores", "judgement"),
            at=at,
            model=model,
            mesh=model.mesh,
        )

    node = tracer().add(declare, name=name, default="judge")
    return Scores(node.name, {"scores": node.name}, node.gates)


def _expect_functions(prompt: object, parse: object, node: str, at: Location) -> None:
    for setting, function in (("prompt", prompt), ("parse", parse)):
        if not callable(function) or inspect.iscoroutinefunction(function):
            fix = f"{setting}=the function itself, not what calling it gives; no async def"
            raise wrong(node, at, f"{setting} is no function that can be called", function, "a function", fix)
        settings(function, {}, node=node, at=at)
    assert callable(parse)
    parameters = positional(parse)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if not parameters or len(needed) > 1:
        found, fix = f"parameters {', '.join(needed) or 'none'}", "def parse(text: str) -> float | None"
        raise unfit(node, at, "parse takes the text of an answer, and nothing else", found, "one parameter", fix)

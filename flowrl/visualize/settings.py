"""The settings of a node that a picture names: those that change what it computes or how much."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from flowrl.backend import Sampling
from flowrl.describe import describe, function_name
from flowrl.graph import (
    EvaluateSpec,
    FilterSpec,
    ForwardSpec,
    FunctionSpec,
    JudgeSpec,
    Node,
    PromptsSpec,
    ResponsesSpec,
    RolloutSpec,
    ToolSpec,
    UpdateSpec,
)

WIDTH = 34
"""Characters of a line."""
DEFAULT_TIMEOUT_S = 60.0
"""Of a reward: a setting that was left alone is not shown."""


def settings_lines(node: Node) -> list[str]:
    """At most six lines of `WIDTH` characters, the most important first."""
    lines = [part for line in _FORMAT[type(node.spec)](node, node.spec) if line for part in _wrap(line)]
    return lines[:6]


def clip(text: str, width: int) -> str:
    """The text, its end replaced by an ellipsis if it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _wrap(line: str) -> list[str]:
    line = " ".join(line.split())
    # A path or a name that has no blank keeps its end, which tells it apart.
    if " " not in line:
        return [line if len(line) <= WIDTH else f"…{line[1 - WIDTH :]}"]
    return [clip(part, WIDTH) for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False)]


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    return " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in pairs)


def _unless(name: str, value: Any, default: Any) -> list[tuple[str, Any]]:
    return [] if value == default else [(name, value)]


def source_name(source: Any) -> str:
    """What a data source is called, with the number of its rows where it could be opened. Of an absolute path the last
    part: a picture is passed on, and the folders of one machine mean nothing on another."""
    name = str(describe(str(source) if isinstance(source, os.PathLike) else source))
    return name.rsplit("/", 1)[-1] if name.startswith("/") else name


def _prompts(node: Node, spec: PromptsSpec) -> list[str]:
    return [
        source_name(spec.source),
        _pairs(
            [
                ("batch", spec.batch),
                *_unless("shuffle", spec.shuffle, True),
                *_unless("epochs", spec.epochs, None),
                *_unless("every", spec.every, 1),
                *_unless("max_prompt_tokens", spec.max_prompt_tokens, None),
            ]
        ),
    ]


def _sampling(sampling: Sampling) -> str:
    return _pairs(
        [
            ("n", sampling.n),
            *_unless("greedy", sampling.greedy, 0),
            ("max_new_tokens", sampling.max_new_tokens),
            *_unless("temperature", sampling.temperature, 1.0),
            *_unless("top_p", sampling.top_p, 1.0),
            *_unless("top_k", sampling.top_k, 0),
            *_unless("min_p", sampling.min_p, 0.0),
        ]
    )


def _tool(tool: ToolSpec | None) -> str:
    if tool is None:
        return ""
    own = function_name(tool.call.function).split(":")[-1].split(".")[-1]
    more = [*_unless("max_turns", tool.max_turns, None), *_unless("on_error", tool.call.on_error, "fail")]
    return _pairs([("tool", own), *more])


def _rollout(node: Node, spec: RolloutSpec) -> list[str]:
    model = f"model={node.model.name}" if node.model else ""
    return [model, _sampling(spec.sampling), _tool(spec.tool), f"staleness={spec.staleness}"]


def _responses(node: Node, spec: ResponsesSpec) -> list[str]:
    settings = [
        *_unless("max_new_tokens", spec.max_new_tokens, None),
        *_unless("on_too_long", spec.on_too_long, "error"),
    ]
    return [f"columns: {', '.join(spec.columns)}", f"tokenizer of {spec.model.name}", _pairs(settings)]


def _forward(node: Node, spec: ForwardSpec) -> list[str]:
    model = f"model={node.model.name}" if node.model else ""
    text = ["of text, in its own tokens"] if spec.text else []
    told = [*_unless("k", spec.k, 0), *_unless("temperature", spec.temperature, 1.0)]
    return [f"{spec.outputs[-1]} {model}", *text, _pairs(told)]


def _judge(node: Node, spec: JudgeSpec) -> list[str]:
    asks, reads = (function_name(each.function).split(":")[-1].split(".")[-1] for each in (spec.ask, spec.read))
    settings = [
        ("max_new_tokens", spec.sampling.max_new_tokens),
        *_unless("temperature", spec.sampling.temperature, 0.0),
        *_unless("max_prompt_tokens", spec.max_prompt_tokens, None),
        *_unless("on_error", spec.read.on_error, "fail"),
    ]
    return [f"model={node.model.name}" if node.model else "", f"asks {asks}(), reads {reads}()", _pairs(settings)]


def _function(node: Node, spec: FunctionSpec) -> list[str]:
    own = function_name(spec.function).split(":")[-1].split(".")[-1]
    settings = {name: describe(value) for name, value in spec.settings.items()}
    return [
        f"{own}()" if own != node.name else "",
        _pairs(
            [
                *_unless("per", node.per, "row"),
                *_unless("on_error", spec.on_error, "fail"),
                *_unless("timeout", f"{spec.timeout_s or 0:g}s", f"{DEFAULT_TIMEOUT_S if spec.timeout_s else 0:g}s"),
                *_unless("retries", spec.retries, 0),
            ]
        ),
        _pairs(settings.items()),
    ]


def _filter(node: Node, spec: FilterSpec) -> list[str]:
    keep = function_name(spec.keep).split(":")[-1].split(".")[-1]
    refill = f" refill={spec.refill}" if spec.refill else ""
    return [f"keep={keep} per={node.per}{refill}", f"reason: {spec.reason}" if spec.reason != node.name else ""]


def _update(node: Node, spec: UpdateSpec) -> list[str]:
    model = f"model={node.model.name}" if node.model else ""
    optimizer = node.model.optimizer if node.model else None
    return [
        f"{model} lr={optimizer.lr:g}" if optimizer else model,
        f"loss={spec.loss}".replace(" + -", " - "),
        _pairs(
            [
                *_unless("batch", spec.batch, None),
                *_unless("minibatches", spec.minibatches, 1),
                *_unless("epochs", spec.epochs, 1),
                *_unless("max_tokens", spec.max_tokens, None),
                *_unless("clip_grad", spec.clip_grad, 1.0),
                *_unless("max_mismatch", spec.max_mismatch, None),
            ]
        ),
    ]


def _evaluate(node: Node, spec: EvaluateSpec) -> list[str]:
    score = function_name(spec.score.function).split(":")[-1].split(".")[-1]
    return [f"{score} every={spec.every} versions", _sampling(spec.sampling), _tool(spec.tool)]


_FORMAT: dict[type, Callable[[Node, Any], list[str]]] = {
    PromptsSpec: _prompts,
    RolloutSpec: _rollout,
    ResponsesSpec: _responses,
    ForwardSpec: _forward,
    JudgeSpec: _judge,
    FunctionSpec: _function,
    FilterSpec: _filter,
    UpdateSpec: _update,
    EvaluateSpec: _evaluate,
}

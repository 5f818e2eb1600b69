"""Responses: answers that stand in the data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from flowrl.columns import bind, parameter
from flowrl.errors import Location, did_you_mean
from flowrl.expect import expect, expect_counts_or_none, expect_model, expect_policy, unfit, wrong
from flowrl.graph import Node, PromptsSpec, ResponsesSpec
from flowrl.location import caller
from flowrl.model import Model
from flowrl.stream import Prompts, Samples
from flowrl.trace import tracer

from .data import PROMPT_COLUMNS
from .sampling import RESPONSE_COLUMNS

GIVEN_COLUMNS = ("response_ids", "response", "mask", "stop", "preference")
"""What given responses write: int32 ids, text, bool mask (1 = trained), why each ends, and float32 preference: +1 is
chosen or desirable, -1 rejected or undesirable, 0 neither."""

Columns = str | Sequence[str] | Mapping[str, float | str]


def responses(
    model: Model,
    prompts: Prompts,
    *,
    columns: Columns,
    trained: str | Sequence[str] | None = None,
    max_new_tokens: int | None = None,
    on_too_long: Literal["error", "drop", "cut"] = "error",
    name: str | None = None,
) -> Samples:
    """Answers from columns of the data set as samples: sample i of a prompt is the value of column i.

    An answer to a text is tokenized as it follows that text, and the model's end-of-sequence id is appended. An answer
    to chat messages is text, a message, or a list of messages (turns of the assistant and of tools, of which the
    assistant's tokens are trained); it goes through the chat template behind the prompt, and its ids must extend the
    prompt's. No model samples: there are no ``logprobs`` and no ``versions``.

    Args:
        model: gives the tokenizer.
        prompts: what is answered; a row without a value in one of the columns is what `on_missing` there says.
        columns: by column its preference (+1 chosen, -1 rejected, 0 neither), or the name of a column that holds it: a
            number, or true and false for +1 and -1. A 0 is refused there, since most who write it mean a bad answer.
            One name, or several, stand for preference +1.
        trained: columns whose tokens are trained; None trains all. The others have a mask of False.
        max_new_tokens: longest answer; None is limited by the model's length alone.
        on_too_long: a longer one is an error, drops the prompt with all its answers (counted), or is cut, so that it
            has no end-of-sequence id (``"cut"``, counted).
    """
    at = caller()
    label = name or "responses"
    expect_model(model, label, at)
    expect(prompts, Prompts, node=label, parameter="prompts", at=at)
    expect_counts_or_none(label, at, max_new_tokens=max_new_tokens)
    expect_policy(label, at, "on_too_long", on_too_long, ("error", "drop", "cut"))
    preference = _preference(columns, label, at)
    wanted = _names(trained, label, at) if trained is not None else tuple(preference)
    _expect_trained(wanted, preference, label, at)
    spec = ResponsesSpec(
        model=model,
        columns=tuple(preference),
        preference=tuple(preference.values()),
        trained=tuple(column in wanted for column in preference),
        max_new_tokens=max_new_tokens,
        on_too_long=on_too_long,
    )
    read = dict.fromkeys([*PROMPT_COLUMNS, *spec.columns, *(p for p in spec.preference if isinstance(p, str))])
    active = tracer()
    _expect_tokenizer(model, active.nodes[prompts.columns["prompt_ids"]], label, at)
    node = active.add(
        lambda final: Node(
            name=final,
            spec=spec,
            per="row",
            bindings=bind([parameter(column) for column in read], (prompts,), {}, node=final, at=at),
            gates=prompts.gates,
            outputs=GIVEN_COLUMNS,
            at=at,
        ),
        name=name,
        default="responses",
    )
    active.read_by(prompts.columns["prompt_ids"], model)
    # A sampler's columns of the data set mean a sampling that this run knows nothing of.
    beside = {column: source for column, source in prompts.columns.items() if column not in RESPONSE_COLUMNS}
    return Samples(node.name, {**beside, **dict.fromkeys(GIVEN_COLUMNS, node.name)}, prompts.gates)


def _preference(columns: object, node: str, at: Location) -> dict[str, float | str]:
    """The preference of each column, in order."""
    if not isinstance(columns, Mapping):
        return dict.fromkeys(_names(columns, node, at), 1.0)
    found: dict[str, float | str] = {}
    for column, value in columns.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(column, str) or not (number or isinstance(value, str)):
            fix = "+1 for chosen, -1 for rejected, 0 for neither, or the name of the column that says so"
            raise wrong(node, at, f"the preference of column {column!r} is none", value, "a number or a column", fix)
        found[column] = value if isinstance(value, str) else float(value)
    if not found:
        raise wrong(node, at, "columns= names no column", columns, "one or more", 'columns="answer"')
    return found


def _names(columns: object, node: str, at: Location) -> tuple[str, ...]:
    names = (columns,) if isinstance(columns, str) else columns
    several = isinstance(names, Sequence) and len(names) > 0 and all(isinstance(name, str) for name in names)
    if not several:
        fix = 'columns="answer", or columns={"chosen": 1, "rejected": -1}'
        raise wrong(node, at, "columns= names no column of the data set", columns, "names of columns", fix)
    assert isinstance(names, Sequence)
    if len(set(names)) < len(names):
        raise wrong(node, at, "a column is named twice", columns, "each once: it is one sample", "name each once")
    return tuple(names)


def _expect_trained(trained: tuple[str, ...], known: Mapping[str, object], node: str, at: Location) -> None:
    for name in trained:
        if name not in known:
            fix = did_you_mean(name, known) or "name some of columns="
            raise wrong(node, at, f"trained= names '{name}', which is none of its columns", trained, str([*known]), fix)


def _expect_tokenizer(model: Model, prompts: Node, node: str, at: Location) -> None:
    """Prompt and answer are ids of one tokenizer."""
    reader = prompts.spec.model if isinstance(prompts.spec, PromptsSpec) else None
    if reader is not None and (reader.source, reader.backend) != (model.source, model.backend):
        found = f"model '{model.name}' from {model.source}"
        wanted = f"'{reader.name}' from {reader.source}, whose tokenizer makes the ids of '{prompts.name}'"
        raise unfit(node, at, "answers and prompts are tokenized for two models", found, wanted, "a second fl.prompts")

"""Prompts: rows of a data source."""

from __future__ import annotations

from typing import Any, Literal

from flowrl.errors import FlowrlError
from flowrl.expect import expect_counts, expect_counts_or_none, expect_policy, wrong
from flowrl.graph import Node, PromptsSpec
from flowrl.location import caller
from flowrl.sources import Source, open_source
from flowrl.stream import ANY, Prompts
from flowrl.trace import tracer

PROMPT_COLUMNS = ("prompt", "prompt_ids", "prompt_messages", "prompt_row")
"""What prompts write beside the columns of their source: text, int32 ids, the chat messages that were asked (None where
text was), and the number of the row in its source."""


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
    every: int = 1,
    name: str | None = None,
) -> Prompts:
    """Rows of a data source, `batch` a step.

    Args:
        source: a .jsonl or .parquet file, a Hugging Face data set, any iterable of dicts, or anything with ``[index]``
            that gives dicts.
        batch: prompts a step.
        shuffle: a new order each epoch, a function of `seed` and the epoch.
        seed: of the order, and of the rows of a built-in task (``"builtin:NAME"``): another seed asks other questions.
        column: holds the prompt: text, or a list of chat messages for the chat template.
        chat: a text is what a user says, for the chat template too: what a model tuned to instructions expects.
        max_prompt_tokens: longest prompt.
        on_too_long: a longer one is an error, is dropped and counted, or keeps its last tokens (``"left"``).
        on_missing: a row without a value that the graph reads is an error, or is dropped and counted.
        last: the last rows of an epoch that fill no batch are dropped and counted, make a short step, or are filled up
            from the next epoch.
        epochs: passes over the source; None repeats for ever.
        every: steps from one batch to the next: 10 gives rows in the first step, the eleventh, ... for what is measured
            beside the training. What such rows say of a trained model is of its weights before that step's update.
    """
    at = caller()
    label = name or "prompts"
    expect_counts(label, at, batch=batch, every=every)
    expect_counts_or_none(label, at, max_prompt_tokens=max_prompt_tokens, epochs=epochs)
    expect_policy(label, at, "on_too_long", on_too_long, ("error", "drop", "left"))
    expect_policy(label, at, "on_missing", on_missing, ("error", "drop"))
    expect_policy(label, at, "last", last, ("drop", "short", "wrap"))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise wrong(label, at, "seed is no number", seed, "an integer", "seed=0")
    opened = _opened(source, seed)
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
        every=every,
    )
    columns = dict.fromkeys((*PROMPT_COLUMNS, *(opened.columns if opened else (ANY,))))
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


def _opened(source: Any, seed: int) -> Source | None:
    """The rows of a data source: opened once, since an iterable can be read no second time. None while it cannot be
    opened: the checks will say why."""
    try:
        return open_source(source, seed=seed)
    except FlowrlError:
        return None

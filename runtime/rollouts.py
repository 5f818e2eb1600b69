"""Rollouts: what a model answers to prompts, in one turn or, with a tool, in several, as rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from flowrl.backend import Prompt, Response, Sampling, Tokenizer
from flowrl.graph import EvaluateSpec, RolloutSpec, ToolSpec
from flowrl.rows import Column, Ragged, Rows

from .conversation import Conversation
from .events import Firing
from .made import Counts, Emitted, Made, Parts
from .tool_calls import ToolCalls
from .turns import Turns

if TYPE_CHECKING:
    from .worker import Worker

EMIT_S = 0.05
"""Responses that end within this time of each other leave in one block: a block costs as much as some tens of rows."""

Columns = Mapping[str, Column]
T = TypeVar("T")


def rollout(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Answer prompts; responses leave as they end."""
    spec = worker.plan.graph[firing.node].spec
    assert isinstance(spec, RolloutSpec)
    columns = worker.arguments(firing, parts)
    if spec.tool:
        yield from _converse(worker, firing, spec.sampling, spec.tool, columns)
        return
    model = worker.model_of(firing)
    asked = _asked(firing, columns)
    lengths = {prompt.key: len(prompt.ids) for prompt in asked}
    counts = Counts()
    for chunk in _chunks(model.generate(asked, spec.sampling, worker.seed)):
        counts.add([len(response.ids) for response in chunk], [response.stop for response in chunk])
        rows = response_rows(chunk, firing.version, model.tokenizer, spec.sampling)
        yield Emitted(rows, lengths=tuple(lengths[r.key.group] + len(r.ids) for r in chunk))
    yield counts.metrics()


def answered(worker: Worker, firing: Firing, spec: EvaluateSpec, columns: Columns) -> tuple[Rows, int]:
    """All responses of an evaluation, in order of their keys, and how many more its tool has dropped."""
    model, asked = worker.model_of(firing), _asked(firing, columns)
    if spec.tool is None:
        ended = chain.from_iterable(model.generate(asked, spec.sampling, worker.seed))
        responses = sorted(ended, key=lambda response: response.key)
        return response_rows(responses, firing.version, model.tokenizer, spec.sampling), 0
    calls = _calls(worker, firing, spec.tool, columns)
    talks = list(chain.from_iterable(Turns(model, calls, spec.sampling, asked, worker.seed).run()))
    good = sorted((talk for talk in talks if not talk.dropped), key=lambda talk: talk.key)
    return _conversation_rows(good, firing.version, model.tokenizer, spec.sampling), len(talks) - len(good)


def response_rows(responses: Sequence[Response], version: int, tokenizer: Tokenizer, sampling: Sampling) -> Rows:
    """Every column of a rollout."""
    ids = Ragged.pack([response.ids for response in responses], "int32")
    greedy = np.array([response.key.sample >= sampling.n for response in responses], np.bool_)
    columns: dict[str, Column] = {
        "response_ids": ids,
        "response": [tokenizer.decode(response.ids) for response in responses],
        "mask": Ragged(np.repeat(~greedy, ids.lengths), ids.offsets),
        "logprobs": Ragged.pack([response.logprobs for response in responses], "float32"),
        "stop": [response.stop for response in responses],
        "versions": Ragged(np.full(len(ids.values), version, np.int32), ids.offsets),
    }
    if sampling.greedy:
        columns["greedy"] = greedy
    return Rows([response.key for response in responses], columns)


def _asked(firing: Firing, columns: Columns) -> list[Prompt]:
    return [Prompt(key=key, ids=ids) for key, ids in zip(firing.keys, columns["prompt_ids"], strict=True)]


def _calls(worker: Worker, firing: Firing, tool: ToolSpec, columns: Columns) -> ToolCalls:
    node = worker.plan.graph[firing.node]
    return ToolCalls(node, tool, worker.model_of(firing).tokenizer, firing.keys, columns)


def _converse(worker: Worker, firing: Firing, sampling: Sampling, tool: ToolSpec, columns: Columns) -> Made:
    """Answer prompts in turns; conversations leave as they end."""
    model, calls = worker.model_of(firing), _calls(worker, firing, tool, columns)
    counts = Counts()
    for chunk in _chunks(Turns(model, calls, sampling, _asked(firing, columns), worker.seed).run()):
        dropped = {talk.key: talk.dropped for talk in chunk if talk.dropped}
        good = [talk for talk in chunk if not talk.dropped]
        counts.add([len(talk.ids) for talk in good], [talk.stop for talk in good])
        counts.add_turns([talk.num_turns for talk in good], [talk.mask.count(False) for talk in good])
        rows = _conversation_rows(good, firing.version, model.tokenizer, sampling) if good else None
        yield Emitted(rows, dropped, tuple(len(talk.prompt_ids) + len(talk.ids) for talk in good))
    yield counts.metrics() | calls.metrics()


def _conversation_rows(talks: Sequence[Conversation], version: int, tokenizer: Tokenizer, sampling: Sampling) -> Rows:
    """As any responses, with what the tool said masked, and the messages."""
    rows = response_rows([talk.response for talk in talks], version, tokenizer, sampling)
    mask: Ragged = rows["mask"]
    sampled = Ragged.pack([talk.mask for talk in talks], "bool")
    return rows.with_columns(mask=replace(mask, values=mask.values & sampled.values), turns=[t.turns for t in talks])


def _chunks(steps: Iterator[Sequence[T]]) -> Iterator[list[T]]:
    """Responses in blocks: what has ended leaves with the first decoding step after `EMIT_S`, and at the end."""
    chunk: list[T] = []
    since = time.perf_counter()
    for ended in steps:
        chunk += ended
        if chunk and time.perf_counter() - since > EMIT_S:
            yield chunk
            chunk, since = [], time.perf_counter()
    if chunk:
        yield chunk

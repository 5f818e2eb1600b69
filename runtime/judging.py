"""The action ``judge``: a question about each row, the judge's answers, and the scores that are read from them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowrl.backend import Metrics, Prompt, Response, Sum, Tokenizer
from flowrl.errors import LengthError, ResultError
from flowrl.graph import JudgeSpec, Node
from flowrl.rows import Column, Key, Rows
from flowrl.seeds import mix

from .calls import Called, call_function
from .events import Firing
from .made import Emitted, Made, Parts, reward_metrics
from .registry import describe
from .timeout import function_name

if TYPE_CHECKING:
    from .worker import Worker

MAX_SHOWN = 80
"""Characters of an answer in an error."""


def judge(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Ask about each row, and read the answers; rows whose question or answer fails are dropped, or end the run."""
    node = worker.plan.graph[firing.node]
    asked = _Questions(worker, node).ask(firing.keys, worker.arguments(firing, parts))
    model = worker.model_of(firing)
    answers = _answers(worker, firing, asked.rows)
    texts = [model.tokenizer.decode(answer.ids) for answer in answers]
    keys = asked.rows.keys if asked.rows is not None else []
    read = _read(node, keys, texts, [answer.stop == "length" for answer in answers])
    rows = None
    if read.rows is not None:
        said = dict(zip(keys, texts, strict=True))
        rows = read.rows.with_columns(judgement=[said[key] for key in read.rows.keys])
    yield Emitted(rows, {**asked.dropped, **read.dropped})
    yield {**_metrics(node, answers), **reward_metrics(worker.plan, node, rows)}


class _Questions:
    """How a row becomes the ids that a judge is asked.

    Encoding is part of the call of the user's function, so that a question which the judge cannot be asked is a failure
    like any other.
    """

    def __init__(self, worker: Worker, node: Node) -> None:
        assert isinstance(node.spec, JudgeSpec)
        assert node.model is not None
        self.node = node
        self.spec = node.spec
        self.tokenizer: Tokenizer = worker.models[node.model.name].tokenizer
        limit = describe(node.model.backend, node.model.source).max_length
        limits = [] if limit is None else [limit - node.spec.sampling.max_new_tokens]
        limits += [node.spec.max_prompt_tokens] if node.spec.max_prompt_tokens else []
        self.longest = min(limits, default=None)

    def ask(self, keys: Sequence[Key], columns: Mapping[str, Column]) -> Called:
        """Ids of each question, as the column ``question``."""
        function = self.spec.ask.function

        @functools.wraps(function)
        def ids_of_question(*arguments: Any, **named: Any) -> NDArray[np.int32]:
            return np.asarray(self._encode(function(*arguments, **named)), np.int32)

        spec = replace(self.spec.ask, function=ids_of_question)
        return call_function(replace(self.node, spec=spec, outputs=("question",)), spec, keys, columns)

    def _encode(self, question: Any) -> list[int]:
        if not _is_text_or_chat(question):
            raise self._error(
                ResultError,
                "gave no question",
                found=f"{question!r}"[:MAX_SHOWN],
                wanted="text, or a list of messages with 'role' and 'content'",
            )
        ids = self.tokenizer.encode(question)
        if not ids:
            raise self._error(ResultError, "gave an empty question", found=repr(question), wanted="text")
        if self.longest is not None and len(ids) > self.longest:
            raise self._error(
                LengthError,
                "gave a question that is too long",
                found=f"{len(ids)} tokens",
                wanted=f"at most {self.longest}, so that max_new_tokens={self.spec.sampling.max_new_tokens} follow",
                fix="shorten it, or drop such rows with on_error='drop'",
            )
        return ids

    def _error(self, kind: type[ResultError] | type[LengthError], what: str, **parts: Any) -> ResultError | LengthError:
        function = function_name(replace(self.node, spec=self.spec.ask))
        problem = f"function '{function}' of node '{self.node.name}' {what}"
        return kind(problem, at=self.node.at, node=self.node.name, **parts)


def _answers(worker: Worker, firing: Firing, questions: Rows | None) -> list[Response]:
    """One answer a row, in order of the rows.

    A model answers prompts, not samples: each row's question goes under a number of its own, and the seed is the
    judge's, so that no random number of the sample that it judges is drawn again.
    """
    if questions is None:
        return []
    node = worker.plan.graph[firing.node]
    assert isinstance(node.spec, JudgeSpec)
    size = worker.plan.samples_per_prompt[worker.plan.stages[firing.node].space]
    numbers = [Key(key.step, key.prompt * size + key.sample) for key in questions.keys]
    asked = [Prompt(key=key, ids=list(ids)) for key, ids in zip(numbers, questions["question"], strict=True)]
    seed = mix(worker.seed, *node.name.encode())
    answers = chain.from_iterable(worker.model_of(firing).generate(asked, node.spec.sampling, seed))
    given = {answer.key.group: answer for answer in answers}
    return [given[number] for number in numbers]


def _read(node: Node, keys: Sequence[Key], texts: Sequence[str], cut: Sequence[bool]) -> Called:
    """The score of each answer; None is a failure that shows the answer."""
    assert isinstance(node.spec, JudgeSpec)
    parse = node.spec.read.function
    named = function_name(replace(node, spec=node.spec.read))

    def score_of(answer: _Answer) -> Any:
        score = parse(answer.text)
        if score is None:
            shown = repr(answer.text)
            raise ResultError(
                f"function '{named}' of node '{node.name}' reads no score in an answer",
                at=node.at,
                node=node.name,
                found=shown[:MAX_SHOWN] + ("..." if len(shown) > MAX_SHOWN else "") + answer.end,
                wanted="a number",
                fix="ask for an answer that parse= can read, or drop such rows with on_error='drop': none is scored 0",
            )
        return score

    score_of.__name__ = named
    spec = replace(node.spec.read, function=score_of)
    ends = [", cut at max_new_tokens" if was_cut else "" for was_cut in cut]
    answers = [_Answer(text, end) for text, end in zip(texts, ends, strict=True)]
    return call_function(replace(node, spec=spec, outputs=("scores",)), spec, keys, {"answer": answers})


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    end: str
    """What is to be said of how it ended."""


def _metrics(node: Node, answers: Sequence[Response]) -> Metrics:
    lengths = sum(len(answer.ids) for answer in answers)
    cut = sum(answer.stop == "length" for answer in answers)
    return {
        f"{node.name}/response_length": Sum(lengths, len(answers)),
        f"{node.name}/truncated": Sum(cut, len(answers)),
    }


def _is_text_or_chat(value: Any) -> bool:
    if isinstance(value, str):
        return True
    turns = value if isinstance(value, list | tuple) else ()
    return bool(turns) and all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns)

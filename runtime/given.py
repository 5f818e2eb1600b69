"""The action ``responses``: answers of the data set as rows, in the ids of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.answers import Answer, encode_answer
from flowrl.backend import StopReason
from flowrl.errors import DataError, FlowrlError
from flowrl.graph import PromptsSpec, ResponsesSpec
from flowrl.rows import Column, Key, Ragged, Rows
from flowrl.sources import open_source

from .events import Firing
from .made import Counts, Emitted, Made, Parts
from .registry import describe

if TYPE_CHECKING:
    from .worker import Worker

TOO_LONG = "an answer is too long"


class _TooLong(Exception):
    """An answer has no place, and its prompt is to be dropped."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """One row."""

    key: Key
    answer: Answer
    stop: StopReason
    preference: float


def responses(worker: Worker, firing: Firing, parts: Parts) -> Made:
    """Tokenize the answers to each prompt; a prompt goes on with all of them, or with none."""
    node = worker.plan.graph[firing.node]
    assert isinstance(node.spec, ResponsesSpec)
    prompts = worker.plan.graph[node.bindings[0].source].spec
    assert isinstance(prompts, PromptsSpec)
    columns = worker.arguments(firing, parts)
    reading = _Reading(worker, node.spec, columns)
    samples: list[_Sample] = []
    dropped: dict[Key, str] = {}
    for row, key in enumerate(firing.keys):
        try:
            samples += list(reading.samples(row, key))  # all of a prompt, or none
        except _TooLong:
            dropped[key] = TOO_LONG
        except DataError as error:
            place = open_source(prompts.source).place(int(columns["prompt_row"][row]))
            error.problem = f"node '{node.name}': {place}: {error.problem}"
            raise
    ids = dict(zip(firing.keys, columns["prompt_ids"].lengths.tolist(), strict=True))
    made = reading.rows(samples, node.spec)
    lengths = made["response_ids"].lengths.tolist()
    total = tuple(ids[key.group] + length for key, length in zip(made.keys, lengths, strict=True))
    yield Emitted(made if len(made) else None, dropped, total)
    counts = Counts()
    counts.add(lengths, made["stop"])
    trained = any(stage.action == "backward" for stage in worker.plan.in_space[firing.node])
    yield {name if trained else f"{name}/{node.name}": value for name, value in counts.metrics().items()}


class _Reading:
    """The rows of one firing: columns of the prompts, and how their answers become samples."""

    def __init__(self, worker: Worker, spec: ResponsesSpec, columns: Mapping[str, Column]) -> None:
        self.spec = spec
        self.columns = columns
        self.tokenizer = worker.tokenizer_of(spec.model)
        self.max_length = describe(spec.model.backend, spec.model.source).max_length

    def samples(self, row: int, key: Key) -> Iterator[_Sample]:
        """One for each column.

        Raises:
            DataError: a value is no answer, or no preference, or is too long.
            _TooLong: the prompt is to be dropped.
        """
        prompt = self.columns["prompt_messages"][row] or self.columns["prompt"][row]
        for sample, column in enumerate(self.spec.columns):
            try:
                answer = encode_answer(self.tokenizer, prompt, self.columns[column][row])
            except DataError as error:
                error.problem = f"column '{column}': {error.problem}"
                raise
            except FlowrlError:
                raise
            except Exception as error:  # whatever a tokenizer raises for a text that it does not know
                problem = f"column '{column}': the answer cannot be tokenized: {type(error).__name__}: {error}"
                raise DataError(problem, found=repr(self.columns[column][row])[:80]) from error
            stop: StopReason = "eos"
            limit = self._limit(row)
            if limit is not None and len(answer.ids) > limit:
                if self.spec.on_too_long == "drop":
                    raise _TooLong
                if self.spec.on_too_long == "error" or limit < 1:
                    raise _too_long(column, len(answer.ids), limit)
                answer, stop = Answer(answer.ids[:limit], answer.mask[:limit]), "length"
            yield _Sample(key._replace(sample=sample), answer, stop, self._preference(row, sample))

    def rows(self, samples: list[_Sample], spec: ResponsesSpec) -> Rows:
        """All samples as columns."""
        trained = [spec.trained[sample.key.sample] for sample in samples]
        masks = [np.array(s.answer.mask, np.bool_) & on for s, on in zip(samples, trained, strict=True)]
        columns: dict[str, Column] = {
            "response_ids": Ragged.pack([sample.answer.ids for sample in samples], "int32"),
            "response": [self.tokenizer.decode(sample.answer.ids) for sample in samples],
            "mask": Ragged.pack(masks, "bool"),
            "stop": [sample.stop for sample in samples],
            "preference": np.array([sample.preference for sample in samples], np.float32),
        }
        return Rows([sample.key for sample in samples], columns)

    def _limit(self, row: int) -> int | None:
        """Most tokens of an answer: as declared, and as the model has room for behind the prompt."""
        room = None if self.max_length is None else self.max_length - len(self.columns["prompt_ids"][row])
        limits = [limit for limit in (self.spec.max_new_tokens, room) if limit is not None]
        return min(limits, default=None)

    def _preference(self, row: int, sample: int) -> float:
        declared = self.spec.preference[sample]
        if not isinstance(declared, str):
            return declared
        value: Any = self.columns[declared][row]
        if isinstance(value, bool):
            return 1.0 if value else -1.0
        if not isinstance(value, (int, float)) or not np.isfinite(value) or value == 0:
            fix = "false or -1 for a bad answer; leave out rows that are neither good nor bad" if value == 0 else None
            wanted = "true or false, or a number: +1 or -1"
            raise DataError(f"column '{declared}' holds no preference", found=repr(value)[:80], wanted=wanted, fix=fix)
        return float(value)


def _too_long(column: str, length: int, limit: int) -> DataError:
    return DataError(
        f"column '{column}': the answer is too long: {length} > {limit} tokens",
        found=f"{length} tokens, the end of the sequence included",
        wanted=f"at most {limit}: max_new_tokens, and what the model's length leaves behind the prompt",
        fix="on_too_long='drop' or 'cut' in fl.responses, or a larger max_new_tokens",
    )

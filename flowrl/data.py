"""Prompts by step: rows of a source, tokenized, checked and batched.

`PromptReader.read` is a function of the step alone. What has to be known of all rows for that (which are usable) is
found once, when the reader is made; a finite source is then read through only where a setting asks for it, see
`PromptReader`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from .backend import Tokenizer
from .epochs import Epochs, Last
from .errors import DataError, did_you_mean
from .rows import Key, Ragged, Rows
from .sources import Source, open_source

if TYPE_CHECKING:
    import numpy as np
else:
    from ._lazy import lazy

    np = lazy("numpy")

__all__ = ["Last", "OnMissing", "OnTooLong", "PromptReader", "PromptSettings", "Source", "open_source"]

OnTooLong = Literal["error", "drop", "left"]
"""``left`` cuts on the left: the last `max_prompt_tokens` ids stay."""
OnMissing = Literal["error", "drop"]

_TOO_LONG = "too long"
_MADE = ("prompt", "prompt_ids", "prompt_messages", "prompt_row")
"""Columns that the reader writes itself, whether or not the source has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSettings:
    """How the rows of a source become prompts."""

    batch: int
    """Prompts a step."""
    shuffle: bool = False
    """A new order each epoch."""
    seed: int = 0
    """Of the order."""
    column: str = "prompt"
    """Holds the prompt, text or chat messages; without a column ``prompt``, ``messages`` or ``prompt_ids`` is taken."""
    chat: bool = False
    """A text is the message of a user and goes through the chat template; False takes it as it is."""
    required: tuple[str, ...] = ()
    """Columns that the graph reads, and that so must hold a value in every row."""
    max_prompt_tokens: int | None = None
    """Longest prompt, special tokens and chat template included; None sets no limit."""
    on_too_long: OnTooLong = "error"
    """What becomes of a longer prompt."""
    on_missing: OnMissing = "error"
    """What becomes of a row without a value in a required column, or without a prompt."""
    last: Last = "drop"
    """What becomes of an epoch's last rows, when they fill no batch."""
    epochs: int | None = None
    """Passes over the rows; None repeats for ever."""

    def __post_init__(self) -> None:
        for field, allowed in (("on_too_long", get_args(OnTooLong)), ("on_missing", get_args(OnMissing))):
            if getattr(self, field) not in allowed:
                raise DataError(f"unknown {field}", found=repr(getattr(self, field)), wanted=", ".join(allowed))
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise DataError("a prompt has at least one token", found=f"max_prompt_tokens={self.max_prompt_tokens}")

    @property
    def limits_length(self) -> bool:
        """Whether a row's length decides if it is usable."""
        return self.max_prompt_tokens is not None and self.on_too_long != "left"

    @property
    def may_drop(self) -> bool:
        """Whether some rows may have to be left out."""
        return (self.limits_length and self.on_too_long == "drop") or self.on_missing == "drop"


class PromptReader:
    """The rows of each step.

    A finite source is read through once, here, if some row may be refused or left out for a value that is None
    (`required` or ``on_missing="drop"``), or for its length (`max_prompt_tokens`, unless ``on_too_long="left"``; this
    tokenizes every prompt). An unbounded source is checked row by row as it is read, and cannot drop.

    Args:
        source: whatever `open_source` opens.
        tokenizer: of the model that answers.
        settings: batch, order and policies.

    Raises:
        DataError: the source cannot be read, lacks a column, holds a row that the policies refuse, or fills no batch.
    """

    def __init__(self, source: object, tokenizer: Tokenizer, settings: PromptSettings) -> None:
        self.source = open_source(source, seed=settings.seed)
        self.tokenizer = tokenizer
        self.settings = settings
        self._column = _prompt_column(self.source, settings.column)
        self._required = tuple(name for name in settings.required if name not in _MADE)
        _check_columns(self.source, self._required)
        self.dropped: Counter[str] = Counter()
        """Rows left out, by reason."""
        self._usable = self._scan()
        num_rows = self.source.num_rows if self._usable is None else len(self._usable)
        self._refuse_too_few(num_rows)
        self.epochs = Epochs(
            num_rows=num_rows,
            batch=settings.batch,
            shuffle=settings.shuffle,
            seed=settings.seed,
            last=settings.last,
            epochs=settings.epochs,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the rows that `read` gives."""
        return tuple(dict.fromkeys((*_MADE, *self.source.columns)))

    @property
    def num_steps(self) -> int | None:
        """Steps until the source is used up; None: never."""
        return self.epochs.num_steps

    @property
    def num_dropped_last(self) -> int:
        """Rows left out at the end of each epoch because they fill no batch."""
        return self.epochs.num_dropped_last

    def report(self) -> str:
        """One line: ``10 rows, batch 4: 2 rows dropped at the end of each epoch``."""
        total = "" if self.source.num_rows is None else f"{self._counts()}, "
        return f"{total}batch {self.settings.batch}: {self.epochs.describe()}"

    def read(self, step: int) -> Rows | None:
        """The prompts of a step; None once the source is used up.

        Returns:
            Rows under ``Key(step, i)``: ``prompt`` list of text (of chat messages and of cut prompts, the decoded ids),
            ``prompt_ids`` ragged int32 [prompt tokens], ``prompt_messages`` list of chat messages (None where text or
            ids were asked), ``prompt_row`` [rows] int64 number in the source, and a list for each column of the source,
            its values untouched.

        Raises:
            DataError: a row that the policies refuse.
        """
        positions = self.epochs.rows(step)
        if positions is None:
            return None
        numbers = positions if self._usable is None else [self._usable[position] for position in positions]
        rows = [self.source[number] for number in numbers]
        columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in self.source.columns}
        prompts = [self._read_prompt(number, row) for number, row in zip(numbers, rows, strict=True)]
        columns["prompt"] = [text for text, _ in prompts]
        columns["prompt_ids"] = Ragged.pack([ids for _, ids in prompts], "int32")
        columns["prompt_messages"] = [self._messages(row) for row in rows]
        columns["prompt_row"] = np.array(numbers, np.int64)
        return Rows([Key(step, i) for i in range(len(rows))], columns)

    def _read_prompt(self, number: int, row: Mapping[str, Any]) -> tuple[str, Sequence[int]]:
        """Text and ids of a row that must be usable."""
        if missing := self._missing_column(row):
            raise self._missing_error(number, missing)
        ids = self._encode(number, row)
        limit = self.settings.max_prompt_tokens
        text = row.get(self._column)
        if limit is not None and len(ids) > limit:
            if self.settings.on_too_long != "left":
                raise self._too_long_error(number, len(ids))
            ids, text = ids[-limit:], None
        return text if isinstance(text, str) else self.tokenizer.decode(ids), ids

    def _encode(self, number: int, row: Mapping[str, Any]) -> Sequence[int]:
        """Ids of a row's prompt; a ``prompt_ids`` column is taken as it is."""
        place = self.source.place(number)
        if row.get("prompt_ids") is not None:
            ids: Sequence[int] = row["prompt_ids"]
            if not all(isinstance(token, int) for token in ids):
                raise DataError(f"{place}: column 'prompt_ids' holds no token ids", found=repr(ids)[:80])
        else:
            value = row[self._column]
            if not _is_text_or_chat(value):
                wanted = "text, or a list of messages with 'role' and 'content'"
                raise DataError(f"{place}: column {self._column!r} is no prompt", found=repr(value)[:80], wanted=wanted)
            try:
                ids = self.tokenizer.encode(self._messages(row) or value)
            except Exception as error:
                raise DataError(f"{place}: the prompt cannot be tokenized: {type(error).__name__}: {error}") from error
        if len(ids) == 0:
            raise DataError(f"{place}: the prompt has no tokens")
        return ids

    def _messages(self, row: Mapping[str, Any]) -> Any:
        """The chat messages that a row asks; None for text and for ids."""
        value = row.get(self._column)
        if row.get("prompt_ids") is not None or value is None:
            return None
        if isinstance(value, str):
            return [{"role": "user", "content": value}] if self.settings.chat else None
        return value

    def _scan(self) -> list[int] | None:
        """Numbers of the usable rows, or None if every row is; counts the others in `dropped`."""
        if self.source.num_rows is None:
            if self.settings.may_drop:
                raise DataError(
                    f"{self.source.name} is unbounded: no row can be dropped, since their count is unknown",
                    fix="on_too_long='left' or 'error' and on_missing='error', or a source without such rows",
                )
            return None
        if not (self.settings.limits_length or self._required or self.settings.may_drop):
            return None
        kept: list[int] = []
        for number in range(self.source.num_rows):
            if reason := self._unusable(number):
                self.dropped[reason] += 1
            else:
                kept.append(number)
        return kept if self.dropped else None

    def _unusable(self, number: int) -> str | None:
        """Why a row is left out; None for a usable one."""
        row = self.source[number]
        if missing := self._missing_column(row):
            if self.settings.on_missing == "error":
                raise self._missing_error(number, missing)
            return f"without {missing!r}"
        limit = self.settings.max_prompt_tokens
        if not self.settings.limits_length or limit is None or (length := len(self._encode(number, row))) <= limit:
            return None
        if self.settings.on_too_long == "error":
            raise self._too_long_error(number, length)
        return _TOO_LONG

    def _missing_column(self, row: Mapping[str, Any]) -> str | None:
        if row.get(self._column) is None and row.get("prompt_ids") is None:
            return self._column
        return next((column for column in self._required if row.get(column) is None), None)

    def _missing_error(self, number: int, column: str) -> DataError:
        return DataError(
            f"{self.source.place(number)} has no value in column {column!r}",
            fix="give it one, or leave such rows out with on_missing='drop'",
        )

    def _too_long_error(self, number: int, length: int) -> DataError:
        limit = self.settings.max_prompt_tokens
        return DataError(
            f"{self.source.place(number)}: the prompt is too long: {length} > {limit} tokens",
            fix=f"max_prompt_tokens={length}, or on_too_long='drop' or 'left'",
        )

    def _counts(self) -> str:
        """``12 rows``, or ``3 usable of 12 rows (9 dropped: 7 too long, 2 without 'answer')``."""
        total = f"{self.source.num_rows} row{'s' * (self.source.num_rows != 1)}"
        num_dropped = self.dropped.total()
        if not num_dropped:
            return total
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        return f"{(self.source.num_rows or 0) - num_dropped} usable of {total} ({num_dropped} dropped: {reasons})"

    def _refuse_too_few(self, num_rows: int | None) -> None:
        batch = self.settings.batch
        if num_rows is None or num_rows >= batch or (num_rows and self.settings.last != "drop"):
            return
        counts = self._counts() if self.dropped else f"{num_rows} usable of {self._counts()}"
        raise DataError(
            f"{self.source.name}: {counts}, batch needs {batch}",
            fix="more rows, a smaller batch, or last='short' or 'wrap'" if num_rows else "rows that the policies keep",
        )


def _is_text_or_chat(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(turn, Mapping) for turn in value)


def _prompt_column(source: Source, wanted: str) -> str:
    """The column of the prompt, checked to exist."""
    if wanted == "prompt":
        wanted = next((name for name in ("prompt", "messages", "prompt_ids") if name in source.columns), "prompt")
    _check_columns(source, [wanted])
    if taken := [name for name in ("prompt_messages", "prompt_row") if name in source.columns]:
        raise DataError(
            f"{source.name} has a column {taken[0]!r}, which flowrl writes itself",
            fix=f"rename or remove the source's own column {taken[0]!r}",
        )
    if wanted not in _MADE and "prompt" in source.columns:
        raise DataError(
            f"{source.name}: the text of {wanted!r} becomes the column 'prompt', but the source has one already",
            fix="rename or remove the source's own column 'prompt'",
        )
    return wanted


def _check_columns(source: Source, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in source.columns:
            raise DataError(
                f"{source.name} has no column {column!r}",
                found=", ".join(source.columns) or "no columns",
                fix=did_you_mean(column, source.columns),
            )

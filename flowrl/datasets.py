"""Data sets of answers in the layouts that others publish, as the columns that `fl.responses` reads.

Each function takes whatever `fl.prompts` takes, and gives a source for it::

    train, held_out = datasets.split(datasets.pairs("dpo_en_demo.json"), held_out=50)
    samples = fl.responses(policy, fl.prompts(train, batch=16), columns={"chosen": 1, "rejected": -1})

| layout | columns |
|---|---|
| TRL | ``prompt`` (text or messages), ``chosen``, ``rejected``; or both hold the prompt; or ``completion``, ``label`` |
| LLaMA-Factory, ShareGPT | ``conversations`` or ``messages`` with ``chosen`` and ``rejected``, or with ``label`` |
| Alpaca | ``instruction``, ``input``, and ``chosen`` and ``rejected``, or ``output`` |
| HH-RLHF | ``chosen`` and ``rejected``, two transcripts of one conversation |

Turns are ``{"role", "content"}`` or ``{"from", "value"}``; a column ``system`` goes in front. Other columns stay. Rows
are read when they are needed, and an error names the row's own file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from .dialogues import as_messages, to_transcript
from .errors import DataError
from .layouts import READ, Row, as_answer, as_labelled, as_pair
from .seeds import mix
from .sources import Source, open_source


def pairs(data: object) -> Source:
    """Rows of a prompt and two answers, of which one is better: ``prompt``, ``chosen``, ``rejected``.

    Raises:
        DataError: `data` cannot be opened, or its first row is of no known layout.
    """
    return _mapped(open_source(data), ("prompt", "chosen", "rejected"), as_pair)


def answers(data: object, *, turns: Literal["last", "all"] = "last") -> Source:
    """Rows of a prompt and an answer: ``prompt``, ``answer``. Of pairs the chosen one.

    Args:
        turns: of a conversation the last turn is the answer, or all of the assistant's are (``"all"``: the prompt ends
            before the first one).

    Raises:
        DataError: `data` cannot be opened, or its first row is of no known layout.
    """
    return _mapped(open_source(data), ("prompt", "answer"), lambda row: as_answer(row, turns))


def labelled(data: object) -> Source:
    """Rows of a prompt, an answer and whether it is good: ``prompt``, ``answer``, ``label``, ``mismatched``.

    A pair makes two rows. ``mismatched`` is an answer that belongs to another prompt, that of the next row with one:
    what the KL baseline of KTO is measured on (Ethayarajh et al. 2024, arXiv:2402.01306).

    Raises:
        DataError: `data` cannot be opened, its first row is of no known layout, or all rows have one prompt.
    """
    source = open_source(data)
    if {"chosen", "rejected"} <= set(source.columns):
        source = _both_sides(pairs(source))
    rows = _mapped(source, ("prompt", "answer", "label"), as_labelled)

    def get(number: int) -> Row:
        row = rows[number]
        return {**row, "mismatched": _of_another_prompt(rows, number, row["prompt"])}

    made = Source(**{**_fields(rows), "columns": (*rows.columns, "mismatched"), "get": get})
    made[0]
    return made


def split(data: object, *, held_out: int) -> tuple[Source, Source]:
    """Rows to train on, and `held_out` others. Which ones is a function of the number of rows alone.

    Raises:
        DataError: there are not more than `held_out` rows, or `held_out` is no count.
    """
    source = open_source(data)
    is_count = type(held_out) is int and held_out >= 1
    if not is_count or (source.num_rows is not None and source.num_rows <= held_out):
        raise DataError(
            f"{source.name} cannot be split",
            found=f"{source.num_rows} rows, held_out={held_out}",
            wanted="a count of rows, and more rows than that",
            fix="hold fewer rows out: --held-out N, or held_out=N",
        )
    if source.num_rows is None:  # without end: the first rows are held out
        return _taken(source, None, lambda row: row + held_out), _taken(source, held_out, lambda row: row)
    order = sorted(range(source.num_rows), key=lambda row: mix(0, row))
    train, held = sorted(order[held_out:]), sorted(order[:held_out])
    return _taken(source, len(train), train.__getitem__), _taken(source, held_out, held.__getitem__)


def as_text(data: object) -> Source:
    """The same rows with messages as transcripts (``Human:``, ``Assistant:``), for a model without a chat template.

    Raises:
        DataError: an answer has several turns.
    """
    source = open_source(data)

    def convert(row: Row) -> Row:
        if isinstance(row.get("prompt"), str):
            return row
        prompt = to_transcript(as_messages(row.get("prompt")))
        texts: Row = {
            name: _text_of(row[name]) for name in ("chosen", "rejected", "answer", "mismatched") if name in row
        }
        return {**row, **texts, "prompt": prompt}

    return _mapped(source, source.columns, convert)


# --- sources of sources


def _text_of(answer: object) -> str:
    if isinstance(answer, str):
        return f" {answer}"
    turns = as_messages(answer)
    if len(turns) > 1:
        raise DataError("an answer of several turns is no text", found=f"{len(turns)} turns", wanted="one")
    return f" {turns[0]['content']}"


def _mapped(source: Source, columns: tuple[str, ...], convert: Callable[[Row], Mapping[str, Any]]) -> Source:
    """Each row converted when it is read; the first one now."""

    def get(number: int) -> Mapping[str, Any]:
        try:
            return convert(source[number])
        except DataError as error:
            if source.place(number) not in error.problem:
                error.problem = f"{source.place(number)}: {error.problem}"
            raise

    others = tuple(name for name in source.columns if name not in columns and name not in READ)
    made = Source(**{**_fields(source), "columns": (*columns, *others), "get": get})
    made[0]
    return made


def _fields(source: Source) -> dict[str, Any]:
    return {name: getattr(source, name) for name in ("name", "columns", "num_rows", "get", "lines", "origin")}


def _taken(source: Source, num_rows: int | None, number_of: Callable[[int], int]) -> Source:
    """Some rows of a source, which stay in their places."""
    return Source(
        name=source.name,
        columns=source.columns,
        num_rows=num_rows,
        get=lambda row: source[number_of(row)],
        origin=lambda row: source.place(number_of(row)),
    )


def _both_sides(source: Source) -> Source:
    """Two rows of each pair, the chosen one first."""

    def get(number: int) -> Row:
        row = source[number // 2]
        sides = {"prompt": row.pop("prompt"), "chosen": row.pop("chosen"), "rejected": row.pop("rejected")}
        good = number % 2 == 0
        return {"prompt": sides["prompt"], "answer": sides["chosen" if good else "rejected"], "label": good, **row}

    others = tuple(name for name in source.columns if name not in ("prompt", "chosen", "rejected"))
    return Source(
        name=source.name,
        columns=("prompt", "answer", "label", *others),
        num_rows=None if source.num_rows is None else 2 * source.num_rows,
        get=get,
        origin=lambda row: source.place(row // 2),
    )


def _of_another_prompt(rows: Source, number: int, prompt: Any) -> Any:
    size = rows.num_rows
    ahead: Sequence[int] = range(number + 1, number + (1000 if size is None else size))
    for other in ahead:
        row = rows[other if size is None else other % size]
        if row["prompt"] != prompt:
            return row["answer"]
    raise DataError(
        f"{rows.name}: every row has the same prompt", wanted="answers to other prompts, for KTO's baseline"
    )

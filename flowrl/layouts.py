"""Rows of the layouts that `flowrl.datasets` names, as rows of one."""

from __future__ import annotations

from typing import Any

from .dialogues import as_messages, from_transcript, num_common, shared_text
from .errors import DataError

Row = dict[str, Any]
CONVERSATION = ("conversations", "messages")
ANSWERS = ("answer", "completion", "response", "output")
LABELS = ("label", "kto_tag")
READ = frozenset({"prompt", "chosen", "rejected", "instruction", "input", "system", *CONVERSATION, *ANSWERS, *LABELS})
"""Columns that a layout may use: they are not passed on beside what is made of them."""


def as_pair(row: Row) -> Row:
    """``prompt``, ``chosen``, ``rejected`` of a row of any layout.

    Raises:
        DataError: its layout is not known, or the answers share no prompt.
    """
    chosen, rejected = (_sided(row, name) for name in ("chosen", "rejected"))
    asked = _asked(row)
    if isinstance(chosen, str) and isinstance(rejected, str) and asked is None:
        left, right = from_transcript(chosen), from_transcript(rejected)
        if left is None or right is None:
            shared = shared_text(chosen, rejected)
            answers = chosen[len(shared) :], rejected[len(shared) :]
            if not shared or not all(map(str.strip, answers)):
                raise DataError("two texts are no prompt in common and an answer each", found=repr(chosen)[:80])
            return _made(row, prompt=shared, chosen=answers[0], rejected=answers[1])
        chosen, rejected = left, right
    if isinstance(chosen, str) or isinstance(rejected, str):
        if asked is None or type(chosen) is not type(rejected):
            raise DataError("one answer is text and the other is not, or there is no prompt", found=", ".join(row))
        return _made(row, prompt=asked, chosen=chosen, rejected=rejected)
    if chosen[0]["role"] != "assistant":  # both hold the prompt
        place = min(num_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        asked, chosen, rejected = _with_system(row, chosen[:place]), chosen[place:], rejected[place:]
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not asked:
        raise DataError("two conversations have no prompt in common", found=repr(chosen[0])[:80])
    return _made(row, prompt=asked, chosen=chosen, rejected=rejected)


def as_answer(row: Row, turns: str) -> Row:
    """``prompt``, ``answer`` of a row of any layout; the answer is the last turn, or with ``"all"`` all from the first.

    Raises:
        DataError: its layout is not known, or a conversation does not end with an answer.
    """
    if "chosen" in row:
        row = as_pair({**row, "rejected": row.get("rejected", row["chosen"])})
        return _made(row, prompt=row["prompt"], answer=row["chosen"])
    given = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    asked = _asked(row)
    if given is not None and asked is not None:
        if not isinstance(given, str):
            given = as_messages(given)
            asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return _made(row, prompt=asked, answer=given)
    if not isinstance(asked, list):
        raise _unknown(row, "answer")
    said = [number for number, turn in enumerate(asked) if turn["role"] == "assistant"]
    if not said or said[-1] != len(asked) - 1 or said[0] == 0:
        raise DataError("a conversation does not end with an answer to a prompt", found=repr(asked[-1])[:80])
    place = said[0] if turns == "all" else said[-1]
    return _made(row, prompt=asked[:place], answer=asked[place:])


def as_labelled(row: Row) -> Row:
    """``prompt``, ``answer``, ``label`` of a row of any layout.

    Raises:
        DataError: its layout is not known, or it has no label.
    """
    label = next((row[name] for name in LABELS if row.get(name) is not None), None)
    if not isinstance(label, bool):
        raise DataError("an answer has no label", found=repr(label), wanted=f"true or false in {' or '.join(LABELS)}")
    return {**as_answer(row, "last"), "label": label}


def _sided(row: Row, name: str) -> str | list[dict[str, Any]]:
    value = row.get(name)
    if value is None:
        raise _unknown(row, f"column '{name}'")
    return value if isinstance(value, str) else as_messages(value)


def _asked(row: Row) -> str | list[dict[str, Any]] | None:
    """What a row asks: text, or messages with those of its system in front."""
    asked = row.get("prompt")
    if asked is None:
        asked = next((row[name] for name in CONVERSATION if row.get(name) is not None), None)
    if asked is None and isinstance(row.get("instruction"), str):
        asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    if asked is None:
        return None
    if isinstance(asked, str):
        return asked if not row.get("system") else _with_system(row, [{"role": "user", "content": asked}])
    return _with_system(row, as_messages(asked))


def _with_system(row: Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _made(row: Row, **columns: Any) -> Row:
    return {**columns, **{name: value for name, value in row.items() if name not in READ}}


def _unknown(row: Row, what: str) -> DataError:
    wanted = "one of the layouts in the documentation of flowrl.datasets"
    return DataError(f"a row has no {what}", found=f"columns {', '.join(row)}", wanted=wanted)

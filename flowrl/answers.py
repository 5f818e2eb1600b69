"""Answers that were given rather than sampled, as the ids that a model would have had to sample.

Ids are the truth: whoever trains on an answer trains on the prompt's own ids followed by these. So an answer is
tokenized *behind* its prompt, and where a chat template does not continue the prompt's ids that is an error, never a
prompt that silently differs from the one that is trained on or sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from .backend import Tokenizer
from .dialogues import num_common
from .errors import DataError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids of an answer, the end-of-sequence id included."""

    ids: list[int]
    """[tokens]."""
    mask: list[bool]
    """[tokens] true where the assistant wrote: everything, except between the turns of an answer of several."""


def encode_answer(tokenizer: Tokenizer, prompt: str | Sequence[Message], answer: object) -> Answer:
    """Tokenize an answer behind its prompt.

    Args:
        tokenizer: of the model that trains on it.
        prompt: the text, or the chat messages, that it answers.
        answer: text; to messages also a message, or a list of messages that starts and ends with the assistant's.

    Raises:
        DataError: it is no answer, the chat template does not continue the prompt's ids, or the tokenizer has no
            end-of-sequence id.
    """
    if isinstance(prompt, str):
        return _to_text(tokenizer, prompt, answer)
    return _to_chat(tokenizer, prompt, _turns(answer))


def _to_text(tokenizer: Tokenizer, prompt: str, answer: object) -> Answer:
    if not isinstance(answer, str):
        fix = "fl.prompts(..., chat=True), or a prompt that is a list of messages, goes through the chat template"
        raise DataError("the answer to a text is no text", found=repr(answer)[:80], wanted="text", fix=fix)
    before, together = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
    # Where a token would span the border, the answer is tokenized on its own: the prompt's ids stay what they are.
    ids = together[len(before) :] if num_common(before, together) == len(before) else tokenizer.encode_text(answer)
    return Answer([*ids, _end(tokenizer)], [True] * (len(ids) + 1))


def _to_chat(tokenizer: Tokenizer, prompt: Sequence[Message], turns: Sequence[Message]) -> Answer:
    before = tokenizer.encode_chat(prompt)
    whole = tokenizer.encode_chat([*prompt, *turns], generation_prompt=False, behind=prompt)
    _expect_prefix(before, whole, "the prompt")
    ids = _without_tail(tokenizer, whole[len(before) :])
    ended = ids if ids and ids[-1] in tokenizer.eos_ids else [*ids, _end(tokenizer)]
    if len(turns) == 1:
        return Answer(ended, [True] * len(ended))
    marked = tokenizer.written([*prompt, *turns])
    mask = _by_turns(tokenizer, prompt, turns, whole) if marked is None else marked
    written = mask[len(before) : len(before) + len(ids)]
    # The end-of-sequence id of a turn is the assistant's too, whether or not the template marks it.
    for place, token in enumerate(ids):
        written[place] |= place > 0 and written[place - 1] and token in tokenizer.eos_ids
    return Answer(ended, [*written, *[True] * (len(ended) - len(ids))])


def _by_turns(
    tokenizer: Tokenizer, prompt: Sequence[Message], turns: Sequence[Message], whole: Sequence[int]
) -> list[bool]:
    """[whole] what each turn of the assistant adds to the messages before it."""
    mask = [False] * len(whole)
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        said = [*prompt, *turns[:number]]
        start = tokenizer.encode_chat(said)
        end = tokenizer.encode_chat([*said, turn], generation_prompt=False)
        _expect_prefix(start, whole, f"turn {number + 1} of the answer")
        _expect_prefix(end, whole, f"turn {number + 1} of the answer")
        own = len(_without_tail(tokenizer, end[len(start) :]))
        mask[len(start) : len(start) + own] = [True] * own
    return mask


def _without_tail(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Without what a template writes behind the last end-of-sequence id (a line break): nobody would sample that."""
    ends = [place for place, token in enumerate(ids) if token in tokenizer.eos_ids]
    if not ends or tokenizer.decode(ids[ends[-1] + 1 :]).strip():
        return ids
    return ids[: ends[-1] + 1]


def _turns(answer: object) -> list[Message]:
    """An answer as messages."""
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    turns: object = [message] if isinstance(message, Mapping) else message
    if not _are_messages(turns):
        wanted = "text, a message with 'role' and 'content', or a list of messages"
        raise DataError("an answer is neither text nor messages", found=repr(answer)[:80], wanted=wanted)
    for turn, place in ((turns[0], "first"), (turns[-1], "last")):
        if turn["role"] != "assistant":
            wanted = "turns that start and end with 'assistant'"
            raise DataError(f"the {place} turn of an answer is not the assistant's", found=turn["role"], wanted=wanted)
    return list(turns)


def _are_messages(turns: object) -> TypeGuard[Sequence[Message]]:
    if not isinstance(turns, Sequence) or not turns:
        return False
    return all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in turns)


def _end(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_id is None:
        fix = "a tokenizer with an eos_token: an answer without an end teaches a model never to stop"
        raise DataError("the tokenizer has no end-of-sequence id to put behind an answer", fix=fix)
    return tokenizer.eos_id


def _expect_prefix(before: Sequence[int], whole: Sequence[int], what: str) -> None:
    place = num_common(before, whole)
    if place < len(before):
        raise DataError(
            f"the chat template does not continue the ids of {what}: they differ at position {place}",
            found=f"{list(whole[place : place + 4])} with the answer",
            wanted=f"{list(before[place : place + 4])}, as in {what} alone",
            fix="a template whose generation prompt is what an assistant's turn starts with, and that rewrites no "
            "earlier turn",
        )

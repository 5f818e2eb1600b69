"""Chat messages in the layouts that data sets have, as messages with ``role`` and ``content``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError, did_you_mean

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""By what ShareGPT's and others' ``from`` says."""
_TURN = re.compile(r"\n\n(Human|Assistant):")


def as_message(value: object) -> Message:
    """A message from ``{"role", "content", ...}`` or ``{"from", "value"}``.

    Raises:
        DataError: it is neither, or its role is unknown.
    """
    if isinstance(value, Mapping) and isinstance(value.get("role"), str):
        return dict(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("from"), str) or "value" not in value:
        wanted = "{'role': ..., 'content': ...} or {'from': ..., 'value': ...}"
        raise DataError("a turn of a conversation is no message", found=repr(value)[:80], wanted=wanted)
    if value["from"] not in ROLES:
        fix = did_you_mean(value["from"], ROLES)
        raise DataError("a turn is from nobody that is known", found=value["from"], wanted=", ".join(ROLES), fix=fix)
    return {"role": ROLES[value["from"]], "content": value["value"]}


def as_messages(value: object) -> list[Message]:
    """Messages from a list of them, or from one.

    Raises:
        DataError: one is none.
    """
    if isinstance(value, Mapping):
        return [as_message(value)]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError("a conversation is no list of messages", found=repr(value)[:80], wanted="one message or more")
    return [as_message(turn) for turn in value]


def from_transcript(text: str) -> list[Message] | None:
    """Messages of ``\\n\\nHuman: ...\\n\\nAssistant: ...``, as HH-RLHF writes them (Bai et al. 2022, arXiv:2204.05862).

    White space around each turn is no part of it. None for a text that does not start with such a turn.
    """
    turns = list(_TURN.finditer(text))
    if not turns or text[: turns[0].start()].strip():
        return None
    ends = [*(turn.start() for turn in turns[1:]), len(text)]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[turn[1]], "content": text[turn.end() : end].strip()}
        for turn, end in zip(turns, ends, strict=True)
    ]


def to_transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as a text that an assistant goes on with: the inverse of `from_transcript`, for a model without a chat
    template. Other roles than the user's and the assistant's stand under their own name."""
    names = {"user": "Human", "assistant": "Assistant"}
    turns = [f"\n\n{names.get(turn['role'], turn['role'].title())}: {turn['content']}" for turn in messages]
    return "".join(turns) + "\n\nAssistant:"


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many turns two conversations, characters two texts or ids two lists have in common at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def shared_text(one: str, other: str) -> str:
    """What two texts have in common at their start, up to the last word that both have whole.

    White space at the border belongs to what follows.
    """
    shared = one[: num_common(one, other)]
    whole = all(rest[:1].isspace() or not rest for rest in (one[len(shared) :], other[len(shared) :]))
    if not whole and not shared[-1:].isspace():
        shared = shared[: -len(shared.split()[-1])] if shared.split() else ""
    return shared.rstrip()

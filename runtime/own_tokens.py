"""Samples in the tokens of a model that did not sample them: text in, its own ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.backend import Tokenizer
from flowrl.errors import LengthError, Location
from flowrl.rows import Column, Key, Ragged, Rows


def in_own_tokens(
    tokenizer: Tokenizer, keys: Sequence[Key], columns: Mapping[str, Column], *, max_length: int | None, at: Location
) -> Rows:
    """Rows that a reward model reads: all of a sample as its prompt, followed by nothing.

    Args:
        tokenizer: of the model that reads.
        columns: ``prompt`` and ``response`` text, ``prompt_messages`` (None where text was asked), ``stop``.
        max_length: most tokens that it reads.
        at: the line of its node, for errors.

    Raises:
        LengthError: a sample has more tokens.
    """
    each = zip(
        keys, columns["prompt"], columns["prompt_messages"], columns["response"], columns["stop"], strict=True
    )  # fmt: skip
    ids = []
    for key, prompt, messages, response, stop in each:
        whole = _encode(tokenizer, messages or prompt, response, ended=stop == "eos")
        if max_length is not None and len(whole) > max_length:
            raise LengthError(
                f"prompt and response of {key} are longer than the model that scores them takes",
                at=at,
                found=f"{len(whole)} of its tokens",
                wanted=f"at most {max_length}",
                fix="lower max_new_tokens= or max_prompt_tokens=",
            )
        ids.append(whole)
    none = Ragged(np.zeros(0, np.int32), np.zeros(len(ids) + 1, np.int64))
    return Rows(keys, {"prompt_ids": Ragged.pack(ids, "int32"), "response_ids": none})


def _encode(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], response: str, *, ended: bool
) -> list[int]:
    """A chat goes through the template to its end; a text is tokenized once, and ends as the response did."""
    if not isinstance(prompt, str):
        turn = {"role": "assistant", "content": response}
        return tokenizer.encode_chat([*prompt, turn], generation_prompt=False)
    ids = tokenizer.encode(prompt + response)
    return [*ids, tokenizer.eos_id] if ended and tokenizer.eos_id is not None else ids

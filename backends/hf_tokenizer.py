"""The one owner of special tokens of a Hugging Face model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from flowrl.errors import BackendError

from .chat import check_prompt_ids, text_behind

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark in a chat template around what the assistant wrote."""


class HFTokenizer:
    """Text to ids and back; see `flowrl.backend.Tokenizer`."""

    def __init__(self, folder: Path) -> None:
        self.wrapped: Any = AutoTokenizer.from_pretrained(folder)
        self.eos_ids = _eos_ids(folder, self.wrapped.eos_token_id)
        self.num_ids = len(self.wrapped)
        own: int | None = self.wrapped.eos_token_id
        self.eos_id = min(self.eos_ids, default=None) if own is None else own

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids with special tokens; messages go through the chat template, which writes its own.

        Raises:
            BackendError: messages, and the tokenizer has no chat template.
        """
        if not isinstance(prompt, str):
            return self.encode_chat(prompt)
        ids = self._ids(prompt, special=True)
        if len(ids) > 1 and ids[-1] in self.eos_ids and self._ids(prompt, special=False)[-1:] != ids[-1:]:
            ids = ids[:-1]  # a prompt that the tokenizer ends has nothing to continue
        return self._without_second_bos(ids)

    def encode_text(self, text: str) -> list[int]:
        """Ids without any special token."""
        return self._ids(text, special=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        behind: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of messages through the chat template; see `flowrl.backend.Tokenizer`.

        Raises:
            BackendError: the tokenizer has no chat template.
        """
        text: str = self._chat(messages, tokenize=False, add_generation_prompt=generation_prompt)
        ids = self._without_second_bos(self._ids(text, special=False))
        if behind is None:
            return ids
        start, before = self._chat(behind, tokenize=False, add_generation_prompt=True), self.encode_chat(behind)
        if ids[: len(before)] == before or not text.startswith(start):
            return ids
        return [*before, *self._ids(text[len(start) :], special=False)]

    def written(self, messages: Sequence[Mapping[str, Any]]) -> list[bool] | None:
        """By the ``{% generation %}`` blocks of the chat template; None for a template without."""
        template = self.wrapped.chat_template
        if not isinstance(template, str) or not _GENERATION.search(template):
            return None
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._chat(messages, add_generation_prompt=False, **options)
        marks = [bool(mark) for mark in found["assistant_masks"]]
        ids = self.encode_chat(messages, generation_prompt=False)
        return marks[len(marks) - len(ids) :]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text, special tokens left out unless asked for."""
        text: str = self.wrapped.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def encode_reply(
        self,
        prompt: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        turns: Sequence[Mapping[str, Any]],
        response_ids: Sequence[int],
    ) -> list[int]:
        """Ids of what the chat template puts behind the record."""
        check_prompt_ids(prompt_ids, self.encode(prompt))
        asked = len(self.decode(prompt_ids, special=True))

        def text_of(num_ids: int) -> str:
            # behind the prompt: some tokenizers treat the start of a text in a way of their own
            return self.decode([*prompt_ids, *response_ids[:num_ids]], special=True)[asked:]

        before, whole = (
            self._chat(messages, tokenize=False, add_generation_prompt=True) for messages in (prompt, [*prompt, *turns])
        )
        return self.encode_text(text_behind(whole, before, len(prompt_ids), len(response_ids), text_of))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self.wrapped.save_pretrained(folder)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.wrapped(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        if not self.wrapped.chat_template:
            raise BackendError(
                "a prompt is a list of chat messages, and the tokenizer has no chat template",
                found=self.wrapped.name_or_path,
                fix="give prompts as text, or a model folder with chat_template.jinja",
            )
        return self.wrapped.apply_chat_template([dict(message) for message in messages], **options)

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        """Text from a template that wrote the beginning-of-sequence token already gets it a second time."""
        bos = self.wrapped.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """The tokenizer's id with those of ``config.json`` and ``generation_config.json``, each a number or a list."""
    found: list[Any] = [tokenizer_eos]
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        config = json.loads(path.read_text()) if path.is_file() else {}
        found += [config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")]
    ids = [id for item in found for id in (item if isinstance(item, list) else [item])]
    return frozenset(id for id in ids if id is not None)

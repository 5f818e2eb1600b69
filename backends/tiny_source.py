"""A tiny model's text and files; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.backend import ModelFacts
from flowrl.errors import BackendError, did_you_mean

from .chat import check_prompt_ids, text_behind

BOS, EOS = 256, 257
"""After the 256 bytes."""
VOCAB_SIZE = 258
CONFIG_FILE = "tiny.json"


class TinyTokenizer:
    """One id a byte of UTF-8, after one `BOS`; see `flowrl.backend.Tokenizer`."""

    eos_ids = frozenset({EOS})
    eos_id: int | None = EOS
    num_ids = VOCAB_SIZE

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a text, or of messages."""
        return [BOS, *self.encode_text(prompt)] if isinstance(prompt, str) else self.encode_chat(prompt)

    def encode_text(self, text: str) -> list[int]:
        """Bytes."""
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        behind: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Messages, each on a line as ``role: content``; `EOS` stands behind what an assistant said."""
        ids = [BOS]
        for message in messages:
            end = [EOS] if message["role"] == "assistant" else []
            ids += [*f"{message['role']}: {message['content']}".encode(), *end, *b"\n"]
        return [*ids, *b"assistant: "] if generation_prompt else ids

    def written(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Nothing is marked."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD. Special tokens have no text."""
        return bytes(id for id in ids if id < BOS).decode(errors="replace")

    def encode_reply(
        self,
        prompt: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        turns: Sequence[Mapping[str, Any]],
        response_ids: Sequence[int],
    ) -> list[int]:
        """The lines that follow the response, and before them its `EOS` where a stop string has ended it."""
        check_prompt_ids(prompt_ids, self.encode(prompt))
        whole, before = (self.decode(self.encode(messages)) for messages in ([*prompt, *turns], prompt))
        num = len(response_ids)
        rest = text_behind(whole, before, len(prompt_ids), num, lambda num_ids: self.decode(response_ids[:num_ids]))
        return [*([] if response_ids[-1:] == [EOS] else [EOS]), *self.encode_text(rest)]


def describe(source: str) -> ModelFacts:
    """The same for every tiny model.

    Raises:
        BackendError: a path without a tiny model.
    """
    find_folder(source)
    return ModelFacts(max_length=None, num_heads=None, num_layers=None, vocab_size=VOCAB_SIZE, vocabulary=_vocabulary)


def _vocabulary() -> dict[str, int]:
    return {**{f"byte {number}": number for number in range(BOS)}, "<bos>": BOS, "<eos>": EOS}


def find_folder(source: str) -> Path | None:
    """The folder that a source names, or None for a plain name.

    Raises:
        BackendError: a path without a tiny model.
    """
    if "/" not in source and not Path(source).is_dir():
        return None
    folder = Path(source)
    if not (folder / CONFIG_FILE).is_file():
        near = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise BackendError(
            f"there is no tiny model '{source}' here",
            found=f"no {folder / CONFIG_FILE}",
            wanted="a name such as 'tiny', or a folder that a tiny model was saved to",
            fix=did_you_mean(folder.name, [name for name in near if name != folder.name]),
        )
    return folder

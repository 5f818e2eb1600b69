"""Where a model's files are, and what its configuration says; without torch."""

from __future__ import annotations

import importlib.resources
import json
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flowrl.backend import ModelFacts
from flowrl.errors import BackendError, did_you_mean

BUILTIN = "builtin:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONFIG, _WEIGHTS = ["*.json", "*.jinja", "*.model", "*.txt"], ["*.safetensors"]
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What configurations call their longest sequence; so too for heads and layers below."""
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def find_model(source: str, *, weights: bool = False) -> Path:
    """The folder of a model: a path, ``builtin:NAME``, or a hub id that is downloaded unless it is in the cache.

    Args:
        weights: also fetch a hub model's weights, not only its configuration and tokenizer.

    Raises:
        BackendError: there is no such model; names near ones.
    """
    if source.startswith(BUILTIN):
        return _existing(_builtin_folder() / source.removeprefix(BUILTIN), source)
    folder = Path(source).expanduser()
    if folder.is_dir() or not _HUB_ID.fullmatch(source) or (folder.parent != Path() and folder.parent.is_dir()):
        return _existing(folder, source)
    return _from_hub(source, _CONFIG + (_WEIGHTS if weights else []))


def describe(source: str) -> ModelFacts:
    """Read a model's ``config.json``.

    Raises:
        BackendError: there is no such model here.
    """
    folder = find_model(source)
    config = read_config(folder)
    text: dict[str, Any] = config | (config.get("text_config") or {})
    return ModelFacts(
        max_length=_first(text, _LENGTHS),
        num_heads=_first(text, _HEADS),
        num_layers=_first(text, _LAYERS),
        vocab_size=_first(text, ("vocab_size",)),
        vocabulary=partial(read_vocabulary, folder),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@lru_cache(maxsize=8)
def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """The id of every token, those that were added included, by the files of a fast tokenizer or of a BPE; None for a
    folder with neither."""
    fast, plain = _json(folder / "tokenizer.json"), _json(folder / "vocab.json")
    if fast is None and plain is None:
        return None
    tokens = plain or {}
    if fast is not None:
        vocabulary = fast["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score, by id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        tokens = {**vocabulary, **{added["content"]: added["id"] for added in fast.get("added_tokens") or ()}}
    decoder = (_json(folder / "tokenizer_config.json") or {}).get("added_tokens_decoder") or {}
    added = {token["content"]: int(number) for number, token in decoder.items() if "content" in token}
    return {**tokens, **(_json(folder / "added_tokens.json") or {}), **added}


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _existing(folder: Path, source: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise BackendError(
            f"model '{source}' is a folder without a config.json",
            found=", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder",
            wanted="a Hugging Face model folder",
        )
    near = sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) if folder.parent.is_dir() else []
    near = [name for name in near if not name.startswith(("_", "."))]
    raise BackendError(
        f"there is no model '{source}' here",
        found=f"no folder {folder}" if folder.parent.is_dir() else f"no folder {folder.parent}",
        wanted="a Hugging Face model folder, a hub id, or builtin:NAME",
        fix=did_you_mean(folder.name, near) or (f"its neighbours are: {', '.join(near[:8])}" if near else None),
    )


def _from_hub(source: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    for offline in (True, False):
        try:
            folder = Path(snapshot_download(source, allow_patterns=patterns, local_files_only=offline))
        except Exception as error:  # offline, refused, unknown: each its own class, and all mean that it is not here
            reason = error
            continue
        if "*.safetensors" not in patterns or list(folder.glob("*.safetensors")):
            return _existing(folder, source)
        reason = FileNotFoundError("no .safetensors file")
    raise BackendError(
        f"model '{source}' is neither a folder here nor to be had from the hub",
        found=f"{type(reason).__name__}: {str(reason).strip().splitlines()[0] if str(reason).strip() else ''}",
        wanted="a Hugging Face model folder, a hub id, or builtin:NAME",
        fix=did_you_mean(source, [path.name for path in Path().iterdir() if path.is_dir()]),
    ) from reason


def _builtin_folder() -> Path:
    return Path(str(importlib.resources.files("flowrl.graphs") / "warm_start"))


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)

"""A Hugging Face model as a `Network`: its loading, its hidden states and its KV cache."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.cache_utils import DynamicLayer

from flowrl.errors import BackendError
from flowrl.model import Head

from .batch import SharedPrompts
from .hf_cache import HFDecoder, PrefixLayer, RoomyLayer
from .hf_source import describe


def load_module(folder: Path, head: Head, dtype: torch.dtype) -> nn.Module:
    """Read a model in a dtype, on the CPU.

    A head of one value that the folder does not hold starts as zeros: the same on every rank, and no value is better
    known than another.

    Raises:
        BackendError: the folder lacks weights, other than those of a ``value`` or ``score`` head, or has some of
            another size, such as the head of a classifier of several labels.
    """
    factory: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    labels = {} if head == "lm" else {"num_labels": 1}
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet():
        module, info = factory.from_pretrained(folder, dtype=dtype, **told, **labels)
    _refuse_other_sizes(folder, info["mismatched_keys"])
    missing = sorted(info["missing_keys"])
    if head != "lm" and missing == ["score.weight"]:
        nn.init.zeros_(module.score.weight)
        missing = []
    if missing:
        raise BackendError(
            f"model folder {folder} lacks weights of {type(module).__name__}",
            found=f"no {', '.join(missing[:8])}",
            wanted="every weight that the configuration asks for",
        )
    return cast(nn.Module, module)


def _refuse_other_sizes(folder: Path, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Weights of another size would be left out, and those of this run made up."""
    sizes = [(name, list(held), list(wanted)) for name, held, wanted in sorted(mismatched)]
    if sizes:
        heads = [name for name, _, _ in sizes if name.startswith("score.")]
        raise BackendError(
            f"model folder {folder} has {'a head' if heads else 'weights'} of another size",
            found=", ".join(f"{name}: {held}" for name, held, _ in sizes[:8]),
            wanted=", ".join(f"{name}: {wanted}" for name, _, wanted in sizes[:8])
            + (", a linear layer of one output" if heads else ""),
        )


class HFNetwork:
    """See `network.Network`."""

    def __init__(self, module: nn.Module, head: Head, source: str) -> None:
        self.module, self.head = module, head
        self._any = cast(Any, module)
        self._base: Any = self._any.base_model
        self._config: Any = self._any.config.get_text_config()
        self.vocab_size: int = self._config.vocab_size
        self.max_length = describe(source).max_length
        # transformers renamed the parameter within version 5
        parameters = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        # whether every layer attends to all that came before, by one ready-made mask
        layers = DynamicCache(config=self._config).layers
        plain = all(type(layer) is DynamicLayer for layer in layers)
        self.shares_prompts = plain and self._config._attn_implementation == "sdpa"
        self.cache_bytes = _cache_bytes(self._config, next(module.parameters()).element_size())
        if head == "lm":
            self._output: Any = self._any.get_output_embeddings()
            self._softcap: float | None = getattr(self._config, "final_logit_softcapping", None)
            self._scale = _logit_scale(self._config)
            self._check_logits()
        elif not isinstance(getattr(module, "score", None), nn.Linear):
            name = type(module).__name__
            raise BackendError(f"backend 'hf' has no head '{head}' for {name}", wanted="a linear layer 'score'")

    def states(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """[wanted, width]. Padding stands on the right, where the causal mask hides it; no mask or positions needed."""
        hidden: Tensor = self._base(input_ids=ids, use_cache=False)[0]
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows * ids.shape[1] + positions)

    def shared_states(self, shared: SharedPrompts, rows: Tensor, tokens: Tensor) -> Tensor:
        """[wanted, width]. Gradients flow back through the keys and values of a prompt from each of its rows."""
        cache: Any = DynamicCache(config=self._config)
        cache.layers = [PrefixLayer(shared) for _ in range(self._config.num_hidden_layers)]
        num_prompts, longest = shared.prompts.shape
        num_tokens = shared.responses.shape[1]
        columns = torch.arange(max(longest, num_tokens), device=rows.device)
        prompts = self.read(shared.prompts, columns[None, :longest], None, cache)
        last = torch.arange(num_prompts, device=rows.device) * longest + shared.lengths - 1
        states = shared.to_rows(prompts.reshape(num_prompts * longest, -1).index_select(0, last))
        if not num_tokens:
            return states.index_select(0, rows)
        start = shared.to_rows(shared.lengths)[:, None] if shared.padded else longest
        mask = self._after_prompts(shared, columns)
        responses = self.read(shared.responses, columns[None, :num_tokens] + start, mask, cache)
        states = torch.cat([states[:, None], responses], 1)  # by the response token that each one predicts
        return states.reshape(-1, states.shape[-1]).index_select(0, rows * (num_tokens + 1) + tokens)

    def logits(self, states: Tensor) -> Tensor:
        """[wanted, vocabulary]."""
        logits: Tensor = self._output(states)[..., : self.vocab_size]
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def values(self, states: Tensor) -> Tensor:
        """[wanted] float32."""
        values: Tensor = self._any.score(states)[..., 0]
        return values if values.dtype == torch.float64 else values.float()

    def decoder(self, ids: Tensor, lengths: Tensor, num_samples: int, num_new: int) -> HFDecoder:
        """Read the prompts once."""
        return HFDecoder(self, ids, lengths, num_samples, num_new)

    def read(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """[rows, tokens, width] states of the next tokens, which are added to the cache."""
        remembered = {self._cache_name: cache}
        hidden: Tensor = self._base(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **remembered
        )[0]
        return hidden

    def new_cache(self, num_new: int) -> Any:
        """An empty cache."""
        cache = DynamicCache(config=self._config)
        if self.shares_prompts:
            cache.layers = [RoomyLayer(num_new) for _ in range(self._config.num_hidden_layers)]
        return cache

    def _after_prompts(self, shared: SharedPrompts, columns: Tensor) -> Tensor:
        """[rows or 1, 1, response tokens, prompt and response tokens] bool: the row's prompt, and what came before."""
        longest, num_tokens = shared.prompts.shape[1], shared.responses.shape[1]
        before = columns[:num_tokens] <= columns[:num_tokens, None]
        if not shared.padded:
            return torch.nn.functional.pad(before, (longest, 0), value=True)[None, None]
        prompt = shared.to_rows(columns[:longest] < shared.lengths[:, None])
        shape = (len(prompt), 1, num_tokens)
        return torch.cat([prompt[:, None, None].expand(*shape, longest), before.expand(*shape, num_tokens)], -1)

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Some models do more to their logits than this class knows; find out now, not by a ratio that is off."""
        device = next(self.module.parameters()).device
        ids = torch.arange(min(4, self.vocab_size), device=device)[None]
        wanted = self._any(input_ids=ids, use_cache=False).logits[..., : self.vocab_size].float()
        found = self.logits(self._base(input_ids=ids, use_cache=False)[0]).float()
        if not torch.allclose(found, wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max()), equal_nan=True):
            raise BackendError(
                f"{type(self.module).__name__} changes its logits in a way that backend 'hf' does not know",
                found=f"a difference of {float((found - wanted).abs().max()):.3g}",
                wanted="logits = head(states), scaled or soft-capped",
            )


def _cache_bytes(config: Any, element_size: int) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(width) * element_size


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    scale = getattr(config, "logit_scale", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    assert math.isfinite(scale / scaling)
    return float(scale / scaling)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, and no table of new heads while a model loads: what is missing is checked here."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

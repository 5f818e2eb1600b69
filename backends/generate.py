"""The decoding loop: all rows of a call advance together, and each is given away when it ends.

Prompts are read once and shared by their samples. Rows that have ended stay in the batch, ignored, until they are a
quarter of it; then the others move together. Neither changes what a row samples (see `sampling`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowrl.backend import Prompt, Response, Sampling, StopReason, Tokenizer
from flowrl.errors import LengthError, NodeError
from flowrl.rows import PROMPT, Key

from .network import Network
from .sampling import choose, choose_likeliest, row_seeds, uniforms
from .stop_strings import StopStrings

COMPACT_AT = 0.25
"""Share of ended rows above which the others move together: copying the cache costs about one step of what it saves."""
CPU_BYTES = 4 << 30
"""Most memory for caches and logits on a CPU; on a GPU it is half of what is free."""
SAMPLER_BYTES = 32
"""For each row and vocabulary entry: logits, their float32 and float64 forms, and what sorting them needs."""


def generate(
    network: Network, tokenizer: Tokenizer, prompts: Sequence[Prompt], sampling: Sampling, seed: int, version: int
) -> Iterator[list[Response]]:
    """Answer each prompt ``sampling.group_size`` times; see `flowrl.backend.Backend.generate`.

    Raises:
        LengthError: a prompt and the longest response are longer than the model.
        NodeError: a prompt has no tokens, or the model's logits are not finite.
    """
    _check_prompts(network, prompts, sampling)
    fresh = [prompt for prompt in prompts if prompt.key.sample == PROMPT]
    begun = [prompt for prompt in prompts if prompt.key.sample != PROMPT]
    for some, num_samples in ((fresh, sampling.group_size), (begun, 1)):
        for chunk in _chunks(network, some, sampling, num_samples):
            decoding = Decoding(network, tokenizer, chunk, num_samples, sampling, seed, version)
            while decoding.num_open:
                yield decoding.step()


class Decoding:
    """One batch that is being sampled. Its tensors have one row a *slot*: an open row, or one that has ended."""

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        version: int,
    ) -> None:
        self.sampling, self.version, self.tokenizer = sampling, version, tokenizer
        self._stop = StopStrings(tokenizer, sampling.stop)
        self.keys = [key for prompt in prompts for key in _keys(prompt, num_samples)]
        limits = [_limit(prompt, sampling) for prompt in prompts]
        self._longest, self._limits = max(limits), frozenset(limits)
        self.num_open = len(self.keys)
        self.position = 0
        self._device = next(network.module.parameters()).device
        with torch.inference_mode():
            self._decoder = network.decoder(*self._padded(prompts), num_samples, self._longest - 1)
            shape = (self.num_open, self._longest)
            self._ids = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._logprobs = torch.zeros(shape, dtype=torch.float32, device=self._device)
            drawn = uniforms(row_seeds(seed, self.keys), self._longest)
            self._uniforms = torch.from_numpy(drawn).to(self._device)
            self._limit = torch.tensor(limits, device=self._device).repeat_interleave(num_samples)
            self._open = torch.ones(self.num_open, dtype=torch.bool, device=self._device)
            self._ends = self._end_table(network.vocab_size)
            greedy = [key.sample >= sampling.n for key in self.keys]
            self._greedy = torch.tensor(greedy, device=self._device) if sampling.greedy else None

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """Sample one token of every open row; the rows that it ends."""
        at = self.position
        chosen, logprobs = choose(
            self._decoder.logits,
            self._uniforms[:, at],
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            min_p=self.sampling.min_p,
        )
        if self._greedy is not None:
            likeliest, most = choose_likeliest(self._decoder.logits, self.sampling.temperature)
            chosen = torch.where(self._greedy, likeliest, chosen)
            logprobs = torch.where(self._greedy, most, logprobs)
        self._ids[:, at] = chosen
        self._logprobs[:, at] = logprobs
        self.position += 1
        responses = self._finish(self._ended(chosen))
        if self.num_open:
            if len(self.keys) - self.num_open > COMPACT_AT * len(self.keys):
                chosen = chosen[self._compact()]
            self._decoder.advance(chosen)
        return responses

    def _ended(self, chosen: Tensor) -> dict[int, StopReason]:
        """Slots of the rows that end with this token, and why."""
        ended: dict[int, StopReason] = {}
        if not self.sampling.ignore_eos:
            ended = dict.fromkeys((self._ends[chosen] & self._open).nonzero()[:, 0].tolist(), "eos")
        last = self.position in self._limits
        if last or self.sampling.stop:
            still_open = [slot for slot in self._open.nonzero()[:, 0].tolist() if slot not in ended]
            ended |= dict.fromkeys(self._with_stop_string(still_open, chosen), "stop_string")
            if last:
                limits = self._limit.tolist()
                full = [slot for slot in still_open if slot not in ended and limits[slot] == self.position]
                ended |= dict.fromkeys(full, "length")
        return ended

    def _finish(self, ended: dict[int, StopReason]) -> list[Response]:
        if not ended:
            return []
        slots = torch.tensor(sorted(ended), device=self._device)
        ids = self._ids[slots, : self.position].tolist()
        logprobs = self._logprobs[slots, : self.position]
        if not torch.isfinite(logprobs).all():
            bad = int((~torch.isfinite(logprobs)).any(1).nonzero()[0])
            raise NodeError(
                f"the logits of {self.keys[sorted(ended)[bad]]} are not finite",
                found=f"log-probs {logprobs[bad].tolist()}",
                wanted="finite weights",
            )
        self._open[slots] = False
        self.num_open -= len(ended)
        return [
            Response(key=self.keys[slot], ids=row_ids, logprobs=row_logprobs, stop=ended[slot], version=self.version)
            for slot, row_ids, row_logprobs in zip(sorted(ended), ids, logprobs.tolist(), strict=True)
        ]

    def _compact(self) -> Tensor:
        """Drop the slots that have ended; those that stay."""
        stay = self._open.nonzero()[:, 0]
        self._decoder.select(stay)
        self._ids, self._logprobs = self._ids[stay], self._logprobs[stay]
        self._uniforms, self._open = self._uniforms[stay], self._open[stay]
        self._greedy = None if self._greedy is None else self._greedy[stay]
        self._limit = self._limit[stay]
        self.keys = [self.keys[slot] for slot in stay.tolist()]
        return stay

    def _with_stop_string(self, slots: Sequence[int], chosen: Tensor) -> list[int]:
        """Those of the slots whose text has a stop string, with the token that was chosen."""
        newest = chosen.tolist() if self.sampling.stop else []
        near = [slot for slot in slots if self._stop.may_end_with(newest[slot])] if newest else []
        texts = self._ids[near, : self.position].tolist() if near else []
        return [slot for slot, ids in zip(near, texts, strict=True) if self._stop.ended(ids)]

    def _end_table(self, vocab_size: int) -> Tensor:
        """[vocabulary] bool: the ids that end a response."""
        table = torch.zeros(vocab_size, dtype=torch.bool)
        table[[id for id in self.tokenizer.eos_ids if id < vocab_size]] = True
        return table.to(self._device)

    def _padded(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """[prompts, longest] ids, padded on the left, and [prompts] lengths."""
        lengths = [len(prompt.ids) for prompt in prompts]
        longest = max(lengths)
        padded = [[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
        return torch.tensor(padded, device=self._device), torch.tensor(lengths, device=self._device)


def _check_prompts(network: Network, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    for prompt in prompts:
        length, limit = len(prompt.ids), _limit(prompt, sampling)
        if not length:
            raise NodeError(f"the prompt of {prompt.key} has no tokens", wanted="at least one token")
        if network.max_length is not None and length + limit > network.max_length:
            raise LengthError(
                f"the prompt of {prompt.key} and its response are longer than the model",
                found=f"{length} + {limit} tokens",
                wanted=f"at most {network.max_length}",
                fix="lower max_new_tokens=, or set max_prompt_tokens= of fl.prompts",
            )


def _keys(prompt: Prompt, num_samples: int) -> list[Key]:
    """Of the responses to a prompt."""
    if prompt.key.sample != PROMPT:
        return [prompt.key]
    return [Key(prompt.key.step, prompt.key.prompt, sample) for sample in range(num_samples)]


def _limit(prompt: Prompt, sampling: Sampling) -> int:
    """Tokens of the longest response to a prompt."""
    return sampling.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens


def _chunks(
    network: Network, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int
) -> Iterator[Sequence[Prompt]]:
    """All prompts at once, unless their caches would not fit."""
    if not prompts:
        return
    longest = max(len(prompt.ids) + _limit(prompt, sampling) for prompt in prompts)
    row_bytes = longest * network.cache_bytes + network.vocab_size * SAMPLER_BYTES
    size = max(1, _free_bytes(network) // (row_bytes * num_samples))
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _free_bytes(network: Network) -> int:
    device = next(network.module.parameters()).device
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept) // 2

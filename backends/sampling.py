"""Draw tokens by the inverse of their cumulative distribution, with one hashed uniform for each row and position.

A uniform is a hash of (seed, step, prompt, sample, position), so that a draw depends on nothing that shares its batch.
The distribution is summed in float64: logits that differ in their last bit, as those of another batch size do, move a
token's interval by about 1e-7, and a draw changes only when its uniform lies that close to a border.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrl.rows import Key
from flowrl.seeds import mix

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 52
"""Of a uniform: one fewer than a float64 holds, so that half a step more keeps it strictly between 0 and 1."""


def row_seeds(run_seed: int, keys: Sequence[Key]) -> NDArray[np.uint64]:
    """[rows] uint64: `flowrl.seeds.row_seed` of each key, in one go."""
    parts = np.array(keys, np.int64).reshape(len(keys), len(Key._fields)).astype(np.uint64)
    state = np.full(len(keys), mix(run_seed), np.uint64)
    for part in parts.T:
        state = _mixed(state, part)
    return state


def uniforms(seeds: NDArray[np.uint64], num_positions: int) -> NDArray[np.float64]:
    """[rows, positions] float64 in (0, 1): a function of the row's seed and the position alone."""
    hashed = _mixed(seeds[:, None], np.arange(num_positions, dtype=np.uint64))
    return ((hashed >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) / 2.0**_BITS


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """Logits in at least float32, divided by the temperature.

    Greedy sampling (temperature 0) has no distribution of its own: its log-probs are those at temperature 1, for the
    sampler and for the trainer alike.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature in (0.0, 1.0) else wide / temperature


def choose(
    logits: Tensor, uniform: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sample one token a row. What is kept is decided at `temperature`: by `top_k`, then `top_p`, then `min_p`.

    Args:
        logits: [rows, vocabulary].
        uniform: [rows] float64 in (0, 1).
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: of these the fewest that hold this share of their probability.
        min_p: of these the ones at least this share as likely as the most likely token (Nguyen et al. 2024,
            arXiv:2407.01082).

    Returns:
        [rows] int64 ids, and [rows] float log-probs over the full vocabulary at `temperature`.
    """
    logprobs = torch.log_softmax(scaled_logits(logits, temperature), -1)
    if temperature == 0:
        ids = logprobs.argmax(-1, keepdim=True)
    elif top_p < 1 or min_p > 0 or 0 < top_k < logits.shape[-1]:
        ids = _choose_likely(logprobs, uniform, top_k or logits.shape[-1], top_p, min_p)
    else:
        ids = _invert(logprobs.double().exp_().cumsum(-1), uniform)
    return ids[:, 0], logprobs.gather(-1, ids)[:, 0]


def choose_likeliest(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[rows] int64 most likely ids, and their log-probs over the full vocabulary at `temperature`."""
    most, ids = torch.log_softmax(scaled_logits(logits, temperature), -1).max(-1)
    return ids, most


def _choose_likely(logprobs: Tensor, uniform: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[rows, 1] ids from the `top_k` most likely tokens, of these from the fewest that hold `top_p`, and of these from
    the ones that are likely enough beside the first."""
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    kept = ordered[:, :top_k].double().exp_()
    before = kept.cumsum(-1) - kept
    likely = (before < top_p * kept.sum(-1, keepdim=True)) & (kept >= min_p * kept[:, :1])
    kept = torch.where(likely, kept, 0.0)
    return ids.gather(-1, _invert(kept.cumsum(-1), uniform))


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """[rows, 1] the first position whose cumulative weight exceeds the uniform's share of the row's total."""
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _mixed(state: NDArray[np.uint64], part: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of `flowrl.seeds.mix`; unsigned arrays wrap around as it does."""
    state = (state ^ part) + _GAMMA
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))

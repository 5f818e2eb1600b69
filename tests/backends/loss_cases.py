"""Every loss of flowrl, declared under every aggregation that it can have, and rows that all of them can be trained on.

A loss that is added to `flowrl.losses` is here by itself: columns that are not known below are noise, one number a
token, and required settings are 0.3.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import flowrl as fl
from flowrl import losses
from flowrl.aggregation import Aggregate
from flowrl.backend import HEAD_OF
from flowrl.backends.tiny import TinyBackend
from flowrl.loss import TRAINED, Loss, LossFunction
from flowrl.rows import Key, Ragged, Rows

ONE_RANK = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)
PROMPTS, SAMPLES = 8, 2
LIKELY = 4
"""Tokens that a teacher names."""
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo_clip dual": {"dual_clip": 1.5},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "dpo ipo": {"variant": "ipo"},
    "kl k2": {"estimator": "k2"},
}
"""Settings other than the defaults, by the loss's name and a word."""


def declared() -> dict[str, Loss]:
    """Each loss under each of its aggregations, and a sum of three."""
    named = {name: getattr(losses, name) for name in losses.__all__}
    functions = {name: function for name, function in named.items() if isinstance(function, LossFunction)}
    cases = {name: VARIANTS.get(name, {}) for name in functions} | VARIANTS
    found = {}
    for name, settings in cases.items():
        function = functions[name.split()[0]]
        needed = dict.fromkeys(_required(function), 0.3) | settings
        modes = get_args(Aggregate)[:-1] if function.per == "token" else ("seq-mean",)
        for mode in modes:
            found[f"{name} {mode}"] = function(aggregate=mode, horizon=7, **needed)
    added = losses.ppo_clip(weights="weights") - 0.1 * losses.entropy() + 0.5 * losses.kl()
    return found | {"a sum": added, "rows and tokens": losses.sft(aggregate="seq-mean-token-mean") + losses.orpo()}


def over_processes() -> dict[str, Loss]:
    """Those that two processes train on: each aggregation, each head, and rows beside tokens."""
    kinds = ("ppo_clip ", "dpo ", "value_clip token-mean", "bradley_terry", "a sum", "rows and tokens")
    return {name: loss for name, loss in declared().items() if name.startswith(kinds) and "dual" not in name}


def _required(function: LossFunction[..., Any]) -> list[str]:
    parameters = inspect.signature(function.function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]


def rows_for(loss: Loss, seed: int = 0) -> Rows:
    """16 rows of unequal lengths: masks have holes, one row has no trained token, one prompt no preference."""
    random = np.random.default_rng(seed)
    keys = [Key(0, prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)]
    lengths = random.integers(1, 9, len(keys))
    prompt_lengths = random.integers(1, 5, PROMPTS).repeat(SAMPLES)
    total = int(lengths.sum())

    def ragged(values: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any] = lengths) -> Ragged:
        return Ragged(values, np.concatenate([[0], sizes.cumsum()]))

    mask = random.random(total) < 0.7
    mask[: lengths[0]] = False
    mask[np.concatenate([[0], lengths.cumsum()])[1:-1]] = True  # the first token of each other row
    old = -random.random(total) * 3 - 3
    columns: dict[str, Any] = {
        "prompt_ids": ragged(random.integers(1, 99, int(prompt_lengths.sum())), prompt_lengths),
        "response_ids": ragged(random.integers(1, 99, total)),
        "mask": ragged(mask),
        "old_logprobs": ragged(old),
        "ref_logprobs": ragged(old + random.normal(size=total) * 0.3),
        "preference": np.tile([1.0, -1.0], PROMPTS) * np.repeat([1.0] * (PROMPTS - 1) + [0.0], SAMPLES),
        "margin": random.random(len(keys)),
        "kl_baseline": np.full(len(keys), 0.02),
        "high_covariance": ragged(random.random(total) < 0.2),
    }
    if "teacher_logprobs" in loss.reads:  # distinct ids, and four fifths of the probability
        ids = random.random((total, 99)).argpartition(LIKELY, axis=1)[:, :LIKELY] + 1
        columns["teacher_ids"] = ragged(ids.astype(np.int32))
        columns["teacher_logprobs"] = ragged(np.log(0.8 * random.dirichlet(np.ones(LIKELY), total)))
    for name in (*loss.reads, "weights"):
        if name not in columns and name not in TRAINED:
            columns[name] = ragged(random.normal(size=total))
    return Rows(keys, columns)


def backend_for(loss: Loss, dtype: torch.dtype, ranks: Any = ONE_RANK) -> TinyBackend:
    """A tiny backend with the head that a loss reads, in a precision.

    One step moves each weight by its gradient over 1 + the gradient's size.
    """
    head = next(HEAD_OF[name] for name in loss.reads if name in TRAINED)
    optimizer = fl.AdamW(lr=1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
    model = fl.Model("invariance", backend="tiny", head=head, optimizer=optimizer)
    backend = TinyBackend(model, ranks, "cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in backend.network.module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return backend


@dataclass(frozen=True, slots=True)
class Padded(Loss):
    """A loss that sees its rows padded further, with nan, before it adds them up."""

    left: int = 0
    right: int = 0

    def total(self, columns: Any, mask: Tensor) -> Any:
        """Of the padded rows."""
        return Loss.total(self, {name: self._wide(column) for name, column in columns.items()}, self._wide(mask))

    def _wide(self, column: Tensor) -> Tensor:
        if column.dim() == 1:
            return column
        value = torch.nan if column.is_floating_point() else 0
        return pad(column, (*[0, 0] * (column.dim() - 2), self.left, self.right), value=value)


def padded(loss: Loss, left: int, right: int) -> Loss:
    """A loss whose rows are padded by so many tokens."""
    return Padded(loss.terms, loss.aggregate, loss.horizon, left, right)


def parts(count: int) -> Iterator[list[int]]:
    """Positions of the rows of `count` equal parts."""
    size = PROMPTS * SAMPLES // count
    return (list(range(first, first + size)) for first in range(0, PROMPTS * SAMPLES, size))

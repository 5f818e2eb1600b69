"""What logits say of the tokens that are wanted: log-probs, entropy, and the most likely tokens."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import NodeError
from flowrl.rows import Ragged, Rows

TOPK = frozenset({"topk_ids", "topk_logprobs"})
"""Outputs of k numbers a token."""


def read_logits(
    logits: Tensor,
    target: Tensor,
    at: Tensor | None = None,
    *,
    outputs: Collection[str],
    entropy_gradient: bool = False,
    k: int = 0,
    num_ids: int | None = None,
) -> dict[str, Tensor]:
    """Outputs of `flowrl.backend.Output` for each wanted token.

    Args:
        logits: [wanted, vocabulary], divided by the temperature.
        target: [wanted] int64 ids.
        at: [wanted, k] int64 ids that ``topk_ids`` and ``topk_logprobs`` are about; None takes the most likely ones.
        outputs: which to return.
        entropy_gradient: whether the entropy has a gradient.
        k: how many of the most likely ids.
        num_ids: those are below it; None allows the whole vocabulary.

    Returns:
        By name: [wanted], and [wanted, k] for ``topk_ids`` and ``topk_logprobs``. ``logit_energy`` is the squared norm
        of the log-prob's gradient with respect to the logits, which is that of the probabilities less 1 at the target.
    """
    logprobs = torch.log_softmax(logits, -1)
    every = logprobs if entropy_gradient else logprobs.detach()
    found: dict[str, Tensor] = {}
    if "logprobs" in outputs:
        found["logprobs"] = logprobs.gather(-1, target[:, None])[:, 0]
    if "entropy" in outputs:
        found["entropy"] = -(every.exp() * every).sum(-1)
    if "logit_energy" in outputs:
        chosen = torch.ones_like(target, dtype=every.dtype)[:, None]
        found["logit_energy"] = every.exp().scatter_add(-1, target[:, None], -chosen).square().sum(-1)
    if not TOPK.isdisjoint(outputs):
        ids = logprobs.detach()[:, :num_ids].topk(k).indices if at is None else at
        found |= {"topk_ids": ids, "topk_logprobs": logprobs.gather(-1, ids)}
    return {name: values for name, values in found.items() if name in outputs}


def check_ids(rows: Rows, column: str, vocab_size: int, model: str) -> None:
    """The ids of a column [tokens, k] are tokens of a model.

    Raises:
        NodeError: one is not, or there is no such table.
    """
    if column not in rows.columns:
        raise NodeError(
            f"log-probs are to be taken at the ids of column '{column}', which the rows do not have",
            found=", ".join(rows.columns),
            wanted=column,
        )
    ids: Ragged = rows[column]
    if len(ids.values) and ids.values.ndim != 2:
        raise NodeError(f"column '{column}' is no table of ids", found="[tokens]", wanted="[tokens, k]")
    wrong = np.argwhere((ids.values < 0) | (ids.values >= vocab_size))
    if len(wrong):
        first = tuple(wrong[0])
        key = rows.keys[int(np.searchsorted(ids.offsets, first[0], "right")) - 1]
        raise NodeError(
            f"column '{column}' names a token that model '{model}' does not have",
            found=f"id {ids.values[first]} for {key}",
            wanted=f"0 <= id < {vocab_size}, its vocabulary",
            fix="both models need one tokenizer: the teacher's ids are read as the student's",
        )


def check_k(k: int, num_ids: int, model: str) -> None:
    """A model has k tokens.

    Raises:
        NodeError: it has fewer.
    """
    if not 1 <= k <= num_ids:
        raise NodeError(
            f"model '{model}' has no {k} most likely tokens", found=f"k={k}", wanted=f"1 <= k <= {num_ids}, its tokens"
        )

"""Nodes about the column ``preference``: +1 chosen or desirable, -1 rejected or undesirable, 0 neither.

Losses that read it are in `flowrl.losses.preference`. Each node is called on tensors, or on handles to declare it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .functions import node
from .moments import shifted

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")


@node(out="preference", per="group")
def best_and_worst(scores: Tensor, group: Tensor) -> Tensor:
    """Choose the best sample of a prompt and reject the worst: online DPO (Guo et al. 2024, arXiv:2402.04792).

    Of several that are best, or worst, the first is taken, which is as good as any since samples of a prompt are drawn
    alike. Where all are equally good no one is better: all get 0, and no pair is made.

    Args:
        scores: [rows] float, one per response.
        group: [rows] int, the prompt that each row answers.

    Returns:
        [rows] float32, +1, -1 and 0.

    Raises:
        ValueError: a score is not finite, or shapes differ.
    """
    x, index, count = shifted(scores, group)
    best, worst = _first_of_each(-x, index, count), _first_of_each(x, index, count)
    differ = x[best] > x[worst]
    preference = torch.zeros(len(scores), device=scores.device)
    return preference.index_fill(0, best[differ], 1).index_fill(0, worst[differ], -1)


@node(out="kl_baseline", per="batch")
def kto_baseline(old_logprobs: Tensor, ref_logprobs: Tensor, preference: Tensor) -> Tensor:
    """KTO's estimate of the KL to the reference: the mean log-ratio of responses that answer other prompts, 0 at least.

    Ethayarajh et al. 2024 (arXiv:2402.01306, section 4.1). Rows with preference 0 are those responses. They are not
    trained, and all of them of the whole batch make the one number that each row gets.

    Args:
        old_logprobs: [rows, tokens] float, of the policy before the update: ``fl.logprobs(policy, samples)``.
        ref_logprobs: [rows, tokens] float, of the reference; both 0 after a response's end.
        preference: [rows]; 0 marks a response that does not belong to its prompt.

    Returns:
        [rows] float32, nats, all equal.

    Raises:
        ValueError: no row is mismatched, or a log-prob is not finite.
    """
    mismatched = preference == 0
    if not mismatched.any():
        raise ValueError("no row has preference 0: the baseline of KTO is a mean over responses to other prompts")
    ratio = (old_logprobs - ref_logprobs)[mismatched].double().sum(-1)
    if not torch.isfinite(ratio).all():
        raise ValueError("a log-prob of a mismatched response is not finite")
    return ratio.mean().clamp(min=0).float().expand(len(preference))


def _first_of_each(x: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """[G] the row of the smallest x [rows] of each group, of equal ones the first."""
    order = x.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    return order[(count.cumsum(0) - count).long()]

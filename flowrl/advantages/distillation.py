"""What a teacher thinks of each sampled token, as its advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.expect import expect_discounts
from flowrl.functions import advantage
from flowrl.moments import checked, discounted, like

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


@advantage(check=expect_discounts)
def distill(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, gamma: float = 0.0) -> Tensor:
    """How much likelier the teacher finds each sampled token than the student did: log p_teacher - log p_student.

    On average over samples this is less the reverse KL, KL(student || teacher), one sample's estimate of it: a policy
    gradient on it distils on-policy with nothing of the teacher but ``fl.logprobs(teacher, samples)``
    (Lu and Thinking Machines Lab 2025, "On-Policy Distillation",
    https://thinkingmachines.ai/blog/on-policy-distillation). Where the teacher's likely tokens are at hand,
    `flowrl.losses.distill` takes the mean over tokens in place of a sample.

    Args:
        logprobs: [rows, tokens] float, of the policy that sampled.
        ref_logprobs: [rows, tokens] float, of the teacher.
        mask: [rows, tokens] bool, 1 = trained.
        gamma: discount of a token, 0 to 1. With 0 a token answers for itself alone; with 1 for all that follow, which
            is the gradient of the KL of whole responses (MiniLLM, arXiv:2306.08543, eq. 2).

    Returns:
        [rows, tokens] advantages in nats, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or a log-prob of a trained token is not finite.
    """
    trained = checked(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    gained = torch.where(trained, ref_logprobs.detach().double() - logprobs.detach().double(), 0)
    return like(discounted(gained, trained, gamma), logprobs)

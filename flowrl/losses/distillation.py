"""Distillation: how far the trained model's next-token distribution is from a teacher's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from flowrl.errors import WrongType, did_you_mean
from flowrl.loss import loss

from .ratios import Metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")

Divergence = Literal["forward", "reverse", "generalised"]
TOO_MUCH = 1e-3
"""Probability beyond 1 that rounding does not explain: such numbers are no log-probs of different tokens."""


def _check(*, divergence: Divergence = "forward", beta: float = 0.5, tail: bool = True) -> None:
    if divergence not in get_args(Divergence):
        allowed = get_args(Divergence)
        fix = did_you_mean(str(divergence), allowed) or "divergence='forward'"
        what = "loss 'distill' has no such divergence"
        raise WrongType(what, found=repr(divergence), wanted=" | ".join(allowed), fix=fix)
    if not 0 < beta < 1:
        raise WrongType(
            "beta is the teacher's share of a mixture",
            found=f"beta={beta}",
            wanted="0 < beta < 1",
            fix="divergence='forward' and 'reverse' are its limits",
        )


@loss(check=_check)
def distill(
    topk_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence = "forward",
    beta: float = 0.5,
    tail: bool = True,
) -> tuple[Tensor, Metrics]:
    """The divergence of the trained model's next-token distribution from the teacher's, on the teacher's k tokens.

    With p the teacher's distribution, q the trained one's and m = beta p + (1 - beta) q:

    * ``forward``: KL(p || q), which covers all that the teacher may say (Hinton et al. 2015, arXiv:1503.02531);
    * ``reverse``: KL(q || p), which leaves what the teacher would not say (MiniLLM, arXiv:2306.08543);
    * ``generalised``: beta KL(p || m) + (1 - beta) KL(q || m), between the two and bounded (GKD, Agarwal et al. 2024,
      arXiv:2306.13649, eq. 1). Divided by beta it tends to ``forward`` as beta goes to 0, by 1 - beta to ``reverse`` as
      beta goes to 1.

    The responses are given, whoever sampled them: no gradient flows through the sampling. With `tail` all other tokens
    are one more, whose probability is what the k leave over, so that probability which a model puts elsewhere counts;
    the result is at most the divergence over the full vocabulary, and it when k is all of it. Without, the k are
    renormalised for both models, and what either puts elsewhere does not count.

    Args:
        topk_logprobs: [rows, tokens, k] float, of the trained model at the teacher's tokens.
        teacher_logprobs: [rows, tokens, k] float, over the full vocabulary (`flowrl.topk`).
        mask: [rows, tokens] bool, the tokens that are computed.
        divergence: which.
        beta: weight of the teacher in the mixture, 0 < beta < 1; of ``generalised`` alone.
        tail: whether what is left over is one more token.

    Returns:
        [rows, tokens] nats; ``divergence``, and ``teacher_tail``: the teacher's probability outside its k tokens.

    Raises:
        WrongType: there is no such divergence, or `beta` is no share.
        ValueError: shapes differ, or the teacher's probabilities at a token add up to more than 1.
    """
    if topk_logprobs.shape != teacher_logprobs.shape or topk_logprobs.shape[:2] != mask.shape:
        found = f"{list(topk_logprobs.shape)}, {list(teacher_logprobs.shape)} and {list(mask.shape)}"
        raise ValueError(
            f"log-probs [rows, tokens, k] of both models and a mask [rows, tokens] are needed; found {found}"
        )
    p, q = teacher_logprobs[mask], topk_logprobs[mask]
    teacher_tail = 1 - p.exp().sum(-1)
    if len(p) and float(teacher_tail.min()) < -TOO_MUCH:
        raise ValueError(
            f"the teacher's probabilities at a token add up to {1 - float(teacher_tail.min()):.4g}, not to 1"
        )
    p, q = (_with_tail(p), _with_tail(q)) if tail else (_renormalised(p), _renormalised(q))
    value = _divergence(p, q, divergence, beta)
    metrics = {"divergence": value.detach(), "teacher_tail": teacher_tail.clamp(min=0)}
    return _spread(value, mask), {name: _spread(metric, mask) for name, metric in metrics.items()}


def _divergence(p: Tensor, q: Tensor, divergence: Divergence, beta: float) -> Tensor:
    """[tokens] of log-probs [tokens, k] whose probabilities add up to 1."""
    if divergence == "forward":
        return _kl(p, q)
    if divergence == "reverse":
        return _kl(q, p)
    weight = torch.tensor(beta, dtype=p.dtype, device=p.device)
    mixture = torch.logaddexp(p + weight.log(), q + torch.log1p(-weight))
    return beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    """[tokens, k + 1]: the last is what the others leave over.

    It is no less than the rounding of a sum that is 1: below that the difference says nothing, and its log would be
    noise, or infinite.
    """
    left = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, left.log()], -1)


def _renormalised(logprobs: Tensor) -> Tensor:
    return torch.log_softmax(logprobs, -1)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """[rows, tokens] with the values [trained tokens] in place and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)

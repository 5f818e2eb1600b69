"""Advantage estimators: plain torch, called on tensors or declared as nodes (``advantages.grpo(samples, scores)``).

Statistics are taken per prompt id, wherever the rows stand, in float64 and in two passes, from each group's smallest
score: a group of equal scores gets exactly 0, and scores near 1e6 lose nothing. Rows that were dropped are absent: they
enter no baseline. A row without a trained token still counts in its group; its advantage reaches no token. Results are
float32, float64 for float64 input, without a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .functions import advantage, node
from .kl import Estimator, estimate
from .moments import (
    centred,
    check_peers,
    checked,
    credited,
    last_trained,
    like,
    over_std,
    shifted,
    total,
    whiten,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

EPS = 1e-6
"""Added to a standard deviation. Large enough that rounding noise does not become an advantage, small enough that two
scores 1e-3 apart still count as different."""


@advantage(min_group=2)
def grpo(scores: Tensor, group: Tensor, *, normalize_std: bool = True, eps: float = EPS) -> Tensor:
    """Centre each score on the mean of its prompt's group, and divide by the group's standard deviation.

    GRPO, section 4.1.2 of Shao et al. 2024 (arXiv:2402.03300), with the unbiased (n - 1) standard deviation. A group
    with one row left gets 0: it says nothing about its row.

    Args:
        scores: [rows] float, one per response.
        group: [rows] int, the prompt that each row answers; any ids, in any order.
        normalize_std: divide by the standard deviation plus `eps`; without it this is `dr_grpo`.
        eps: added to the standard deviation.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    x, index, count = centred(scores, group)
    return like(over_std(x, x, index, count, eps) if normalize_std else x, scores)


@advantage(min_group=2)
def dr_grpo(scores: Tensor, group: Tensor) -> Tensor:
    """Centre each score on the mean of its prompt's group (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    Pair it with ``aggregate="seq-mean-token-sum-norm"``, which leaves out the division by a response's length as well.

    Args:
        scores: [rows] float.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    x, _, _ = centred(scores, group)
    return like(x, scores)


@advantage(min_group=2)
def rloo(scores: Tensor, group: Tensor) -> Tensor:
    """A score minus the mean of the *other* scores of its group.

    Leave-one-out: Ahmadian et al. 2024 (arXiv:2402.14740), eq. 7. Not divided by a standard deviation: that of the
    others can be 0 where the difference is not.

    Args:
        scores: [rows] float.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: a group has one row, so nothing to leave in; shapes differ; a score is not finite.
    """
    x, index, count = centred(scores, group)
    check_peers(index, count, group, "leave-one-out")
    return like(x * (count / (count - 1))[index], scores)


@advantage(min_group=2)
def opo(scores: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """A score minus its group's mean, in which a response weighs its length: the baseline of least variance.

    OPO, Hao et al. 2025 (arXiv:2505.23585).

    Args:
        scores: [rows] float.
        mask: [rows, tokens] bool, 1 = trained; a row's sum is its length.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    x, index, count = shifted(scores, group)
    length = checked(mask, scores=scores).sum(-1).double()
    weight = total(length, index, count).clamp(min=1)
    return like(x - (total(length * x, index, count) / weight)[index], scores)


@advantage(min_group=2)
def grpo_passk(scores: Tensor, group: Tensor, *, normalize_std: bool = True, eps: float = EPS) -> Tensor:
    """The best of a group gets its distance from the second best, all others 0: the gradient of their maximum.

    Tang et al. 2025 (arXiv:2503.19595).

    Args:
        scores: [rows] float.
        group: [rows] int.
        normalize_std: divide by the group's unbiased standard deviation plus `eps`.
        eps: added to the standard deviation.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: a group has one row, so no second best; shapes differ; a score is not finite.
    """
    x, index, count = centred(scores, group)
    check_peers(index, count, group, "the best against the second best")
    by_score = x.argsort(descending=True, stable=True)
    order = by_score[index[by_score].argsort(stable=True)]
    first = (count.cumsum(0) - count).long()
    best, second = order[first], order[first + 1]
    lead = torch.zeros_like(x).index_put((best,), x[best] - x[second])
    return like(over_std(lead, x, index, count, eps) if normalize_std else lead, scores)


@advantage(per="batch", min_group=2)
def gpg(scores: Tensor, group: Tensor) -> Tensor:
    """Centre each score on its group, and scale by rows over rows with a score that is not 0.

    GPG, Chu et al. 2025 (arXiv:2504.02546), whose scale makes up for rows without a gradient. Differs from the paper,
    which counts rows of groups with equal scores, in counting scores of 0, as the common implementation does.

    Args:
        scores: [rows] float.
        group: [rows] int.

    Returns:
        [rows] advantages.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    x, _, _ = centred(scores, group)
    return like(x * (len(scores) / scores.count_nonzero().clamp(min=1)), scores)


@node(out="rewards", per="group")
def token_rewards(
    scores: Tensor,
    mask: Tensor,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    *,
    kl_coef: float = 0.0,
    estimator: Estimator = "k1",
) -> Tensor:
    """A score as a reward of the response's last trained token, less a penalty at each token for leaving the reference.

    The reward of Ouyang et al. 2022 (arXiv:2203.02155), section 3.5. A response without a trained token has no place
    for its score: its rewards are all 0.

    Args:
        scores: [rows] float.
        mask: [rows, tokens] bool, 1 = trained.
        logprobs: [rows, tokens] float, of the policy that sampled; needed for a penalty.
        ref_logprobs: [rows, tokens] float; needed for a penalty.
        kl_coef: reward lost for each nat of KL.
        estimator: of the KL, see `flowrl.kl`.

    Returns:
        [rows, tokens] rewards, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, an input is not finite, or `kl_coef` is given without the log-probs.
    """
    trained = checked(mask, scores=scores)
    rewards = torch.zeros(trained.shape, dtype=torch.float64, device=scores.device)
    last = last_trained(trained)[:, -1:].clamp(min=0)
    rewards = rewards.scatter(1, last, scores.detach().double()[:, None])
    if kl_coef:
        if logprobs is None or ref_logprobs is None:
            raise ValueError(f"kl_coef={kl_coef} needs logprobs and ref_logprobs: pass fl.logprobs(reference, samples)")
        checked(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
        rewards = rewards - kl_coef * estimate(logprobs.double(), ref_logprobs.double(), estimator=estimator).detach()
    return like(torch.where(trained, rewards, 0), scores)


@advantage(per="batch", out=("advantages", "returns"))
def reinforce_pp(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Discounted returns of each token, whitened over all trained tokens of the batch.

    REINFORCE++, Hu et al. 2025 (arXiv:2501.03262). Time runs in trained tokens: a tool's answer discounts nothing.

    Args:
        rewards: [rows, tokens] float (see `token_rewards`); one on an untrained token is the trained one's before.
        mask: [rows, tokens] bool, 1 = trained.
        gamma: discount of a token, 0 to 1.

    Returns:
        [rows, tokens] advantages and [rows, tokens] returns, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    trained = checked(mask, rewards=rewards)
    reward = credited(rewards, trained)
    returns = torch.zeros_like(reward)
    running = reward.new_zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        running = torch.where(trained[:, t], reward[:, t] + gamma * running, running)
        returns[:, t] = running
    returns = torch.where(trained, returns, 0)
    return like(whiten(returns, trained), rewards), like(returns, rewards)


@advantage(per="batch", min_group=2)
def reinforce_pp_baseline(scores: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Centre each score on its group, then whiten over all trained tokens of the batch.

    REINFORCE++ with a baseline (arXiv:2501.03262): the group gives the mean, the batch the scale.

    Args:
        scores: [rows] float.
        mask: [rows, tokens] bool, 1 = trained.
        group: [rows] int.

    Returns:
        [rows, tokens] advantages, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or a score is not finite.
    """
    trained = checked(mask, scores=scores)
    x, _, _ = centred(scores, group)
    return like(whiten(x[:, None].expand(trained.shape), trained), scores)


@advantage(per="batch", out=("advantages", "returns"))
def remax(rewards: Tensor, mask: Tensor, baseline_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns minus the score of the same prompt's greedy response.

    ReMax, Li et al. 2023 (arXiv:2310.10505).

    Args:
        rewards: [rows, tokens] float (see `token_rewards`); one on an untrained token is the trained one's before.
        mask: [rows, tokens] bool, 1 = trained.
        baseline_scores: [rows] float, of the greedy response.

    Returns:
        [rows, tokens] advantages and [rows, tokens] returns, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or an input is not finite.
    """
    trained = checked(mask, rewards=rewards, baseline_scores=baseline_scores)
    returns = credited(rewards, trained).flip(-1).cumsum(-1).flip(-1)
    centred = returns - baseline_scores.detach().double()[:, None]
    return like(torch.where(trained, centred, 0), rewards), like(torch.where(trained, returns, 0), rewards)


@advantage(per="batch", out=("advantages", "returns"))
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    stop: Sequence[str] | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates along the trained tokens of each response.

    Eq. 16 of Schulman et al. 2016 (arXiv:1506.02438). An untrained token is no step of time: it decays nothing, and its
    value is not read. What a response was cut off from counts as `final_values`; the engine's stop reason says which
    responses were cut, never the padded width.

    Args:
        rewards: [rows, tokens] float (see `token_rewards`); one on an untrained token is the trained one's before.
        values: [rows, tokens] float, of the state in which each token was chosen.
        mask: [rows, tokens] bool, 1 = trained.
        stop: [rows] why each response ended; read with `final_values`.
        final_values: [rows] float, value of the state after the last token, used where `stop` is ``"length"``. None
            takes 0 everywhere.
        gamma: discount of a token, 0 to 1.
        lam: 0 trusts the values, 1 the rewards.
        normalize: whiten the advantages over all trained tokens of the batch.

    Returns:
        [rows, tokens] advantages and [rows, tokens] returns (advantages before whitening, plus values), 0 where the
        mask is 0.

    Raises:
        ValueError: shapes differ, an input is not finite, or `final_values` is given without `stop`.
    """
    trained = checked(mask, rewards=rewards, values=values)
    reward = credited(rewards, trained)
    value = torch.where(trained, values.detach().double(), 0)
    next_value = _after_the_end(trained, stop, final_values)
    advantages = torch.zeros_like(reward)
    running = reward.new_zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        here = trained[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        next_value = torch.where(here, value[:, t], next_value)
        advantages[:, t] = running
    advantages = torch.where(trained, advantages, 0)
    returns = like(advantages + value, rewards)
    return like(whiten(advantages, trained) if normalize else advantages, rewards), returns


def _after_the_end(trained: Tensor, stop: Sequence[str] | None, final_values: Tensor | None) -> Tensor:
    """[rows] float64 value of the state after each response: 0 for one that ended by itself."""
    nothing = torch.zeros(len(trained), dtype=torch.float64, device=trained.device)
    if final_values is None:
        return nothing
    if stop is None or len(stop) != len(trained):
        raise ValueError(f"final_values needs the stop reason of {len(trained)} rows; found {stop}")
    checked(trained, final_values=final_values)
    cut = torch.tensor([reason == "length" for reason in stop], device=trained.device)
    return torch.where(cut, final_values.detach().double(), nothing)

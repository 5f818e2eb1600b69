"""Estimators of one number a token: what it earned from there on, against a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl.coefficients import Adaptive
from flowrl.errors import WrongType
from flowrl.expect import expect_discounts
from flowrl.functions import advantage, node
from flowrl.kl import Estimator, check_estimator, estimate
from flowrl.moments import checked, credited, discounted, last_trained, like, shifted, total, whiten

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from flowrl._lazy import lazy

    torch = lazy("torch")


def _check_penalty(columns: Sequence[str], *, kl_coef: float | Adaptive = 0.0, **settings: object) -> None:
    check_estimator(**settings)
    if kl_coef and not {"logprobs", "ref_logprobs"} <= {*columns}:
        raise WrongType(
            "a penalty for leaving the reference needs the log-probs of both",
            found=f"kl_coef={kl_coef}, and columns {', '.join(columns)}",
            wanted="'logprobs' and 'ref_logprobs'",
            fix="pass fl.logprobs(policy.frozen(), samples) too",
        )


@node(out="rewards", per="group", check=_check_penalty)
def token_rewards(
    scores: Tensor,
    mask: Tensor,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    group: Tensor | None = None,
    *,
    kl_coef: float | Adaptive = 0.0,
    estimator: Estimator = "k1",
) -> Tensor:
    """A score as a reward of the response's last trained token, less a penalty at each token for leaving the reference.

    The reward of Ouyang et al. 2022 (arXiv:2203.02155), section 3.5. A response without a trained token has no place
    for its score: its rewards are all 0.

    With an adaptive `kl_coef` the penalty keeps the KL near a target, as in Ziegler et al. 2019 (arXiv:1909.08593),
    section 2.2, whose KL is summed over a response; here it is a mean over tokens, as for `flowrl.losses.kl`::

        kl_coef = fl.Adaptive(initial=0.1, target=0.02)
        rewards = advantages.token_rewards(samples, scores, reference, kl_coef=kl_coef)
        advantage = advantages.gae(samples, rewards, values)
        fl.update(policy, samples, advantage, reference, loss=losses.ppo_clip())

    It moves with each version, by the metric ``kl`` that the update measures over its first epoch: so the update is
    given the reference too. All rows of step s see the value of version ``s - staleness``: with ``staleness=0`` the one
    that step s - 1 has led to, else one that is as many versions older as a response may be.

    Args:
        scores: [rows] float.
        mask: [rows, tokens] bool, 1 = trained.
        logprobs: [rows, tokens] float, of the policy that sampled; needed for a penalty.
        ref_logprobs: [rows, tokens] float; needed for a penalty.
        group: not read: no row depends on another, and a node that names it is called once for many prompts.
        kl_coef: reward lost for each nat of KL: a number, or in a graph a `flowrl.Adaptive`.
        estimator: of the KL, see `flowrl.kl`.

    Returns:
        [rows, tokens] rewards, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, an input is not finite, or `kl_coef` is given without the log-probs.
        WrongType: an adaptive `kl_coef` has no value outside a run.
    """
    assert not isinstance(kl_coef, Adaptive), "a run has put a number in its place"
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


@advantage(per="batch", out=("advantages", "returns"), check=expect_discounts)
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
    returns = discounted(credited(rewards, trained), trained, gamma)
    return like(whiten(returns, trained), rewards), like(returns, rewards)


@node(out="baseline_scores", per="group", on_error="drop")
def greedy_baseline(scores: Tensor, greedy: Tensor, group: Tensor) -> Tensor:
    """The score of the same prompt's greedy response, for `remax`; of several, their mean.

    A prompt whose greedy response was dropped has no baseline: its samples are dropped too.

    Args:
        scores: [rows] float.
        greedy: [rows] bool, of ``fl.rollout(..., greedy=1)``.
        group: [rows] int.

    Returns:
        [rows] baseline scores.

    Raises:
        ValueError: a group has no greedy response; shapes differ; a score is not finite.
    """
    x, index, count = shifted(scores, group)
    lowest = scores.detach().double() - x
    taken = greedy.double()
    num_greedy = total(taken, index, count)
    alone = (num_greedy[index] == 0).nonzero()
    if len(alone):
        raise ValueError(f"group {int(group[alone[0, 0]])} has no greedy response: fl.rollout(..., greedy=1) makes one")
    return like((total(taken * x, index, count) / num_greedy)[index] + lowest, scores)


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


@advantage(per="batch", out=("advantages", "returns"), check=expect_discounts)
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


@advantage(min_group=2, out=("advantages", "returns"))
def otb(
    rewards: Tensor,
    mask: Tensor,
    logit_energy: Tensor,
    group: Tensor,
    importance_weights: Tensor | None = None,
    *,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns minus the baseline of least variance of their place in the response, taken over the group.

    The optimal token baseline, Li et al. 2026 (arXiv:2602.07078). At each place, counted in trained tokens, the group's
    returns are averaged under the weight of what a response has put into the gradient up to there: the sum of its
    tokens' `logit_energy`.

    Args:
        rewards: [rows, tokens] float (see `token_rewards`); one on an untrained token is the trained one's before.
        mask: [rows, tokens] bool, 1 = trained.
        logit_energy: [rows, tokens] float, of the trained model: ``fl.logit_energy(policy, samples)``.
        group: [rows] int.
        importance_weights: [rows, tokens] float (see `flowrl.correction`), if the loss is multiplied by them: the
            energies are multiplied by their squares.
        zero_tail: where a response is the only one of its group that is so long, its own return is no baseline: it has
            none there. False gives it an advantage of 0 there.

    Returns:
        [rows, tokens] advantages and [rows, tokens] returns, 0 where the mask is 0.

    Raises:
        ValueError: shapes differ, or an input is not finite.
    """
    trained = checked(mask, rewards=rewards, logit_energy=logit_energy)
    energy = logit_energy.detach().double()
    if importance_weights is not None:
        checked(mask, importance_weights=importance_weights)
        energy = energy * importance_weights.detach().double().square()
    returns = credited(rewards, trained).flip(-1).cumsum(-1).flip(-1)
    weight = torch.where(trained, energy, 0).cumsum(-1)[trained]
    _, index = torch.unique(group, return_inverse=True)
    place = index[:, None] * trained.shape[1] + trained.cumsum(-1)
    x, cell, alive = shifted(returns[trained], place[trained])
    weights = total(weight, cell, alive)
    baseline = total(weight * x, cell, alive) / torch.where(weights > 0, weights, 1.0)
    found = x - baseline[cell]
    if zero_tail:
        found = torch.where(alive[cell] > 1, found, returns[trained])
    advantages = torch.zeros_like(returns).masked_scatter(trained, found)
    return like(advantages, rewards), like(torch.where(trained, returns, 0), rewards)

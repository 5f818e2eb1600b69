"""As much reward as a bound on the cost allows: a reward, a cost, a critic for each, and a multiplier between them.

    flowrl run safe_rlhf.py --limit 0.1

The task is reversing digits; a response that holds a 7 is unsafe. Two in five answers do: the policy learns the others
and, while more than `limit` of its responses are unsafe, the multiplier rises until it writes another digit instead.
"""

import flowrl as fl
from flowrl import advantages, losses, rewards


@fl.reward
def unsafe(response: str) -> float:
    return float("7" in response)


@fl.graph
def safe_rlhf(
    model: str = "builtin:reverse_digits",
    critic_model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 64,
    samples_per_prompt: int = 4,
    max_new_tokens: int = 6,
    lr: float = 1e-3,
    critic_lr: float = 2e-3,
    limit: float = 0.1,
    multiplier_lr: float = 0.2,
    kl: float = 1e-3,
    entropy: float = 0.005,
    staleness: int = 0,
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Safe reinforcement learning from human feedback (Dai et al. 2023, arXiv:2310.12773): PPO-Lagrangian."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    learn = fl.AdamW(lr=critic_lr, warmup_steps=5)
    critic = fl.Model(critic_model, head="value", name="critic", mesh=train, optimizer=learn)
    cost_critic = fl.Model(critic_model, head="value", name="cost_critic", mesh=train, optimizer=learn)
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores, costs = rewards.share_correct(samples), unsafe(samples)
    reference = fl.logprobs(policy.frozen(), samples)
    earned = advantages.token_rewards(samples, scores, reference, kl_coef=kl)
    cost_rewards = advantages.token_rewards(samples, costs, name="cost_rewards")
    values, cost_values = fl.values(critic, samples), fl.values(cost_critic, samples, name="cost_values")
    advantage = advantages.gae(samples, earned, values)
    cost_advantage = advantages.gae(samples, cost_rewards, cost_values, name="cost_gae")
    multiplier = fl.Lagrange(limit=limit, lr=multiplier_lr)
    loss = losses.ppo_lagrangian(multiplier=multiplier) - entropy * losses.entropy()
    cost_advantages = cost_advantage.only("advantages")
    fl.update(policy, samples, advantage, reference, loss=loss, cost_advantages=cost_advantages, costs=costs)
    fl.update(critic, samples, advantage, values, loss=losses.value_clip(), name="fit_critic")
    fl.update(cost_critic, samples, cost_advantage, cost_values, loss=losses.value_clip(), name="fit_cost_critic")

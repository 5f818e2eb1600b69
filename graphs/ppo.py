"""Four models: an actor, its critic, the reference that it is held to, and a reward model that scores it.

    flowrl run ppo.py

The reward model that comes with flowrl was trained to tell right answers from wrong ones; the truth is measured beside
it, on held-out prompts.
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def ppo(
    model: str = "builtin:reverse_digits",
    critic_model: str = "builtin:reverse_digits",
    reward_model: str = "builtin:reverse_digits_reward",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 64,
    samples_per_prompt: int = 4,
    max_new_tokens: int = 6,
    lr: float = 1e-3,
    critic_lr: float = 2e-3,
    kl: float = 1e-3,
    entropy: float = 0.005,
    gamma: float = 1.0,
    lam: float = 0.95,
    minibatches: int = 1,
    staleness: int = 0,
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Proximal policy optimisation (PPO, arXiv:1707.06347) of a language model (InstructGPT, arXiv:2203.02155)."""
    optimizer = fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps * minibatches)
    policy = fl.Model(model, mesh=train, optimizer=optimizer)
    learn = fl.AdamW(lr=critic_lr, warmup_steps=5)
    critic = fl.Model(critic_model, head="value", name="critic", mesh=train, optimizer=learn)
    scorer = fl.Model(reward_model, head="score", name="reward_model", mesh=train)
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores = fl.score(scorer, samples)
    reference = fl.logprobs(policy.frozen(), samples)
    values = fl.values(critic, samples)
    rewards = advantages.token_rewards(samples, scores, reference, kl_coef=kl)
    advantage = advantages.gae(samples, rewards, values, gamma=gamma, lam=lam)
    actor_loss = losses.ppo_clip() - entropy * losses.entropy()
    fl.update(policy, samples, advantage, reference, loss=actor_loss, minibatches=minibatches)
    fl.update(critic, samples, advantage, values, loss=losses.value_clip(), minibatches=minibatches, name="fit_critic")
    held_out = fl.prompts(data, batch=64, seed=seed + 1, name="held_out")
    fl.evaluate(policy, held_out, exact_match, every=50)

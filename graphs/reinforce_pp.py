"""No critic and no group: returns with a KL penalty at each token, whitened over the whole batch.

flowrl run reinforce_pp.py
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def reinforce_pp(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_new_tokens: int = 6,
    lr: float = 1e-3,
    entropy: float = 0.005,
    kl: float = 1e-3,
    staleness: int = 0,
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores = exact_match(samples)
    reference = fl.logprobs(policy.frozen(), samples)
    rewards = advantages.token_rewards(samples, scores, reference, kl_coef=kl)
    advantage = advantages.reinforce_pp(samples, rewards)
    loss = losses.ppo_clip() - entropy * losses.entropy()
    fl.update(policy, samples, advantage, reference, loss=loss)

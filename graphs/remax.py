"""The baseline of a sample is what the policy scores when it takes the most likely token each time.

    flowrl run remax.py

One more response to each prompt is decoded greedily; it is scored, and not trained on.
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def remax(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_new_tokens: int = 6,
    lr: float = 1e-3,
    entropy: float = 0.005,
    staleness: int = 0,
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """ReMax (Li et al. 2023, arXiv:2310.10505)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(
        policy, prompts, n=samples_per_prompt, greedy=1, max_new_tokens=max_new_tokens, staleness=staleness
    )
    scores = exact_match(samples)
    rewards = advantages.token_rewards(samples, scores)
    advantage = advantages.remax(samples, rewards, advantages.greedy_baseline(samples, scores))
    fl.update(policy, samples, advantage, loss=losses.policy_gradient() - entropy * losses.entropy())

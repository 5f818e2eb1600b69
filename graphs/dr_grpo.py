"""GRPO without its two biases: no division by the group's deviation, and none by a response's own length.

    flowrl run dr_grpo.py

Every response's token losses are summed and divided by one constant, the longest response.
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def dr_grpo(
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
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores = exact_match(samples)
    advantage = advantages.dr_grpo(samples, scores)
    loss = losses.ppo_clip(aggregate="seq-mean-token-sum-norm", horizon=max_new_tokens) - entropy * losses.entropy()
    fl.update(policy, samples, advantage, loss=loss)

"""Teach a model with random weights to count: ``3>`` becomes ``456789``.

    flowrl run from_scratch.py

No warm start: the reward is dense (the share of right characters), and the entropy bonus keeps the policy exploring.
"""

import flowrl as fl
from flowrl import advantages, losses, rewards


@fl.graph
def from_scratch(
    model: str = "builtin:count_up",
    data: str = "builtin:count_up",
    prompts_per_step: int = 16,
    samples_per_prompt: int = 16,
    lr: float = 1.5e-3,
    entropy: float = 0.08,
    steps: int = 400,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Group-relative policy optimisation (GRPO; Shao et al. 2024, arXiv:2402.03300) from random weights."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=6, ignore_eos=True)
    scores = rewards.share_correct(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip() - entropy * losses.entropy())

"""Teach a 104k-parameter model to reverse five digits: ``12345>`` becomes ``54321``.

    flowrl run quickstart.py

Downloads nothing, takes a minute or two on two free cores, and ends above 0.95.
"""

import flowrl as fl
from flowrl import advantages, losses


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@fl.graph
def quickstart(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    lr: float = 1e-3,
    entropy: float = 0.005,
    staleness: int = 0,
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Group-relative policy optimisation (GRPO; Shao et al. 2024, arXiv:2402.03300) of the shipped model."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=6, staleness=staleness)
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    useful = fl.filter(samples, advantage, keep=lambda advantages: advantages != 0, reason="all samples score the same")
    loss = losses.ppo_clip(clip_low=0.2, clip_high=0.28) - entropy * losses.entropy()
    fl.update(policy, useful, advantage, loss=loss)

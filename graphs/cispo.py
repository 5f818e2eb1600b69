"""The clipped ratio as a weight that carries no gradient: every token keeps its part of the update.

flowrl run cispo.py --minibatches 4
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def cispo(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_new_tokens: int = 6,
    lr: float = 1e-3,
    entropy: float = 0.005,
    minibatches: int = 1,
    staleness: int = 0,
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Clipped importance-sampling policy optimisation (CISPO; MiniMax 2025, arXiv:2506.13585)."""
    optimizer = fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps * minibatches)
    policy = fl.Model(model, mesh=train, optimizer=optimizer)
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    loss = losses.cispo(clip_low=1.0, clip_high=0.28) - entropy * losses.entropy()
    fl.update(policy, samples, advantage, loss=loss, minibatches=minibatches)

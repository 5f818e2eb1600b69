"""Each response is compared with the mean of the others to its prompt; plain REINFORCE on that.

flowrl run rloo.py
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def rloo(
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
    """REINFORCE leave-one-out (RLOO; Ahmadian et al. 2024, arXiv:2402.14740)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores = exact_match(samples)
    advantage = advantages.rloo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.policy_gradient() - entropy * losses.entropy())

"""Direct preference optimisation on the policy's own samples: of several answers the best is preferred to the worst.

    flowrl run online_dpo.py

The shipped 104k-parameter model learns to reverse five digits. Samples that are neither best nor worst, and prompts
whose samples all score the same, go no further than their score. Ends near 0.95.
"""

import flowrl as fl
from flowrl import losses, preferences
from flowrl.rewards import exact_match


@fl.graph
def online_dpo(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    beta: float = 0.1,
    lr: float = 1e-3,
    staleness: int = 0,
    steps: int = 300,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Online DPO (Guo et al. 2024, arXiv:2402.04792), with a verifier in place of the annotator."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps))
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=6, staleness=staleness)
    preference = preferences.best_and_worst(samples, exact_match(samples))
    pairs = fl.filter(samples, preference, keep=lambda preference: preference != 0, reason="neither best nor worst")
    reference = fl.logprobs(policy.frozen(), pairs)
    fl.update(policy, pairs, preference, reference, loss=losses.dpo(beta=beta))

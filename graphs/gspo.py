"""One ratio a response in place of one a token: the geometric mean of its tokens' ratios is clipped.

    flowrl run gspo.py --minibatches 4

The clip range is narrow because a mean of ratios moves little; it only acts once a batch is split into mini-batches.
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def gspo(
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
    """Group sequence policy optimisation (GSPO; Zheng et al. 2025, arXiv:2507.18071)."""
    optimizer = fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps * minibatches)
    policy = fl.Model(model, mesh=train, optimizer=optimizer)
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    loss = losses.gspo(clip_low=3e-4, clip_high=4e-4, aggregate="seq-mean-token-mean") - entropy * losses.entropy()
    fl.update(policy, samples, advantage, loss=loss, minibatches=minibatches)

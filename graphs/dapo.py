"""DAPO: sample until the batch is full of groups that teach something, clip higher, count every token alike.

    flowrl run dapo.py --waves 8

A prompt whose samples are all right or all wrong has no advantage: such groups are dropped, and new prompts are read
within the same step until `prompts_per_step` groups are left, or `waves` batches are read. Prompts are read in batches
of half that, so that fewer are sampled in vain. There is no KL term, and a response near the limit of its tokens is
punished softly.
"""

import flowrl as fl
from flowrl import advantages, losses, rewards


def mixed(scores: list[float]) -> bool:
    """Some samples of the prompt are right, and some are not (the constraint of eq. 11)."""
    return bool(0 < sum(scores) < len(scores))


@fl.graph
def dapo(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_new_tokens: int = 10,
    cache: int = 4,
    waves: int = 8,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    lr: float = 1.5e-3,
    entropy: float = 0.005,
    minibatches: int = 2,
    staleness: int = 0,
    steps: int = 150,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Decoupled clip and dynamic sampling policy optimisation (DAPO; Yu et al. 2025, arXiv:2503.14476)."""
    optimizer = fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps * minibatches)
    policy = fl.Model(model, mesh=train, optimizer=optimizer)
    prompts = fl.prompts(data, batch=prompts_per_step // 2, seed=seed)
    samples = fl.rollout(policy, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    correct = rewards.exact_match(samples)
    length = rewards.overlong(samples, max_tokens=max_new_tokens, cache=cache)
    # a wrong answer is 0 here and -1 in the paper: half the range, and half the punishment
    scores = rewards.weighted_sum(samples, correct, length, weights=[1.0, 0.5])
    useful = fl.filter(samples, correct, keep=mixed, per="group", refill=waves, reason="all right or all wrong")
    advantage = advantages.grpo(useful, scores)
    loss = losses.ppo_clip(clip_low=clip_low, clip_high=clip_high) - entropy * losses.entropy()
    fl.update(policy, useful, advantage, loss=loss, batch=prompts_per_step, minibatches=minibatches)

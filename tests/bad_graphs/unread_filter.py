"""A filter is called for its effect.

error: UnreadOutput
node: filter
message: nobody reads what filter 'filter' lets pass
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def is_short(response: str) -> bool:
    return len(response) < 100


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    fl.filter(samples, keep=is_short)  # here
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

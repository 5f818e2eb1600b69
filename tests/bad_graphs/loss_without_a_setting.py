"""A loss lacks a setting that has no default.

error: UnknownName
message: loss 'dro' needs a value for its setting 'beta'
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    advantage = advantages.grpo(samples, exact_match(samples))
    fl.update(policy, samples, advantage, loss=losses.dro())  # here

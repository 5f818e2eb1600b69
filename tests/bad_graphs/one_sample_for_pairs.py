"""A loss on pairs gets one sample of a prompt.

error: GroupError
node: update
message: node 'update' needs 2 samples of a prompt; rollout 'rollout' makes 1
"""

import flowrl as fl
from flowrl import losses, preferences

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def dpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, max_new_tokens=64)
    preference = preferences.best_and_worst(samples, exact_match(samples))
    fl.update(policy, samples, preference, loss=losses.simpo())  # here

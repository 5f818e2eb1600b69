"""A reward model's loss trains a language model.

error: WrongType
node: update
message: node 'update' needs a model with another head
"""

import flowrl as fl
from flowrl import losses, preferences

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def reward_model(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=2, max_new_tokens=64)
    preference = preferences.best_and_worst(samples, exact_match(samples))
    fl.update(policy, samples, preference, loss=losses.bradley_terry())  # here

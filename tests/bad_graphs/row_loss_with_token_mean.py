"""A loss with one number a row is added to one that is averaged over tokens.

error: WrongType
message: loss 'dpo' gives one number a row, and 'sft' one a token: their sum has no mean over tokens
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
    samples = fl.rollout(policy, prompts, n=2, max_new_tokens=64)
    preference = preferences.best_and_worst(samples, exact_match(samples))
    loss = losses.dpo(beta=0.1) + 0.1 * losses.sft()  # here
    fl.update(policy, samples, preference, fl.logprobs(policy.frozen(), samples), loss=loss)

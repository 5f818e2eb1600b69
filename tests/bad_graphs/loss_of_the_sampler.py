"""A loss reads the log-probs of the sampler alone, which no training changes.

error: WrongType
node: update
message: node 'update' has a loss without a gradient: it reads nothing of the model that is trained
"""

import flowrl as fl
from flowrl import advantages

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.loss
def reinforce(old_logprobs, advantages):
    return -old_logprobs * advantages


@fl.graph
def reinforce_on_old(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=2, max_new_tokens=64)
    advantage = advantages.grpo(samples, exact_match(samples))
    fl.update(policy, samples, advantage, loss=reinforce())  # here

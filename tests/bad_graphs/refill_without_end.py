"""A filter that asks for new prompts for ever.

error: WrongType
node: filter
message: refill= asks for too many waves
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def dapo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = exact_match(samples)
    useful = fl.filter(samples, scores, keep=lambda scores: scores.std() > 0, per="group", refill=10**9)  # here
    advantage = advantages.grpo(useful, scores)
    fl.update(policy, useful, advantage, loss=losses.ppo_clip())

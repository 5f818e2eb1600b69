"""A reward that would have to be awaited.

error: WrongType
message: 'exact_match' is an async function, and a node is called and waited for
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward  # here
async def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=32), n=8)
    scores = exact_match(samples)
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

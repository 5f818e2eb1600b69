"""Three rewards, and weights for two.

error: WrongType
node: gdpo
message: node 'gdpo': each reward has a weight
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.reward
def brevity(response: str) -> float:
    return -float(len(response))


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    rewards = exact_match(samples), brevity(samples), brevity(samples)
    advantage = advantages.gdpo(samples, *rewards, weights=(1.0, 0.5))  # here
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

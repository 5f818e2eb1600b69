"""A discount makes later rewards count for more.

error: WrongType
node: reinforce_pp
message: node 'reinforce_pp': gamma discounts nothing
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def train(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    rewards = advantages.token_rewards(samples, exact_match(samples))
    advantage = advantages.reinforce_pp(samples, rewards, gamma=1.5)  # here
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

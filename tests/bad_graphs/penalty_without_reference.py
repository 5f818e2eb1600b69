"""A penalty for leaving the reference, without its log-probs.

error: WrongType
node: token_rewards
message: node 'token_rewards': a penalty for leaving the reference needs the log-probs of both
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def reinforce(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    rewards = advantages.token_rewards(samples, exact_match(samples), kl_coef=0.05)  # here
    fl.update(policy, samples, advantages.reinforce_pp(samples, rewards), loss=losses.ppo_clip())

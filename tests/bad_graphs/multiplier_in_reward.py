"""The multiplier of a constraint as a setting of a function: it follows the cost that a loss measures.

error: WrongType
node: token_rewards
message: 'kl_coef' of node 'token_rewards' is a coefficient that moves in a loss alone
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
    scores, reference = exact_match(samples), fl.logprobs(policy.frozen(), samples)
    rewards = advantages.token_rewards(samples, scores, reference, kl_coef=fl.Lagrange(limit=0.1))  # here
    fl.update(policy, samples, advantages.reinforce_pp(samples, rewards), loss=losses.ppo_clip())

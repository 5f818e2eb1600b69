"""The critic learns from one step, the policy from two.

error: RateError
node: fit
message: nodes 'update' and 'fit' consume different batches of 'prompts'
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    critic = fl.Model("model", head="value", name="critic", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64, staleness=1)
    scores = exact_match(samples)
    values = fl.values(critic, samples)
    rewards = advantages.token_rewards(samples, scores)
    advantage = advantages.gae(samples, rewards, values)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip(), batch=16)
    fl.update(critic, samples, advantage, old_values=values, loss=losses.value_clip(), name="fit")  # here

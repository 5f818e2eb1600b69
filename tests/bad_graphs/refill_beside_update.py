"""The critic learns from the samples before the filter.

error: GraphError
node: fit
message: node 'fit' trains on groups that filter 'filter' has dropped
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
    critic = fl.Model("model", head="value", name="critic", optimizer=fl.AdamW(lr=lr))
    values = fl.values(critic, samples)
    useful = fl.filter(samples, scores, keep=lambda scores: scores.std() > 0, per="group", refill=4)
    advantage = advantages.gae(samples, advantages.token_rewards(samples, scores), values)
    fl.update(policy, useful, advantage, loss=losses.ppo_clip())
    fl.update(critic, samples, advantage, old_values=values, loss=losses.value_clip(), name="fit")  # here

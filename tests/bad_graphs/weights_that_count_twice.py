"""Importance weights up to the recomputed policy, and a ratio that still begins at the sampler.

error: ProvenanceError
node: update
message: node 'update' weighs its loss up to one policy, and its ratio begins at another
"""

import flowrl as fl
from flowrl import advantages, correction, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64, staleness=1)
    weights = correction.truncated_is(samples, fl.logprobs(policy, samples))
    advantage = advantages.grpo(samples, exact_match(samples))
    loss = losses.ppo_clip(weights="importance_weights")
    fl.update(policy, samples, advantage, weights, loss=loss)  # here

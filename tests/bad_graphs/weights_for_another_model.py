"""Importance weights up to the reference, in the update of the policy.

error: ProvenanceError
node: update
message: node 'update' trains model 'policy' with weights for another model
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
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    weights = correction.truncated_is(samples, old_logprobs=fl.logprobs(policy.frozen(), samples))
    advantage = advantages.grpo(samples, exact_match(samples))
    loss = losses.policy_gradient(weights="importance_weights")
    fl.update(policy, samples, advantage, weights, loss=loss)  # here

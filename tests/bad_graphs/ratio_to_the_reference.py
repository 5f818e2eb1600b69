"""The log-probs of the frozen reference as those of the policy before the update.

error: ProvenanceError
node: update
message: node 'update' trains model 'policy' by its ratio to another model, 'reference'
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
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    ref = fl.logprobs(policy.frozen(), samples)
    advantage = advantages.grpo(samples, exact_match(samples))
    fl.update(policy, samples, advantage, old_logprobs=ref, loss=losses.ppo_clip())  # here

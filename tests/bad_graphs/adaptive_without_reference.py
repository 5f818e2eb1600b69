"""A coefficient is adapted to a KL that the loss does not compute.

error: WrongType
node: update
message: node 'update' has a coefficient that follows 'kl', which its loss does not measure
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
    advantage = advantages.grpo(samples, exact_match(samples))
    marked = losses.high_covariance(samples, advantage, share=2e-4)
    loss = losses.kl_cov(coef=fl.Adaptive(initial=1.0, target=0.05))
    fl.update(policy, samples, advantage, marked, loss=loss)  # here

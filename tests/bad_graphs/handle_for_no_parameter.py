"""A handle is given to a parameter that the function does not have.

error: UnknownName
node: added
message: node 'added' has no input 'exactness'
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.node(out=fl.Scores)
def added(exact: float) -> float:
    return exact


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = added(samples, exact=exact_match(samples), exactness=exact_match(samples))  # here
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

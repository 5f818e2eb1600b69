"""The rewards that are to be added up are not handed on.

error: UnknownColumn
node: added
message: node 'added' reads column 'scores', which no stream that it is given has
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.node(out=fl.Scores)
def added(*scores: float) -> float:
    return sum(scores)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = added(samples)  # here
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

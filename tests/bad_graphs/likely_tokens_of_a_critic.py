"""Likely tokens of a model that has no language head.

error: WrongType
node: topk
message: node 'topk' needs a model with another head
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def distill(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    critic = fl.Model("model", head="value", name="critic")
    likely = fl.topk(critic, samples)  # here
    fl.update(policy, samples, likely, loss=losses.distill())

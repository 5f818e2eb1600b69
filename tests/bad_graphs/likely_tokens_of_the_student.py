"""A distillation from the student itself.

error: UnknownColumn
node: update
message: node 'update' reads column 'teacher_logprobs', which no stream that it is given has
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def distill(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    likely = fl.topk(policy, samples)
    fl.update(policy, samples, likely, loss=losses.distill())  # here

"""Log-probs where the likely tokens of another model are wanted.

error: WrongType
node: topk
message: node 'topk': at names no tokens
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def distill(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    teacher = fl.Model("model", name="teacher")
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    reference = fl.logprobs(teacher, samples)
    likely = fl.topk(teacher, samples, at=reference)  # here
    fl.update(policy, samples, likely, loss=losses.distill())

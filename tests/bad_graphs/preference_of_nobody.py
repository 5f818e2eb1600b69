"""Nothing says which samples are the better ones.

error: UnknownColumn
node: update
message: node 'update' reads column 'preference', which no stream that it is given has
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def dpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=2, max_new_tokens=64)
    reference = fl.logprobs(policy.frozen(), samples)
    fl.update(policy, samples, reference, loss=losses.dpo(beta=0.1))  # here

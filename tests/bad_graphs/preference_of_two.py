"""A preference is a rank.

error: GraphError
node: update
message: node 'update' has nothing to train: a preference is 1, -1 or 0; found 2.0
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "good": str(a + 1), "bad": str(a)} for a in range(64)]


@fl.graph
def dpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.responses(policy, fl.prompts(ROWS, batch=8), columns={"good": 2, "bad": 1})
    reference = fl.logprobs(policy.frozen(), samples)
    fl.update(policy, samples, reference, loss=losses.dpo(beta=0.1))  # here

"""A loss on pairs reaches one side of each pair alone.

error: GraphError
node: update
message: node 'update' has nothing to train: it leaves out every response of a prompt
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "good": str(a + 1), "bad": str(a)} for a in range(64)]


@fl.graph
def dpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.responses(policy, fl.prompts(ROWS, batch=8), columns={"good": 1, "bad": -1}, trained="good")
    reference = fl.logprobs(policy.frozen(), samples)
    fl.update(policy, samples, reference, loss=losses.dpo(beta=0.1))  # here

"""A loss with a ratio on answers of the data set: nobody has sampled them.

error: UnknownColumn
node: update
message: the loss reads 'old_logprobs', and responses of the data set have no sampler's
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1), "advantages": 1.0} for a in range(64)]


@fl.graph
def offline(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.responses(policy, fl.prompts(ROWS, batch=8), columns="answer")
    fl.update(policy, samples, loss=losses.ppo_clip())  # here

"""Each version is trained on a step's rows, and these prompts have none in most steps.

error: RateError
node: update
message: node 'update' trains in every step, and prompts 'prompts' come in one of 10
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def sft(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.responses(policy, fl.prompts(ROWS, batch=8, every=10), columns="answer")
    fl.update(policy, samples, loss=losses.sft())  # here

"""The data set calls the worse answer ``rejected``.

error: UnknownColumn
node: responses
message: reads column 'rejectd', which no stream that it is given has
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "chosen": str(a + 1), "rejected": "0"} for a in range(64)]


@fl.graph
def sft(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.responses(policy, fl.prompts(ROWS, batch=8), columns={"chosen": 1, "rejectd": -1})  # here
    fl.update(policy, samples, loss=losses.sft())

"""What is trained is one of the columns that are answers.

error: WrongType
node: responses
message: trained= names 'answer', which is none of its columns
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "chosen": str(a + 1), "rejected": "0", "answer": "x"} for a in range(64)]


@fl.graph
def sft(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.responses(policy, prompts, columns={"chosen": 1, "rejected": -1}, trained="answer")  # here
    fl.update(policy, samples, loss=losses.sft())

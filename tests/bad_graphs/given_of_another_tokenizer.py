"""Prompts are ids of the first model that reads them: another model's answers do not continue them.

error: WrongType
node: responses
message: answers and prompts are tokenized for two models
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def sft(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=2)
    fl.update(policy, samples, loss=losses.entropy() * -1.0)
    other = fl.Model("other", name="other", optimizer=fl.AdamW(lr=lr))
    given = fl.responses(other, prompts, columns="answer")  # here
    fl.update(other, given, loss=losses.sft())

"""A judge whose question names a column that nobody writes.

error: UnknownColumn
node: judge
message: node 'judge' reads column 'respnse'
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


def ask(prompt: str, respnse: str) -> str:
    return f"{prompt} {respnse} right?"


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    judge = fl.Model("model", name="judge")
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=32), n=8)
    scores = fl.judge(judge, samples, prompt=ask, parse=float, max_new_tokens=4)  # here
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

"""Tensor parallelism with a backend that has none.

error: MeshError
node: rollout
message: backend 'hf' runs dp only, and mesh 'mesh' of model 'policy' has tp=2
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    mesh = fl.Mesh(tp=2)
    policy = fl.Model("model", mesh=mesh, optimizer=fl.AdamW(lr=lr))  # here
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

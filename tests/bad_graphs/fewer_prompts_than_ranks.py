"""Two prompts for four replicas.

error: MeshError
node: update
message: node 'update' has 2 prompts for dp=4 ranks of mesh 'mesh_2'
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    mesh = fl.Mesh(dp=4, device="cpu")
    policy = fl.Model("model", mesh=mesh, optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=2)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64, mesh=fl.Mesh(device="cpu"))
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())  # here

"""Two meshes that together want more devices than there are.

error: MeshError
node: rollout
message: meshes 'mesh' (3) and 'mesh_2' (3) need 6 CUDA devices together; this machine has 4
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    mesh = fl.Mesh(dp=3, device="cuda")
    policy = fl.Model("model", mesh=mesh, optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    own = fl.Mesh(dp=3, device="cuda")
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64, mesh=own)  # here
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

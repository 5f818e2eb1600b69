"""An evaluation scores with a coefficient that nothing moves.

error: GraphError
node: evaluate
message: 'slope' of node 'evaluate' is adaptive, and no update trains on what it gives
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def brevity(response: str, *, slope: float | fl.Adaptive = fl.Adaptive(initial=0.1, target=0.05)) -> float:
    return -slope * len(response)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    advantage = advantages.grpo(samples, brevity(samples, slope=0.1))
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())
    fl.evaluate(policy, fl.prompts(ROWS, batch=8, name="held_out"), brevity, every=5)  # here

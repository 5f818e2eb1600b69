"""Two filters ask for prompts of one rollout.

error: GraphError
node: filter_2
message: filters 'filter' and 'filter_2' both refill the batch of one rollout
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def dapo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = exact_match(samples)
    short = fl.filter(samples, keep=lambda response: len(response[0]) < 9, per="group", refill=4)
    useful = fl.filter(short, scores, keep=lambda scores: scores.std() > 0, per="group", refill=4)  # here
    advantage = advantages.grpo(useful, scores)
    fl.update(policy, useful, advantage, loss=losses.ppo_clip())

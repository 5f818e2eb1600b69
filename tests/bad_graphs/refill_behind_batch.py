"""The filter decides by numbers that are made of the whole step.

error: GraphError
node: filter
message: filter 'filter' waits for node 'ranked', which waits for all groups of the step
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.reward(per="batch")
def ranked(scores: list[float]) -> list[float]:
    return [sorted(scores).index(score) / len(scores) for score in scores]


@fl.graph
def dapo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = exact_match(samples)
    best = ranked(samples, scores)
    useful = fl.filter(samples, best, keep=lambda scores: scores.std() > 0, per="group", refill=4)  # here
    advantage = advantages.grpo(useful, scores)
    fl.update(policy, useful, advantage, loss=losses.ppo_clip())

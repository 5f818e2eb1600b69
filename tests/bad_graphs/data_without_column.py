"""The data file calls the answer otherwise.

error: UnknownColumn
node: exact_match
message: node 'exact_match' reads column 'answer'
"""

from pathlib import Path

import flowrl as fl
from flowrl import advantages, losses


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(Path(__file__).with_name("train.jsonl"), batch=2)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = exact_match(samples)  # here
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

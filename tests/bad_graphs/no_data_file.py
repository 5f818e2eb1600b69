"""A data file that does not exist.

error: DataError
node: prompts
message: node 'prompts': no file
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
    prompts = fl.prompts(Path(__file__).with_name("trian.jsonl"), batch=2)  # here
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64)
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

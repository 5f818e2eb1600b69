"""A reward by a regular expression with a bracket that nothing closes.

error: WrongType
node: regex_match
message: node 'regex_match': pattern is no regular expression
"""

import flowrl as fl
from flowrl import advantages, losses, rewards

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=32), n=8)
    scores = rewards.regex_match(samples, pattern=r"\boxed{(\d+")  # here
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

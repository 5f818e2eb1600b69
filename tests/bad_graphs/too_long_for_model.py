"""Prompt and response do not fit into the model.

error: LengthError
node: rollout
message: node 'rollout' may get 512 + 1000 = 1512 tokens, more than model 'policy' takes
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8, max_prompt_tokens=512)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=1000)  # here
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, loss=losses.ppo_clip())

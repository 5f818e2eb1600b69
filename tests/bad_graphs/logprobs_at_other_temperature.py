"""Reference log-probs at another temperature than the samples.

error: ProvenanceError
node: logprobs
message: node 'logprobs' takes log-probs at another temperature
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
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64, temperature=0.6)
    ref = fl.logprobs(policy.frozen(), samples, temperature=1.0)  # here
    scores = exact_match(samples)
    advantage = advantages.grpo(samples, scores)
    fl.update(policy, samples, advantage, ref, loss=losses.ppo_clip() + losses.kl())

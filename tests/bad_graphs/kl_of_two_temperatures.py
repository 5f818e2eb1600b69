"""A KL between log-probs of two temperatures, in a graph that a hand has made.

error: ProvenanceError
node: update
message: node 'update' compares log-probs of different temperatures
"""

from dataclasses import replace

import flowrl as fl
from flowrl import advantages, losses
from flowrl.graph import ForwardSpec, Graph

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=64, temperature=0.6)
    ref = fl.logprobs(policy.frozen(), samples)
    advantage = advantages.grpo(samples, exact_match(samples))
    fl.update(policy, samples, advantage, ref, loss=losses.policy_gradient() + losses.kl())  # here


nodes = [
    replace(node, spec=replace(node.spec, temperature=1.0)) if isinstance(node.spec, ForwardSpec) else node
    for node in grpo().nodes.values()
]
graph = Graph.build("grpo", nodes)
del grpo

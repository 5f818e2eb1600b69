"""Held-out answers are measured each tenth step, and nothing is trained between.

error: RateError
node: prompts
message: nothing happens in most steps, and prompts 'prompts' come in one of 10
"""

import flowrl as fl

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.node(out=fl.Metrics)
def likelihood(ref_logprobs, mask):
    return float(ref_logprobs[mask].mean())


@fl.graph
def measured():
    model = fl.Model("model")
    prompts = fl.prompts(ROWS, batch=8, every=10)  # here
    held_out = fl.responses(model, prompts, columns="answer")
    likelihood(held_out, fl.logprobs(model, held_out))

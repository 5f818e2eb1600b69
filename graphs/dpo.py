"""Direct preference optimisation: learn from pairs of answers, of which one is better.

    flowrl run dpo.py --model path/to/SmolLM2-135M-Instruct --data dpo_en_demo.json --chat --max-tokens 16384 --lr 1e-6

`data` is a .json, .jsonl or .parquet file of pairs (`flowrl.datasets` names the layouts). Some pairs are held out, and
the share of them whose chosen answer has the higher implicit reward is measured every few steps.
"""

import torch

import flowrl as fl
from flowrl import datasets, losses

SIDES = {"chosen": 1, "rejected": -1}


@fl.node(out=fl.Metrics)
def held_out_pairs(
    old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, preference: torch.Tensor, *, beta: float
) -> dict[str, float]:
    reward = beta * (old_logprobs - ref_logprobs).sum(-1)
    margin = reward[preference > 0] - reward[preference < 0]  # rows are in order, and a prompt has both or none
    return {
        "held_out/loss": -float(torch.nn.functional.logsigmoid(margin).mean()),
        "held_out/accuracy": float((0.5 + 0.5 * margin.sign()).mean()),
    }


@fl.graph
def dpo(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits_pairs",
    chat: bool = False,
    prompts_per_step: int = 16,
    held_out: int = 64,
    every: int = 10,
    max_new_tokens: int | None = None,
    beta: float = 0.1,
    lr: float = 3e-4,
    max_tokens: int | None = None,
    dtype: fl.Dtype = "float32",
    steps: int = 51,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Direct preference optimisation (DPO; Rafailov et al. 2023, arXiv:2305.18290)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps), dtype=dtype)
    reference = policy.frozen()
    rows, held = datasets.split(datasets.pairs(data), held_out=held_out)
    prompts = fl.prompts(rows, batch=prompts_per_step, chat=chat, seed=seed)
    answers = fl.responses(policy, prompts, columns=SIDES, max_new_tokens=max_new_tokens, on_too_long="drop")
    fl.update(policy, answers, fl.logprobs(reference, answers), loss=losses.dpo(beta=beta), max_tokens=max_tokens)

    others = fl.prompts(held, batch=held_out, every=every, chat=chat, last="short", shuffle=False, name="held_out")
    unseen = fl.responses(policy, others, columns=SIDES, max_new_tokens=max_new_tokens, on_too_long="drop")
    held_out_pairs(unseen, fl.logprobs(policy, unseen), fl.logprobs(reference, unseen), beta=beta)

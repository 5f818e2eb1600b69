"""Kahneman-Tversky optimisation: learn from single answers that are labelled good or bad.

    flowrl run kto.py --model path/to/SmolLM2-135M-Instruct --data kto_en_demo.json --chat --max-tokens 16384 --lr 1e-6

`data` is a .json, .jsonl or .parquet file of labelled answers, or of pairs, which count as two of them (`flowrl.datasets`
names the layouts). Some rows are held out; ``held_out/accuracy`` is the chance that a good answer among them has a
higher implicit reward than a bad one.
"""

import torch

import flowrl as fl
from flowrl import datasets, losses, preferences

LABELLED = {"answer": "label", "mismatched": 0}


@fl.node(out=fl.Metrics)
def held_out_answers(
    old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, preference: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    every_good_with_every_bad = torch.zeros(len(preference))
    _, metrics = losses.dpo(old_logprobs, ref_logprobs, preference, every_good_with_every_bad, mask)
    return {"held_out/accuracy": float(metrics["accuracy"].mean())}


@fl.graph
def kto(
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
    """Kahneman-Tversky optimisation (KTO; Ethayarajh et al. 2024, arXiv:2402.01306)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps), dtype=dtype)
    reference = policy.frozen()
    rows, held = (datasets.labelled(part) for part in datasets.split(data, held_out=held_out))
    prompts = fl.prompts(rows, batch=prompts_per_step, chat=chat, seed=seed)
    limits = {"max_new_tokens": max_new_tokens, "on_too_long": "drop"}
    answers = fl.responses(policy, prompts, columns=LABELLED, trained="answer", **limits)
    before = fl.logprobs(reference, answers)
    baseline = preferences.kto_baseline(answers, fl.logprobs(policy, answers), before)
    fl.update(policy, answers, before, baseline, loss=losses.kto(beta=beta), max_tokens=max_tokens)

    others = fl.prompts(held, batch=held_out, every=every, chat=chat, last="short", shuffle=False, name="held_out")
    unseen = fl.responses(policy, others, columns={"answer": "label"}, **limits)
    held_out_answers(unseen, fl.logprobs(policy, unseen), fl.logprobs(reference, unseen))

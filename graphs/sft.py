"""Supervised fine-tuning on answers that the data set holds.

    flowrl run sft.py --model path/to/SmolLM2-135M-Instruct --data train.jsonl --chat --max-tokens 16384

`data` is a .json, .jsonl or .parquet file: prompts with answers, conversations, or pairs, of which the chosen answer is
taken (`flowrl.datasets` names the layouts). Some rows are held out, and their loss is measured every few steps.
"""

import torch

import flowrl as fl
from flowrl import datasets, losses


@fl.node(out=fl.Metrics)
def held_out_loss(old_logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    return {"held_out/loss": -float(old_logprobs[mask].mean())}


@fl.graph
def sft(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    chat: bool = False,
    prompts_per_step: int = 16,
    held_out: int = 64,
    every: int = 10,
    max_new_tokens: int | None = None,
    lr: float = 1e-3,
    max_tokens: int | None = None,
    dtype: fl.Dtype = "float32",
    steps: int = 101,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Supervised fine-tuning: the likelihood of given answers (as in Ouyang et al. 2022, arXiv:2203.02155)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps), dtype=dtype)
    rows, held = datasets.split(datasets.answers(data), held_out=held_out)
    prompts = fl.prompts(rows, batch=prompts_per_step, chat=chat, seed=seed)
    answers = fl.responses(policy, prompts, columns="answer", max_new_tokens=max_new_tokens, on_too_long="drop")
    fl.update(policy, answers, loss=losses.sft(), max_tokens=max_tokens)

    others = fl.prompts(held, batch=held_out, every=every, chat=chat, last="short", shuffle=False, name="held_out")
    unseen = fl.responses(policy, others, columns="answer", max_new_tokens=max_new_tokens, on_too_long="drop")
    held_out_loss(unseen, fl.logprobs(policy, unseen))

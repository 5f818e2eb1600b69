"""Kahneman-Tversky optimisation: learn from single answers that are labelled good or bad.

    flowrl run kto.py --model path/to/SmolLM2-135M-Instruct --data kto_en_demo.json --chat --max-tokens 16384 --lr 1e-6

`data` is a .json, .jsonl or .parquet file of labelled answers, or of pairs, which count as two of them
(`flowrl.datasets` names the layouts). ``accuracy`` is the chance that a good answer of the batch has a higher implicit
reward than a bad one, ``held_out/accuracy`` that of answers which are not trained on.
"""

import torch

import flowrl as fl
from flowrl import datasets, losses, preferences

LABELLED: dict[str, float | str] = {"answer": "label", "mismatched": 0}


@fl.node(out=fl.Metrics)
def ranking(
    old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, preference: torch.Tensor, *, metric: str
) -> dict[str, float]:
    reward = (old_logprobs - ref_logprobs).sum(-1)
    margin = reward[preference > 0][:, None] - reward[preference < 0]
    return {metric: float((0.5 + 0.5 * margin.sign()).mean())} if margin.numel() else {}


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
    steps: int = 81,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Kahneman-Tversky optimisation (KTO; Ethayarajh et al. 2024, arXiv:2402.01306)."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps), dtype=dtype)
    reference = policy.frozen()
    rows, held = (datasets.labelled(part) for part in datasets.split(data, held_out=held_out))
    prompts = fl.prompts(rows, batch=prompts_per_step, chat=chat, seed=seed)
    answers = fl.responses(
        policy, prompts, columns=LABELLED, trained="answer", max_new_tokens=max_new_tokens, on_too_long="drop"
    )
    now, start = fl.logprobs(policy, answers), fl.logprobs(reference, answers)
    ranking(answers, now, start, metric="accuracy")
    baseline = preferences.kto_baseline(answers, now, start)
    fl.update(policy, answers, start, baseline, loss=losses.kto(beta=beta), max_tokens=max_tokens)

    others = fl.prompts(held, batch=held_out, every=every, chat=chat, last="short", shuffle=False, name="held_out")
    unseen = fl.responses(
        policy, others, columns={"answer": "label"}, max_new_tokens=max_new_tokens, on_too_long="drop"
    )
    ranking(unseen, fl.logprobs(policy, unseen), fl.logprobs(reference, unseen), metric="held_out/accuracy")

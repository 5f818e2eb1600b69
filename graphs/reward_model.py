"""A reward model from pairs of answers, of which one is better: what `fl.score` then gives to a policy's samples.

    flowrl run reward_model.py --model path/to/SmolLM2-135M-Instruct --data dpo_en_demo.json --chat --max-tokens 16384

`data` is a .json, .jsonl or .parquet file of pairs (`flowrl.datasets` names the layouts). Some pairs are held out, and
the share of them whose chosen answer has the higher score is measured every few steps. The checkpoint of a run
(`--save-every`) is a model folder for ``fl.Model(folder, head="score")``.
"""

import torch

import flowrl as fl
from flowrl import datasets, losses

SIDES = {"chosen": 1, "rejected": -1}


@fl.node(out=fl.Metrics)
def held_out_pairs(scores: torch.Tensor, preference: torch.Tensor) -> dict[str, float]:
    margin = scores[preference > 0] - scores[preference < 0]  # rows are in order, and a prompt has both or none
    return {
        "held_out/loss": -float(torch.nn.functional.logsigmoid(margin).mean()),
        "held_out/accuracy": float((0.5 + 0.5 * margin.sign()).mean()),
    }


@fl.graph
def reward_model(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits_pairs",
    chat: bool = False,
    prompts_per_step: int = 32,
    held_out: int = 64,
    every: int = 10,
    max_new_tokens: int | None = None,
    center: float = 0.01,
    lr: float = 2e-3,
    max_tokens: int | None = None,
    dtype: fl.Dtype = "float32",
    steps: int = 201,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """A reward model under the Bradley-Terry loss (as in Ouyang et al. 2022, arXiv:2203.02155), scores centred on 0."""
    optimizer = fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps)
    reward = fl.Model(model, head="score", mesh=train, optimizer=optimizer, dtype=dtype, name="reward")
    rows, held = datasets.split(datasets.pairs(data), held_out=held_out)
    prompts = fl.prompts(rows, batch=prompts_per_step, chat=chat, seed=seed)
    answers = fl.responses(reward, prompts, columns=SIDES, max_new_tokens=max_new_tokens, on_too_long="drop")
    fl.update(reward, answers, loss=losses.bradley_terry(center=center), max_tokens=max_tokens)

    others = fl.prompts(held, batch=held_out, every=every, chat=chat, last="short", shuffle=False, name="held_out")
    unseen = fl.responses(reward, others, columns=SIDES, max_new_tokens=max_new_tokens, on_too_long="drop")
    held_out_pairs(unseen, fl.score(reward, unseen))

"""A graph for tests of runs: a teacher whose likely tokens go through a function of the user's."""

import torch

import flowrl as fl
from flowrl import losses
from flowrl.losses.distillation import Divergence


@fl.node(out=("teacher_ids", "teacher_logprobs"), per="group")
def sharper(teacher_ids: torch.Tensor, teacher_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher at half its temperature, on [samples, tokens, k]."""
    assert teacher_ids.shape == teacher_logprobs.shape
    assert teacher_ids.dim() == 3
    return teacher_ids, (2 * teacher_logprobs).log_softmax(-1)


@fl.graph
def distil(
    divergence: Divergence = "reverse",
    k: int = 6,
    by_student: bool = False,
    max_tokens: int | None = None,
    train: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
) -> None:
    """GKD on: answer as the teacher does."""
    policy = fl.Model("tiny", backend="tiny", mesh=train, optimizer=fl.AdamW(lr=0.02))
    teacher = fl.Model("another", backend="tiny", mesh=train, name="teacher")
    rows = [{"prompt": f"{i}>"} for i in range(12)]
    samples = fl.rollout(policy, fl.prompts(rows, batch=4), n=3, max_new_tokens=4, temperature=0.8)
    if by_student:
        likely = fl.topk(teacher, samples, at=fl.topk(policy, samples, k=k, name="own"))
    else:
        likely = fl.topk(teacher, samples, k=k)
    taught = sharper(samples, likely)
    fl.update(policy, samples, taught, loss=losses.distill(divergence=divergence), max_tokens=max_tokens)

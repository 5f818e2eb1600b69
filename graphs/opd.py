"""Learn from what a teacher thinks of each token that one has sampled: on-policy distillation by a policy gradient.

    flowrl run opd.py

A token's advantage is how much likelier the teacher finds it than the student did: one sample of the reverse KL. All
that is asked of the teacher is the log-prob of a given token. distill.py asks it for its likely tokens, and has the
mean over them in place of a sample: less noise, and about half the steps.
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import exact_match


@fl.graph
def opd(
    model: str = "builtin:reverse_digits",
    teacher: str = "builtin:reverse_digits_teacher",
    data: str = "builtin:reverse_digits",
    held_out: str = "builtin:reverse_digits",
    column: str = "prompt",
    prompts_per_step: int = 128,
    samples_per_prompt: int = 2,
    max_new_tokens: int = 6,
    lr: float = 1e-3,
    gamma: float = 0.0,
    staleness: int = 0,
    steps: int = 150,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """On-policy distillation (Lu and Thinking Machines Lab 2025; strong to weak in Qwen3, arXiv:2505.09388)."""
    student = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5))
    expert = fl.Model(teacher, mesh=train, name="teacher")
    prompts = fl.prompts(data, batch=prompts_per_step, column=column, seed=seed)
    samples = fl.rollout(student, prompts, n=samples_per_prompt, max_new_tokens=max_new_tokens, staleness=staleness)
    advantage = advantages.distill(samples, fl.logprobs(expert, samples), gamma=gamma)
    fl.update(student, samples, advantage, loss=losses.ppo_clip())
    questions = fl.prompts(held_out, batch=128, column=column, last="short", seed=seed + 1, name="questions")
    fl.evaluate(student, questions, exact_match, every=10, temperature=1.0)

"""A graph for tests of runs: a second tiny model judges what the first one answers."""

from typing import Any

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{i}+{i}=", "answer": i} for i in range(4)]


def ask(prompt: str, response: str, answer: int) -> str:
    return f"{prompt}{response}{answer}>"


def small_bytes(text: str) -> float:
    return float(sum(ord(character) < 64 for character in text))


def only_odd(text: str) -> float | None:
    return None if len(text) % 2 == 0 else 1.0


def nothing(text: str) -> None:
    return None


@fl.graph
def training(
    parse: str = "small_bytes",
    on_error: Any = "fail",
    max_failure_rate: float = 0.5,
    train: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
    box: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
) -> None:
    policy = fl.Model("tiny", backend="tiny", mesh=train, optimizer=fl.AdamW(lr=1e-2))
    judge = fl.Model("judge", backend="tiny", name="judge", mesh=box)
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=3, max_new_tokens=5)
    read = {"small_bytes": small_bytes, "only_odd": only_odd, "nothing": nothing}[parse]
    scores = fl.judge(
        judge,
        samples,
        prompt=ask,
        parse=read,
        max_new_tokens=6,
        temperature=1.0,
        on_error=on_error,
        max_failure_rate=max_failure_rate,
    )
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

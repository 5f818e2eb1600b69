"""A graph for tests of runs: a small model that talks to a tool."""

import time

import flowrl as fl
from flowrl import advantages, losses

STOPS = tuple("0123456789abcdefghijklmnopqrstuvwxyz")
"""One of them ends a turn of a model that knows nothing before long."""


@fl.tool(timeout=0.5, on_error="drop", max_failure_rate=1.0)
def count(turns: list[dict[str, str]], number: int, *, trouble: str = "") -> str | None:
    if trouble and number == 1:
        if trouble == "hang":
            time.sleep(60)
        raise RuntimeError("the line is dead")
    return f"{number}," if len(turns) < 5 else None


@fl.reward
def digits(turns: list[dict[str, str]], number: int) -> float:
    said = "".join(turn["content"] for turn in turns if turn["role"] == "assistant")
    return said.count(str(number % 3)) / 4


@fl.graph
def converse(
    trouble: str = "",
    backend: str = "tiny",
    batch: int = 4,
    every: int | None = None,
    train: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
) -> None:
    """GRPO on conversations."""
    source = "tiny" if backend == "tiny" else "builtin:reverse_digits"
    policy = fl.Model(source, backend=backend, mesh=train, optimizer=fl.AdamW(lr=0.02))
    rows = [{"prompt": f"{i}>", "number": i} for i in range(12)]
    prompts = fl.prompts(rows, batch=batch)
    tool = count(trouble=trouble)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=24, tool=tool, max_turns=3, stop=STOPS)
    scores = digits(samples)
    if every:
        held_out = fl.prompts(rows, batch=12, shuffle=False, name="held_out")
        fl.evaluate(policy, held_out, digits, every=every, tool=tool, max_turns=3, stop=STOPS)
    fl.update(policy, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip() - 0.01 * losses.entropy())

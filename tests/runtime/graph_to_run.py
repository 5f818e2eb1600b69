"""A graph for tests of runs: one that learns in milliseconds a step, and can be told to go wrong."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import flowrl as fl
from flowrl import advantages, losses


@fl.reward(timeout=30)
def digits(response: str, target: str, extra: object = None, *, trouble: str = "", at: str = "") -> float:
    """Share of characters that are the wanted one; `trouble` strikes once the file `at` exists, or at once."""
    if trouble and (not at or Path(at).exists()):
        if trouble == "raise":
            raise ValueError("the sandbox is gone")
        if trouble == "breakpoint":
            breakpoint()
        if trouble == "exit":
            os._exit(3)
        if trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "hang":
            time.sleep(1000)
        if trouble == "print":
            print("a word of the reward", flush=True)
        if trouble == "child":
            subprocess.Popen(["sleep", "1000"])
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return sum(character == target for character in response) / 4


def is_even(response: list[str]) -> bool:
    """True of every other group, and so of some more whatever the model has learned."""
    return sum(map(ord, "".join(response))) % 2 == 0


@fl.node(out="old_logprobs")
def wrong(logprobs: Any, versions: Any, *, by: float, since: int) -> Any:
    """What a sampler would say whose weights are wrong from a version on."""
    return logprobs + by * (versions >= since)


@fl.graph
def learn(
    trouble: str = "",
    at: str = "",
    backend: str = "tiny",
    model: str = "",
    batch: int = 4,
    n: int = 4,
    lr: float = 0.02,
    staleness: int = 0,
    own_mesh: bool = False,
    minibatches: int = 1,
    max_tokens: int | None = None,
    kl: float = 0.0,
    kl_target: float | None = None,
    wrong_since: int | None = None,
    max_mismatch: float | None = None,
    every: int | None = None,
    refill: int | None = None,
    num_rows: int = 12,
    last: str = "drop",
    passes: int | None = None,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
    sample: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
    score: fl.Mesh = fl.Mesh.cpu(1),
) -> None:
    """GRPO on: answer with the wanted character."""
    source = model or ("tiny" if backend == "tiny" else "builtin:reverse_digits")
    policy = fl.Model(source, backend=backend, mesh=train, optimizer=fl.AdamW(lr=lr))
    rows: list[dict[str, object]] = [{"prompt": f"{i}>", "target": str(i % 3)} for i in range(num_rows)]
    if trouble == "unsendable":
        rows = [{**row, "extra": {"tags": {1, 2}}} for row in rows]
    prompts = fl.prompts(rows, batch=batch, seed=seed, last=last, epochs=passes)
    mesh = sample if own_mesh else None
    samples = fl.rollout(policy, prompts, n=n, max_new_tokens=4, staleness=staleness, mesh=mesh)
    scores = digits(samples, mesh=score, trouble=trouble, at=at)
    if refill:
        samples = fl.filter(samples, keep=is_even, per="group", refill=refill)
    advantage = advantages.grpo(samples, scores)
    loss = losses.ppo_clip() - 0.01 * losses.entropy()
    if every:
        fl.evaluate(policy, fl.prompts(rows, batch=12, shuffle=False, name="held_out"), digits, every=every)
    if kl:
        reference = fl.logprobs(policy.frozen(), samples)
        coef = fl.Adaptive(initial=kl, target=kl_target, horizon=64) if kl_target else kl
        loss = loss + losses.kl(coef=coef)
        fl.update(policy, samples, advantage, reference, loss=loss, minibatches=minibatches)
    else:
        sampler = {} if wrong_since is None else {"old_logprobs": wrong(samples, by=1.0, since=wrong_since)}
        fl.update(
            policy,
            samples,
            advantage,
            loss=loss,
            minibatches=minibatches,
            max_tokens=max_tokens,
            max_mismatch=max_mismatch,
            **sampler,
        )

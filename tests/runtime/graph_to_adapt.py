"""A graph whose reward has an adaptive penalty, for tests of runs."""

from typing import Any

import flowrl as fl
from flowrl import advantages, losses


@fl.reward
def above(response: str, least: str) -> float:
    return sum(character > least for character in response) / 4


@fl.node(out=fl.Metrics)
def penalty(rewards: Any, mask: Any, logprobs: Any, ref_logprobs: Any) -> dict[str, float]:
    """The coefficient as rewards show it: at the token, but for the last, that is farthest from the reference."""
    inner = mask[:, :-1].bool() & mask[:, 1:].bool()
    distance = ((logprobs - ref_logprobs)[:, :-1] * inner).flatten()
    at = distance.abs().argmax()
    return {"seen": float(-rewards[:, :-1].flatten()[at] / distance[at])} if distance[at] else {}


@fl.graph
def adapt(
    initial: float = 0.5,
    target: float = 0.05,
    fixed: bool = False,
    loss_target: float | None = None,
    staleness: int = 0,
    minibatches: int = 1,
    epochs: int = 1,
    lr: float = 0.02,
    train: fl.Mesh = fl.Mesh(dp=1, device="cpu"),
    score: fl.Mesh = fl.Mesh.cpu(1),
) -> None:
    """REINFORCE++ on: answer with characters above the given one, near the reference."""
    policy = fl.Model("tiny", backend="tiny", mesh=train, optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts([{"prompt": f"{i}>", "least": str(i % 3)} for i in range(12)], batch=4)
    samples = fl.rollout(policy, prompts, n=4, max_new_tokens=4, staleness=staleness)
    reference = fl.logprobs(policy.frozen(), samples)
    coef = initial if fixed else fl.Adaptive(initial=initial, target=target, horizon=64)
    rewards = advantages.token_rewards(samples, above(samples, mesh=score), reference, kl_coef=coef, mesh=score)
    penalty(samples, rewards, reference)
    loss = losses.ppo_clip()
    if loss_target:
        loss += losses.kl(coef=fl.Adaptive(initial=0.01, target=loss_target, horizon=64))
    estimate = advantages.reinforce_pp(samples, rewards)
    fl.update(policy, samples, estimate, reference, loss=loss, minibatches=minibatches, epochs=epochs)

"""Graphs of many shapes, for tests of the plan and the scheduler. Nothing of them is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import flowrl as fl
from flowrl import losses
from flowrl.graph import Graph
from flowrl.runtime.plan import Plan, compile_plan

ROWS = [{"prompt": "2+3=", "answer": "5"}] * 64


@fl.reward(on_error="drop", max_failure_rate=1.0)
def score(response: str, answer: str) -> float:
    return float(response == answer)


@fl.reward(on_error="drop", max_failure_rate=0.5)
def strict(response: str) -> float:
    return 1.0


@fl.advantage
def centred(scores: Any) -> Any:
    return scores - scores.mean()


@fl.advantage(per="batch")
def whitened(scores: Any, prompt: Any) -> Any:
    return scores


@fl.node(out=("advantages", "returns"))
def from_values(scores: Any, values: Any) -> Any:
    return values, values


@fl.node(out="weights")
def weigh(response: str) -> float:
    return 1.0


@fl.node(out=fl.Metrics)
def length(response_ids: Any) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a graph is made of."""

    staleness: int = 0
    own_mesh: bool = False
    """The rollout has a mesh of its own."""
    dp: int = 1
    prompts: int = 3
    n: int = 2
    cpu: int = 0
    """CPU workers of the rewards; 0 is the host."""
    rewards: int = 1
    dropping: Literal["nothing", "row", "group", "diamond"] = "nothing"
    """What a filter drops; ``diamond``: of one branch, which another joins."""
    per: Literal["group", "batch"] = "group"
    reference: bool = False
    again: bool = False
    """Old log-probs come from the trained model."""
    critic: bool = False
    trains: bool = True
    minibatches: int = 1
    epochs: int = 1
    max_tokens: int | None = None
    max_mismatch: float | None = None
    evaluates: int = 0
    """Versions between two evaluations; 0 is none."""
    shares_prompts: bool = False
    """The evaluation reads the rollout's prompts."""
    metric: bool = False
    second: bool = False
    """Another rollout of the same model, which nothing trains on."""
    given: int = 0
    """Steps from one batch to the next of answers of the data set, which the policy is measured on; 0 is none."""
    refill: int | None = None
    """Waves of the filter, which then drops groups."""
    batches: int = 1
    """Batches of the prompts that one version consumes."""
    beside: bool = False
    """The estimate is of all samples, also of those that a filter drops."""

    def plan(self) -> Plan:
        """The graph of this shape, compiled."""
        return compile_plan(self.graph())

    def graph(self) -> Graph:
        """The graph of this shape."""
        return fl.graph(self._declare)()

    def _declare(self) -> None:
        train = fl.Mesh(dp=self.dp, name="train")
        policy = fl.Model("builtin:x", mesh=train, optimizer=fl.AdamW(lr=1e-3))
        prompts = fl.prompts(ROWS, batch=self.prompts)
        mesh = fl.Mesh(dp=2, name="sampler") if self.own_mesh else None
        samples = fl.rollout(policy, prompts, n=self.n, max_new_tokens=4, staleness=self.staleness, mesh=mesh)
        workers = fl.Mesh.cpu(self.cpu) if self.cpu else None
        scores = [score(samples, mesh=workers, name=f"score_{i}") for i in range(self.rewards)]
        kept, streams = samples, []
        if self.refill:
            kept = fl.filter(samples, scores[0], keep=lambda scores: True, per="group", refill=self.refill)
        elif self.dropping in ("row", "group"):
            kept = fl.filter(samples, scores[0], keep=lambda scores: True, per=self.dropping)
        if self.dropping == "diamond":
            streams.append(weigh(fl.filter(samples, scores[-1], keep=lambda scores: True)))
        if self.reference:
            streams.append(fl.logprobs(policy.frozen(), kept, name="reference"))
        if self.again:
            streams.append(fl.logprobs(policy, samples, name="again"))
        if self.metric:
            length(kept)
        if self.second:
            strict(fl.rollout(policy, fl.prompts(ROWS, batch=2, name="more"), n=1, max_new_tokens=4, name="look"))
        if self.given:
            rare = fl.prompts(ROWS, batch=3, every=self.given, name="rare")
            held = fl.responses(policy, rare, columns={"answer": 1, "prompt": -1}, name="given")
            length(held, fl.logprobs(policy, held, name="measured"), name="given_length")
        if self.evaluates:
            held = prompts if self.shares_prompts else fl.prompts(ROWS, batch=4, name="held")
            fl.evaluate(policy, held, score, every=self.evaluates)
        if self.critic:
            self._update_two(policy, train, kept, scores[0], streams)
        elif self.trains:
            estimate = centred if self.per == "group" else whitened
            self._update(policy, kept, estimate(samples if self.beside else kept, scores[0]), *streams)

    def _update_two(self, policy: Any, train: Any, kept: Any, scores: Any, streams: list[Any]) -> None:
        critic = fl.Model("builtin:x", mesh=train, optimizer=fl.AdamW(lr=1e-3), head="value", name="critic")
        values = fl.values(critic, kept)
        advantages = from_values(kept, scores, values)
        self._update(policy, kept, advantages, *streams)
        batch = self.batches * self.prompts
        fl.update(critic, kept, advantages, values, loss=losses.value_clip(), batch=batch, name="update_critic")

    def _update(self, policy: Any, *streams: Any) -> None:
        loss = losses.ppo_clip() + 0.1 * losses.kl() if self.reference else losses.ppo_clip()
        if self.dropping == "diamond":
            loss = losses.policy_gradient(weights="weights")
        passes = {"minibatches": self.minibatches, "epochs": self.epochs, "max_tokens": self.max_tokens}
        passes |= {"max_mismatch": self.max_mismatch, "batch": self.batches * self.prompts}
        fl.update(policy, *streams, loss=loss, **passes)

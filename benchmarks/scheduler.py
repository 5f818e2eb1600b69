"""What the scheduler costs: a quickstart's steps against workers that answer at once.

    python benchmarks/scheduler.py [--steps 20] [--prompts 32] [--n 8] [--staleness 0] [--profile]

Prints microseconds of CPU a step, a firing and an event, and the step as a ratio to a bare loop over the same rows: one
dict update for each row at each stage, which is the least that any bookkeeping in Python does. The events are recorded
before the clock runs.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import Sum
from flowrl.rows import Key
from flowrl.runtime.events import Block, Command, Event, Finished, Fire, Firing, Halt, Joined, Produced
from flowrl.runtime.plan import Plan, compile_plan
from flowrl.runtime.scheduler import Options, Scheduler

EMIT_ROWS = 64
"""Samples in one block of a rollout."""


@fl.reward
def right(response: str, answer: str) -> float:
    """Scores a response."""
    return float(response == answer)


@fl.graph
def quickstart(prompts: int = 32, n: int = 8, staleness: int = 0) -> None:
    """Eight stages: prompts, rollout, reward, reference, filter, advantage, update and record."""
    policy = fl.Model("builtin:x", optimizer=fl.AdamW(lr=1e-6))
    asked = fl.prompts([{"prompt": "1+1=", "answer": "2"}] * prompts, batch=prompts)
    samples = fl.rollout(policy, asked, n=n, staleness=staleness)
    scores = right(samples)
    kept = fl.filter(samples, scores, keep=lambda scores: True, per="group")
    reference = fl.logprobs(policy.frozen(), kept)
    fl.update(policy, kept, advantages.grpo(kept, scores), reference, loss=losses.ppo_clip() + 0.01 * losses.kl())


class Workers:
    """Answer each firing at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.events: deque[Event] = deque(Joined(worker) for worker in plan.workers())
        self.num_blocks = 0

    def take(self, commands: list[Command]) -> bool:
        """Answer; true once the run is over."""
        for command in commands:
            if isinstance(command, Fire):
                self.events += self._answer(command.worker, command.firing)
        return any(isinstance(command, Halt) for command in commands)

    def _answer(self, worker: str, firing: Firing) -> list[Event]:
        keys: list[Key] = []
        match firing.action:
            case "prompts":
                keys = [Key(firing.step, i) for i in range(self.plan.prompts_per_step[firing.node])]
            case "rollout":
                n = self.plan.samples_per_prompt[firing.node]
                keys = [Key(*prompt[:2], sample) for prompt in firing.keys for sample in range(n)]
            case "forward" | "function" | "filter":
                keys = [Key(*key) for key in firing.keys]  # as they come from a wire: equal, not the same
        size = EMIT_ROWS if firing.action == "rollout" else max(1, len(keys))
        blocks = [self._block(worker, keys[i : i + size], firing.action) for i in range(0, len(keys), size)]
        tokens = Sum(9.0 * len(firing.keys), 1.0)
        metrics = {"tokens": tokens, "rows": Sum(len(firing.keys), 1)} if firing.action == "backward" else {}
        made = [Produced(worker, firing.id, firing.attempt, block) for block in blocks]
        return [*made, Finished(worker, firing.id, firing.attempt, metrics, 0.0)]

    def _block(self, worker: str, keys: list[Key], action: str) -> Block:
        self.num_blocks += 1
        lengths = (64,) * len(keys) if action == "rollout" else None
        return Block(worker, self.num_blocks, tuple(keys), ("column",), 8 * len(keys), lengths)


def record(plan: Plan, options: Options) -> list[Event]:
    """The events of a run. They depend on the commands alone, so that another run may be given them again."""
    scheduler, workers = Scheduler(plan, options), Workers(plan)
    events: list[Event] = []
    over = False
    while not over:
        events.append(workers.events.popleft())
        over = workers.take(scheduler.on_event(events[-1]))
    return events


def replay(plan: Plan, options: Options, events: list[Event]) -> tuple[float, Scheduler]:
    """CPU seconds that the scheduler takes for some events."""
    scheduler = Scheduler(plan, options)
    gc.collect()
    gc.freeze()  # a run does not keep its events; here they would be searched for garbage again and again
    begun = time.thread_time()
    for event in events:
        scheduler.on_event(event)
    spent = time.thread_time() - begun
    assert scheduler.halted is not None
    return spent, scheduler


def bare(num_stages: int, num_prompts: int, n: int) -> float:
    """Seconds of one dict update for each row at each stage."""
    keys = [Key(0, prompt, sample) for prompt in range(num_prompts) for sample in range(n)]
    begun = time.thread_time()
    for _ in range(10 * num_stages):
        done: dict[Key, bool] = {}
        for key in keys:
            done[key] = True
    return (time.thread_time() - begun) / 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 20), ("prompts", 32), ("n", 8), ("staleness", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    plan = compile_plan(quickstart(prompts=options.prompts, n=options.n, staleness=options.staleness))
    run = Options(num_steps=options.steps)
    events = record(plan, run)
    if options.profile:
        with cProfile.Profile() as profile:
            replay(plan, run, events)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    spent, scheduler = min((replay(plan, run, events) for _ in range(20)), key=lambda found: found[0])
    num_events = len(events)
    firings = sum(count for (_, what), count in scheduler.counts.items() if what == "firings")
    loop = min(bare(len(plan.stages), options.prompts, options.n) for _ in range(20))
    step = spent / options.steps
    print(f"{options.prompts} x {options.n} rows, {len(plan.stages)} stages, staleness {options.staleness}")
    print(f"step    {1e6 * step:8.0f} us  {step / loop:5.1f} x a bare dict update of each row at each stage")
    print(f"firing  {1e6 * spent / firings:8.0f} us  {firings / options.steps:5.1f} a step")
    print(f"event   {1e6 * spent / num_events:8.0f} us  {num_events / options.steps:5.1f} a step")


if __name__ == "__main__":
    main()

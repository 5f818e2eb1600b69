"""Teach a 104k-parameter model to use a calculator: ``12+34*5>`` becomes ``34*5=170,12+170=182,182``.

    flowrl run tool_use.py

The model ends a turn with ``=``, the calculator answers (``170,``), and the model goes on. What the calculator wrote is
read and not trained. The shipped model has seen sums calculated in either order, and learns which one is right. It
ends above 0.9.
"""

import flowrl as fl
from flowrl import advantages, losses, tasks

calculator = fl.tool(tasks.calculator)


@fl.reward
def right_result(turns: list[dict[str, str]], answer: str) -> float:
    return float(turns[-1]["content"] == answer)


@fl.graph
def tool_use(
    model: str = "builtin:calculation",
    data: str = "builtin:calculation",
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_new_tokens: int = 28,
    max_turns: int = 4,
    lr: float = 1e-3,
    entropy: float = 0.003,
    minibatches: int = 4,
    staleness: int = 0,
    steps: int = 80,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
) -> None:
    """Group-relative policy optimisation (GRPO; Shao et al. 2024, arXiv:2402.03300) of conversations with a tool."""
    optimizer = fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps * minibatches)
    policy = fl.Model(model, mesh=train, optimizer=optimizer)
    prompts = fl.prompts(data, batch=prompts_per_step, seed=seed)
    samples = fl.rollout(
        policy,
        prompts,
        n=samples_per_prompt,
        max_new_tokens=max_new_tokens,
        tool=calculator,
        max_turns=max_turns,
        stop=("=",),
        staleness=staleness,
    )
    scores = right_result(samples)
    advantage = advantages.grpo(samples, scores)
    loss = losses.ppo_clip(clip_low=0.2, clip_high=0.28) - entropy * losses.entropy()
    fl.update(policy, samples, advantage, loss=loss, minibatches=minibatches)
    held_out = fl.prompts(data, batch=64, seed=seed + 1, name="held_out")
    fl.evaluate(policy, held_out, right_result, every=20, tool=calculator, max_turns=max_turns, stop=("=",))

"""GRPO on a model and a data set of your own, with a numeric answer to match.

    flowrl run grpo.py --model path/to/SmolLM2-135M-Instruct --data gsm8k/train.jsonl --column question --chat \\
        --max-new-tokens 256 --lr 1e-6 --kl 0.001 --entropy 0 --prompts-per-step 8

`model` is a Hugging Face directory or hub id; `data` a .jsonl or .parquet file whose column `answer` ends with the
number that is wanted. The defaults are the small model and task that come with flowrl.
"""

import flowrl as fl
from flowrl import advantages, losses
from flowrl.rewards import numeric_match


@fl.graph
def grpo(
    model: str = "builtin:reverse_digits",
    data: str = "builtin:reverse_digits",
    column: str = "prompt",
    chat: bool = False,
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_prompt_tokens: int | None = None,
    max_new_tokens: int = 6,
    temperature: float = 1.0,
    lr: float = 1e-3,
    kl: float = 0.0,
    entropy: float = 0.002,
    staleness: int = 0,
    max_tokens: int | None = None,
    dtype: fl.Dtype = "float32",
    steps: int = 450,
    seed: int = 0,
    train: fl.Mesh = fl.Mesh(dp=1),
    score: fl.Mesh = fl.Mesh.cpu(1),
) -> None:
    """Group-relative policy optimisation (GRPO; Shao et al. 2024, arXiv:2402.03300), optionally held near its start."""
    policy = fl.Model(model, mesh=train, optimizer=fl.AdamW(lr=lr, warmup_steps=5, decay_steps=steps), dtype=dtype)
    prompts = fl.prompts(
        data,
        batch=prompts_per_step,
        column=column,
        chat=chat,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        on_too_long="drop",
    )
    samples = fl.rollout(
        policy,
        prompts,
        n=samples_per_prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        staleness=staleness,
    )
    scores = numeric_match(samples, mesh=score)
    advantage = advantages.grpo(samples, scores)
    loss = losses.ppo_clip(clip_low=0.2, clip_high=0.28) - entropy * losses.entropy()
    if kl:
        reference = fl.logprobs(policy.frozen(), samples)
        fl.update(policy, samples, advantage, reference, loss=loss + kl * losses.kl(), max_tokens=max_tokens)
    else:
        fl.update(policy, samples, advantage, loss=loss, max_tokens=max_tokens)

"""Make a start model: ``python -m flowrl.graphs.warm_start.make OUT [--task NAME] [--random] [--until SHARE]``.

A Llama of 104,000 parameters over single characters, as an ordinary Hugging Face folder. Without ``--random`` it is
tuned on the task's own answers until it gets a quarter of its samples right: then nearly every group of samples holds
right and wrong ones, and reinforcement learning has something to compare; ``--until`` names another share, such as that
of a model to be learnt from. The shipped folders are::

    python -m flowrl.graphs.warm_start.make reverse_digits
    python -m flowrl.graphs.warm_start.make count_up --random
    python -m flowrl.graphs.warm_start.make calculation --task calculation
    python -m flowrl.graphs.warm_start.make reverse_digits_teacher --until 0.98

A task with a tool is shown in turns, as somebody would write them; what the tool says between them is read and not
learnt. One machine, one version of torch and one thread give the same file bit for bit; ``made_with.json`` says which.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowrl.tasks import DEMONSTRATIONS, TASKS, TOOLS

ALPHABET = "_^$0123456789abcdefghijklmnopqrstuvwxyz+-*/=:>() .,?"
"""One token a character, numbered in this order: pad, begin, end, then text. Any other character is refused."""
PAD, BOS, EOS = 0, 1, 2
GOOD_ENOUGH = 0.25
"""Share of right samples at which tuning stops, unless another is asked for."""
NUM_HELD_OUT = 256
CHECK_EVERY = 5
MAX_STEPS = 2000
"""Tuning to a quarter takes about 100 steps; one that never gets there is not worth more."""
BATCH, LEARNING_RATE, WARM_UP_STEPS = 128, 2e-3, 20
LONGEST_CONVERSATION = 28
"""Characters: one that solves `flowrl.tasks.Calculation` has 24."""

Row = dict[str, str]
Tool = Callable[[str], str | None]
Part = tuple[str, bool]
"""Text, and whether the model is to learn to write it."""


def make(
    out: Path, task: str = "reverse_digits", *, seed: int = 0, random: bool = False, until: float = GOOD_ENOUGH
) -> dict[str, Any]:
    """Write a model folder: weights, configuration, tokenizer and ``made_with.json``.

    Args:
        out: the folder; files in it are replaced.
        task: of `flowrl.tasks`, what to tune on.
        seed: of weights, data and samples.
        random: leave the tuning out.
        until: share of right samples at which tuning stops.

    Returns:
        What ``made_with.json`` holds.

    Raises:
        RuntimeError: tuning did not get that share right in `MAX_STEPS` steps.
    """
    with one_thread():
        generator = torch.Generator().manual_seed(seed)
        model = random_model(generator)
        record: dict[str, Any] = {"task": None if random else task, "seed": seed} | machine()
        if not random:
            record |= tune(model, task, generator, until)
    model.save_pretrained(out)
    character_tokenizer().save_pretrained(out)
    (out / "made_with.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def machine() -> dict[str, str]:
    """What the bits of the weights depend on, the seed aside."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def random_model(generator: torch.Generator) -> LlamaForCausalLM:
    """A model with embeddings from N(0, 0.02) and every other matrix from N(0, 0.6 / sqrt(columns)).

    The configuration's own ``initializer_range`` of 0.02 for all matrices is too small at this width to learn from.
    """
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    embedding = model.get_input_embeddings().weight
    for weight in model.parameters():
        if weight.dim() == 2:
            std = 0.02 if weight is embedding else 0.6 / math.sqrt(weight.shape[1])
            nn.init.normal_(weight, 0.0, std, generator=generator)
    return model


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; encoding puts the begin token in front."""
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", BOS)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="_", bos_token="^", eos_token="$", padding_side="left"
    )


def tune(model: LlamaForCausalLM, task: str, generator: torch.Generator, until: float) -> dict[str, Any]:
    """Train on the task's answers, and stop at the first check that finds the share `until` of samples right."""
    seed = generator.initial_seed()
    source, held_out = TASKS[task](seed=seed), TASKS[task](seed=seed + 1)
    questions = [held_out[i] for i in range(NUM_HELD_OUT)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, MAX_STEPS + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP_STEPS)
        _train(model, optimizer, [lesson(task, source[(step - 1) * BATCH + i]) for i in range(BATCH)])
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, questions, generator, TOOLS.get(task))
            if accuracy >= until:
                return {"steps": step, "sampled_accuracy": accuracy}
    raise RuntimeError(f"{task}: {accuracy:.3f} of the samples right after {MAX_STEPS} steps, wanted {until}")


def lesson(task: str, row: Row) -> list[Part]:
    """A prompt and what follows it: the answer and the end token, or turns that ask a tool and its answers."""
    parts = [("^" + row["prompt"], False)]
    for turn in DEMONSTRATIONS[task](row["prompt"]) if task in DEMONSTRATIONS else (row["answer"],):
        said = TOOLS[task](turn) if task in TOOLS else None
        parts += [(turn + "$", True)] if said is None else [(turn, True), (said, False)]
    return parts


def sampled_accuracy(
    model: LlamaForCausalLM, rows: Sequence[Row], generator: torch.Generator, tool: Tool | None = None
) -> float:
    """The share of rows whose response, sampled at temperature 1, is the answer and then the end token.

    Of a response in turns the last one counts. All rows advance together: where a tool speaks, its characters stand in
    for those that are sampled.
    """
    ids = character_ids(["^" + row["prompt"] for row in rows])
    responses, cache = [_Response(tool) for _ in rows], DynamicCache()
    # transformers renamed the parameter within version 5
    remembered = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
    with torch.no_grad():
        for _ in range(LONGEST_CONVERSATION if tool else max(len(row["answer"]) for row in rows) + 1):
            probabilities = model(input_ids=ids, **remembered).logits[:, -1].softmax(-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0].tolist()
            taken = [response.take(id) for response, id in zip(responses, sampled, strict=True)]
            ids = torch.tensor(taken)[:, None]
    right = [response.answer == row["answer"] for response, row in zip(responses, rows, strict=True)]
    return sum(right) / len(rows)


class _Response:
    """A response while it is sampled."""

    def __init__(self, tool: Tool | None) -> None:
        self.answer: str | None = None
        """The turn that the end token closed."""
        self._tool = tool
        self._turn = ""
        self._said: deque[int] = deque()

    def take(self, sampled: int) -> int:
        """What follows: a sampled character, or, while the tool speaks, one of its own."""
        if self._said:
            return self._said.popleft()
        if self.answer is None and sampled == EOS:
            self.answer = self._turn
        self._turn += ALPHABET[sampled]
        said = self._tool(self._turn) if self._tool and self.answer is None else None
        if said is not None:
            self._said.extend(map(ALPHABET.index, said))
            self._turn = ""
        return sampled


def _train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, lessons: Sequence[Sequence[Part]]) -> None:
    """One step on the mean cross-entropy of the characters that are to be learnt."""
    ids, learnt = _padded(lessons)
    logits = model(input_ids=ids[:, :-1]).logits
    loss = nn.functional.cross_entropy(logits[learnt[:, 1:]], ids[:, 1:][learnt[:, 1:]])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _padded(lessons: Sequence[Sequence[Part]]) -> tuple[Tensor, Tensor]:
    """[lessons, longest] int64 ids, padded on the right, and bool: which of them are learnt."""
    longest = max(sum(len(text) for text, _ in parts) for parts in lessons)
    texts = ["".join(text for text, _ in parts).ljust(longest, ALPHABET[PAD]) for parts in lessons]
    learnt = torch.zeros(len(lessons), longest, dtype=torch.bool)
    for row, parts in enumerate(lessons):
        at = 0
        for text, trained in parts:
            learnt[row, at : at + len(text)] = trained
            at += len(text)
    return character_ids(texts), learnt


def character_ids(texts: Sequence[str]) -> Tensor:
    """[texts, characters] int64; all texts are equally long."""
    return torch.tensor([[ALPHABET.index(character) for character in text] for text in texts])


def _processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are split by thread, so their rounding depends on how many there are."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m flowrl.graphs.warm_start.make", description="Make a start model.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--task",
        choices=[name for name, task in TASKS.items() if "answer" in task.columns],
        default="reverse_digits",
        help="what to tune on",
    )
    parser.add_argument("--random", action="store_true", help="leave the tuning out")
    parser.add_argument("--until", type=float, default=GOOD_ENOUGH, help="share of right samples to stop at")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(make(given.out, given.task, seed=given.seed, random=given.random, until=given.until)))


if __name__ == "__main__":
    main()

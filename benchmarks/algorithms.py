"""The algorithms beside one another: the same warm start, the same task, two tables and a plot.

    python benchmarks/algorithms.py [--at-once 2] [--seeds 0 1 2] [--docs docs] [NAME ...]

Each graph runs in a process of its own with its defaults. Graphs of one task are compared by the truth, the share of
sampled responses that are the answer, and not by the reward that an algorithm is given: that of `ppo` comes from a
reward model. Of the others, which have tasks of their own, the metrics are shown that they move. Writes
``algorithms.svg`` and ``algorithms.json`` into the folder of the docs, and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median

from curves import draw, smoothed

ROOT = Path(__file__).parent.parent
NAMES = (
    "quickstart", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "remax", "ppo", "online_dpo"
)  # fmt: skip
"""Graphs whose policy starts from ``builtin:reverse_digits`` and is scored against its answers."""
MOVES: Mapping[str, Sequence[str]] = {
    "from_scratch": ["reward"],
    "safe_rlhf": ["reward/share_correct", "cost", "multiplier"],
    "tool_use": ["reward"],
    "distill": ["evaluate"],
    "opd": ["evaluate"],
    "sft": ["held_out/loss"],
    "dpo": ["accuracy", "held_out/accuracy"],
    "kto": ["accuracy", "held_out/accuracy"],
    "reward_model": ["held_out/accuracy"],
}
"""The metrics that other graphs move."""
LAST = 10
"""Values that what is said of a metric's end is a mean over."""
GOOD = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description="The algorithms beside one another.")
    parser.add_argument("names", nargs="*", default=(*NAMES, *MOVES), metavar="NAME", help="graphs; all when left out")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="of each; its own default when left out")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.at_once) as workers:
        runs = [(name, seed) for seed in asked.seeds for name in asked.names if name in NAMES or seed == asked.seeds[0]]
        folders = list(workers.map(lambda each: run(*each, asked.steps, Path(folder)), runs))
        found = dict(zip(runs, folders, strict=True))
        curves = {
            name: [smoothed(share_right(found[name, seed])) for seed in asked.seeds]
            for name in asked.names if name in NAMES
        }  # fmt: skip
        moves = {name: moved(found[name, asked.seeds[0]], MOVES[name]) for name in asked.names if name in MOVES}
    if curves:
        middle = {name: [median(values) for values in zip(*each, strict=True)] for name, each in curves.items()}
        title = f"Right answers on reverse_digits, moving average, median of seeds {_words(map(str, asked.seeds))}"
        draw(asked.docs / "algorithms.svg", middle, title=title, x="step", y="share of responses", y_range=(0.0, 1.0))
        print_table(curves)
    print_moves(moves)
    record = {"same task": rows_of(curves), "own tasks": moves}
    (asked.docs / "algorithms.json").write_text(json.dumps(record, indent=2) + "\n")


def run(name: str, seed: int, steps: int | None, folder: Path) -> Path:
    """Run a graph with its defaults; its run folder."""
    run_dir = folder / f"{name}_{seed}"
    code = "import sys; from flowrl.runtime.cli import main; sys.exit(main())"
    words = ["--run-dir", str(run_dir), "--launcher", "inline", "--seed", str(seed)]
    words += ["--steps", str(steps)] if steps else []
    command = [sys.executable, "-c", code, "run", str(ROOT / "graphs" / f"{name}.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    return run_dir


def share_right(run_dir: Path) -> list[float]:
    """By step, the share of right answers among all that were decoded."""
    right: dict[int, list[bool]] = defaultdict(list)
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        right[sample["step"]].append(sample["response"] == sample["prompt"].rstrip(">")[::-1])
    return [sum(each) / len(each) for _, each in sorted(right.items())]


def moved(run_dir: Path, metrics: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The first value of each metric, and the mean of its last."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for metric in metrics:
        values = [step[metric] for step in steps if step.get(metric) is not None]
        found[metric] = (values[0], mean(values[-min(LAST, max(1, len(values) // 4)) :]))
    return found


def rows_of(curves: Mapping[str, Sequence[Sequence[float]]]) -> list[dict[str, object]]:
    """One record an algorithm: per seed, the first step at which its moving average is good, and its end."""
    return [
        {
            "graph": name,
            "first_step_above_0.9": [first_above(curve) for curve in each],
            "end": [round(curve[-1], 3) for curve in each],
        }
        for name, each in curves.items()
    ]


def first_above(curve: Sequence[float]) -> int | None:
    return next((step for step, value in enumerate(curve, 1) if value >= GOOD), None)


def print_table(curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    print(f"| graph | right at first | average passes {GOOD} at step | at the end |\n|---|---|---|---|")
    for name, each in curves.items():
        steps = _words("never" if (step := first_above(curve)) is None else str(step) for curve in each)
        first, end = (_words(f"{curve[at]:.2f}" for curve in each) for at in (0, -1))
        print(f"| `{name}` | {first} | {steps} | {end} |")


def print_moves(moves: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    print("\n| graph | metric | at first | at the end |\n|---|---|---|---|")
    for name, each in moves.items():
        for metric, (first, last) in each.items():
            print(f"| `{name}` | {metric} | {first:.3f} | {last:.3f} |")


def _words(each: Iterable[str]) -> str:
    return ", ".join(each)


if __name__ == "__main__":
    main()

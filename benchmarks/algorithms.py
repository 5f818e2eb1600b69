"""The algorithms beside one another: the same warm start, the same task, a table and a plot.

    python benchmarks/algorithms.py [--at-once 2] [--seeds 0 1 2] [--docs docs] [NAME ...]

Each graph runs in a process of its own with its defaults. What is compared is the truth, the share of sampled responses
that are the answer, and not the reward that an algorithm is given: that of `ppo` comes from a reward model. Writes
``algorithms.svg`` and ``algorithms.json`` into the folder of the docs, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from curves import draw, smoothed

ROOT = Path(__file__).parent.parent
NAMES = ("quickstart", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "remax", "ppo")
"""Graphs whose policy starts from ``builtin:reverse_digits`` and is scored against its answers."""
GOOD = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description="The algorithms beside one another.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="graphs; all when left out")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.at_once) as workers:
        runs = [(name, seed) for seed in asked.seeds for name in asked.names]
        found = list(workers.map(lambda each: share_right(*each, asked.steps, Path(folder)), runs))
    curves: dict[str, list[list[float]]] = defaultdict(list)
    for (name, _), curve in zip(runs, found, strict=True):
        curves[name].append(smoothed(curve))
    middle = {name: [median(values) for values in zip(*each, strict=True)] for name, each in curves.items()}
    title = f"Right answers on reverse_digits, moving average, median of seeds {', '.join(map(str, asked.seeds))}"
    draw(asked.docs / "algorithms.svg", middle, title=title, x="step", y="share of responses", y_range=(0.2, 1.0))
    (asked.docs / "algorithms.json").write_text(json.dumps(rows_of(curves), indent=2) + "\n")
    print_table(curves)


def share_right(name: str, seed: int, steps: int, folder: Path) -> list[float]:
    """Run a graph; the share of right answers among all that each step decoded."""
    run_dir = folder / f"{name}_{seed}"
    code = "import sys; from flowrl.runtime.cli import main; sys.exit(main())"
    where = ["--run-dir", str(run_dir), "--launcher", "inline", "--steps", str(steps)]
    command = [sys.executable, "-c", code, "run", str(ROOT / "graphs" / f"{name}.py"), *where, "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    right: dict[int, list[bool]] = defaultdict(list)
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        right[sample["step"]].append(sample["response"] == sample["prompt"].rstrip(">")[::-1])
    print(f"{name}, seed {seed}: {sum(right[steps]) / len(right[steps]):.3f} at the end", file=sys.stderr)
    return [sum(each) / len(each) for _, each in sorted(right.items())]


def rows_of(curves: dict[str, list[list[float]]]) -> list[dict[str, object]]:
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


def print_table(curves: dict[str, list[list[float]]]) -> None:
    print(f"| graph | right at first | average passes {GOOD} at step | at the end |\n|---|---|---|---|")
    for name, each in curves.items():
        steps = _words("never" if (step := first_above(curve)) is None else str(step) for curve in each)
        first, end = (_words(f"{curve[at]:.2f}" for curve in each) for at in (0, -1))
        print(f"| `{name}` | {first} | {steps} | {end} |")


def _words(each: Iterable[str]) -> str:
    return ", ".join(each)


if __name__ == "__main__":
    main()

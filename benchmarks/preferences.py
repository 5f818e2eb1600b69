"""SFT, DPO and KTO of one model on one folder of preferences: a table and a plot.

    python benchmarks/preferences.py MODEL_DIR PREFERENCES_DIR [--docs docs]

The folder holds pairs (``*dpo*.json``) and labelled answers (``*kto*.json``) in a layout of `flowrl.datasets`; each
ready graph trains on most of the rows, in a process of its own, and is measured on the rest. Writes ``preferences.svg``
and ``preferences.json`` into the folder of the docs, and prints the table. Accuracy is the share of pairs (of KTO: of
good with bad answers) whose better answer has the higher implicit reward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

from curves import draw, smoothed

ROOT = Path(__file__).parent.parent
STEPS = {"sft": 61, "dpo": 81, "kto": 121}
LR = {"sft": 1e-5, "dpo": 2e-5, "kto": 2e-5}
LAST = 10
"""Steps that what is said of the end is a mean over."""
KEPT = ("loss", "accuracy", "held_out/loss", "held_out/accuracy")

Curves = Mapping[str, Mapping[int, float]]
"""By metric, its value by step."""


def main() -> None:
    parser = argparse.ArgumentParser(description="SFT, DPO and KTO of one model on one folder of preferences.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("names", nargs="*", default=tuple(STEPS), metavar="NAME", help="of sft, dpo, kto; all")
    parser.add_argument("--steps", type=int, help="of each; as many as have been found enough when left out")
    parser.add_argument("--lr", type=float, help="of each; what has been found good when left out")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: train(name, asked, Path(folder) / name) for name in asked.names}
    curves = {name: each for name, (each, _) in found.items()}
    (asked.docs / "preferences.json").write_text(json.dumps({"model": asked.model.name, **curves}) + "\n")
    lines = accuracy_lines(curves)
    if lines:
        title = f"{asked.model.name}: the better answer has the higher reward"
        draw(asked.docs / "preferences.svg", lines, title=title, x="step", y="share of pairs", y_range=(0.0, 1.0))
    print_table(found)


def train(name: str, asked: argparse.Namespace, run_dir: Path) -> tuple[Curves, float]:
    """Run a graph; its curves, and how long it took."""
    settings = {
        "steps": asked.steps or STEPS[name],
        "lr": asked.lr or LR[name],
        "model": asked.model,
        "data": one_file(asked.data, "*kto*.json*" if name == "kto" else "*dpo*.json*"),
        "prompts-per-step": asked.prompts_per_step,
        "held-out": asked.held_out,
        "max-new-tokens": asked.max_new_tokens,
        "max-tokens": asked.max_tokens,
        "dtype": asked.dtype,
    }
    code = "import sys; from flowrl.runtime.cli import main; sys.exit(main())"
    words = [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]
    where = ["--run-dir", str(run_dir), "--launcher", "inline"]
    command = [sys.executable, "-c", code, "run", str(ROOT / "graphs" / f"{name}.py"), *where, *words]
    started = time.perf_counter()
    # The checkout's own flowrl, before one that is installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stdout.decode()[-6000:]}")
    curves: dict[str, dict[int, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        for metric in KEPT:
            if step.get(metric) is not None:
                curves.setdefault(metric, {})[step["step"]] = step[metric]
    print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return curves, seconds


def one_file(folder: Path, pattern: str) -> Path:
    """The file of a folder that a pattern names."""
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise SystemExit(f"{folder} has {len(files)} files {pattern}, wanted one: {[file.name for file in files]}")
    return files[0].resolve()


def accuracy_lines(curves: Mapping[str, Curves]) -> dict[str, list[float]]:
    """Accuracies by step: those of the trained rows smoothed, the held-out ones between the steps that measure them."""
    found = {}
    for name, each in curves.items():
        if "accuracy" in each:
            found[f"{name}, trained on"] = smoothed(between(each["accuracy"]), keep=0.8)
        if "held_out/accuracy" in each:
            found[f"{name}, held out"] = between(each["held_out/accuracy"])
    return found


def between(measured: Mapping[int, float]) -> list[float]:
    """One value a step, on the straight line between the nearest steps that have one."""
    steps = sorted(measured)
    found = [measured[steps[0]]] * (steps[0] - 1)
    for before, after in pairwise(steps):
        share = [(step - before) / (after - before) for step in range(before, after)]
        found += [measured[before] * (1 - part) + measured[after] * part for part in share]
    return [*found, measured[steps[-1]]]


def print_table(found: Mapping[str, tuple[Curves, float]]) -> None:
    print("| graph | steps | loss | accuracy trained on | loss held out | accuracy held out | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, (curves, seconds) in found.items():
        cells = [change(curves.get(metric, {}), LAST if metric in ("loss", "accuracy") else 1) for metric in KEPT]
        print(f"| `{name}` | {len(curves['loss'])} | {' | '.join(cells)} | {seconds:.0f} |")


def change(measured: Mapping[int, float], count: int) -> str:
    """How a metric begins and ends, as means over some steps."""
    values: Sequence[float] = list(measured.values())
    return f"{mean(values[:count]):.3f} → {mean(values[-count:]):.3f}" if values else ""


if __name__ == "__main__":
    main()

"""What flowrl itself costs: the share of a step's wall time that no node's compute accounts for, and one firing's
price.

    python benchmarks/overhead.py [--steps 200] [--launcher local] [graph parameters: --train.device cpu]

A step of the quickstart is a chain: a rollout, rewards, advantages, the filter, backward, the optimizer. While one of
them computes, the others wait (staleness 0), so the step's wall time minus the compute of the chain is what
scheduling, queues and copies cost. Rewards that run while others decode, reading prompts ahead and writing samples
behind count as nobody's. Prints shares and ratios of figures from the same run; the first steps, in which caches
fill, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHAIN = ("rollout", "exact_match", "grpo", "filter", "update", "optimizer")
WARM_UP = 20
QUICKSTART = Path(__file__).parent.parent / "graphs" / "quickstart.py"


def main() -> None:
    parser = argparse.ArgumentParser(description="The share of a step's wall time that no node's compute accounts for.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--launcher", choices=("local", "inline"), default="local")
    asked, parameters = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        records = run(asked.steps, asked.launcher, Path(folder) / "run", parameters)[WARM_UP:]
    wall = [record["time_s"] for record in records]
    compute = [sum(record.get(f"time/{node}", 0.0) for node in CHAIN) for record in records]
    firings = [record["firings"] for record in records]
    overheads = [(w - c) / w for w, c in zip(wall, compute, strict=True)]
    per_firing = [(w - c) / n for w, c, n in zip(wall, compute, firings, strict=True)]
    step = statistics.median(wall)
    count = statistics.mean(firings)
    print(f"{len(records)} steps ({asked.launcher}): {step * 1e3:.1f} ms and {count:.1f} firings a step")
    for node in CHAIN:
        share = statistics.median(record.get(f"time/{node}", 0.0) / record["time_s"] for record in records)
        print(f"  {node:<12} {share:7.1%} of a step")
    print(
        f"  nobody's     {statistics.median(overheads):7.1%} of a step (quartiles {quartiles(overheads)}; target < 3 %)"
    )
    print(f"one firing costs {statistics.median(per_firing) / step:.2%} of a step beyond its compute: "
          f"{statistics.median(per_firing) * 1e6:.0f} us")  # fmt: skip


def run(steps: int, launcher: str, run_dir: Path, parameters: list[str]) -> list[dict[str, float]]:
    """Run the quickstart; its metrics."""
    command = [sys.executable, "-c", "import sys; from flowrl.runtime.cli import main; sys.exit(main())"]
    command += ["run", str(QUICKSTART), "--steps", str(steps), "--launcher", launcher, "--run-dir", str(run_dir)]
    subprocess.run([*command, *parameters], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.1%} to {high:.1%}"


if __name__ == "__main__":
    main()

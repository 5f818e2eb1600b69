"""Whether a run stays the size that it has: memory, open files and sockets of every process, late against early.

    python benchmarks/steady.py [--steps 300] [graph parameters: --own-mesh --staleness 2]

Runs the tiny graph of the tests with its processes, and looks at each of them after step 50 and at the end. Prints the
ratio of resident memory, and what has changed in counts that must not; ends with 1 when a process has grown by more
than a twentieth.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GRAPH = Path(__file__).parent.parent / "tests" / "runtime" / "graph_to_run.py"
EARLY = 50
MOST = 1.05
"""Of late to early memory."""


class Size(NamedTuple):
    """What a process holds."""

    memory_kb: int
    """Resident, its shared part aside."""
    files: int
    sockets: int
    shared: int
    """Segments of shared memory."""
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether a run stays the size that it has.")
    parser.add_argument("--steps", type=int, default=300)
    asked, parameters = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        early, late = run(asked.steps, Path(folder), parameters)
    grown = False
    for name, before in early.items():
        after = late[name]
        ratio = after.memory_kb / before.memory_kb
        counts = [f"{what} {a} -> {b}" for what, a, b in zip(Size._fields[1:], before[1:], after[1:], strict=True)]
        grown |= ratio > MOST or before[1:] != after[1:]
        print(f"{name:<10} memory x{ratio:.3f} ({before.memory_kb / 1024:.0f} MiB), {', '.join(counts)}")
    sys.exit(grown)


def run(steps: int, folder: Path, parameters: list[str]) -> tuple[dict[str, Size], dict[str, Size]]:
    """Sizes by process, after step `EARLY` and at the last step but one."""
    code = "import sys; from flowrl.runtime.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", str(GRAPH), "--run-dir", str(folder / "run"), *parameters]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--steps", str(steps)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    found: dict[int, dict[str, Size]] = {}
    for line in process.stdout:
        if line.startswith((f"step {EARLY} ", f"step {steps - 1} ")):
            found[int(line.split()[1])] = dict(sizes(process.pid))
    _, error = process.communicate()
    assert process.returncode == 0, error
    return found[EARLY], found[steps - 1]


def sizes(pid: int) -> Iterator[tuple[str, Size]]:
    """Of a process and its children, by name: a worker's is the last word of its command line."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    yield "scheduler", size(pid)
    for child in map(int, children):
        yield Path(f"/proc/{child}/cmdline").read_text().rstrip("\0").split("\0")[-1], size(child)


def size(pid: int) -> Size:
    """What a process holds now."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    links = [os.readlink(link) for link in (folder / "fd").iterdir()]
    return Size(
        memory_kb=int(status["RssAnon"].split()[0]),
        files=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        shared=sum("/dev/shm/" in line for line in (folder / "maps").read_text().splitlines()),
        threads=int(status["Threads"]),
    )


if __name__ == "__main__":
    main()

"""What a run was made with: packages, commit, command line, parameters. Imports none of the packages that it names."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "flowrl", "torch", "transformers", "megatron-core", "vllm", "pyzmq", "msgpack", "networkx", "numpy", "tokenizers",
    "safetensors", "datasets", "pyarrow", "ray", "rich", "tyro", "PyYAML",
)  # fmt: skip
"""Packages whose version can change what a run computes or how it is shown."""

GIT_TIMEOUT_S = 5.0
"""A repository on a slow file system must not hold up a run."""


def installed(package: str) -> str | None:
    """The version of an installed package, by its name on the index, or None. Imports nothing."""
    if package == "flowrl":  # a checkout has no metadata
        import flowrl

        return flowrl.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> dict[str, Any] | None:
    """The commit that `folder`'s repository stands at, and whether tracked files differ from it; None without one."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return {"commit": head, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def versions_record(
    *, graph_file: Path | None, command: Sequence[str], parameters: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """What ``versions.json`` holds.

    Args:
        graph_file: the user's file; its repository's commit is recorded.
        command: the command line as given.
        parameters: of the graph, all of them, as plain values.
        seed: of the run.
    """
    folder = (graph_file.parent if graph_file else Path()).resolve()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "parameters": dict(parameters),
        "seed": seed,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "graph_file": str(graph_file) if graph_file else None,
        "git": commit(folder),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

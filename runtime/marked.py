"""Processes of a run, found by a mark in their environment.

A process group ends with its leader, but a node function may start a process in a session of its own, as sandboxes do.
Its environment still says which run it belongs to.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "FLOWRL_RUN"
"""The environment variable of workers and of all that they start: the folder of the run's sockets."""
ROUNDS = 10
"""Looks for processes that were started while others were ended."""


def kill_marked(run: str, *, sparing: str = "") -> None:
    """End every process that carries the mark of a run, and that this user may end; this one stays.

    Args:
        sparing: a word of the command line of processes that end by themselves, and are only woken where they are
            stopped. Workers that ended each other could all be gone before one has seen what another has just begun.
    """
    mark = f"{MARK}={run}".encode()
    for _ in range(ROUNDS):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        marked = [pid for pid in pids if pid != os.getpid() and _is_marked(pid, mark)]
        spared = [pid for pid in marked if sparing and sparing.encode() in _read(pid, "cmdline")]
        for pid in marked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT if pid in spared else signal.SIGKILL)
        if len(spared) == len(marked):
            return


def _is_marked(pid: int, mark: bytes) -> bool:
    return mark in _read(pid, "environ")  # empty once a process has ended


def _read(pid: int, what: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    except OSError:
        return []

"""Processes in sessions of their own that still belong to a run."""

from __future__ import annotations

import os
import subprocess
import sys

from flowrl.runtime.marked import MARK, kill_marked


def test_only_processes_of_the_run_are_ended_whatever_session_they_are_in() -> None:
    shell = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"]
    ours = subprocess.Popen(shell, env={**os.environ, MARK: "/tmp/flowrl-one"}, stdout=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "/tmp/flowrl-one-and-more"})
    try:
        kill_marked("/tmp/flowrl-one")
        assert ours.communicate(timeout=5) == (b"", None)  # nobody holds its output open any more
        assert ours.returncode == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()

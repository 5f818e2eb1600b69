"""One process per rank on this machine, with ZeroMQ between them.

Each worker leads a process group of its own, so that whatever a node function starts goes with it. Sockets lie in a
fresh folder that only this user can enter, and that is removed at the end; a worker sees the end of its stdin when
this process dies, however it dies. Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from uuid import uuid4

from flowrl.errors import ConfigError

from ..control import ControlServer
from ..events import Died, Event, Fire, Free, Joined, Send
from ..marked import MARK, kill_marked
from ..messages import pack_command, unpack_event
from ..signals import signals_wait
from .launcher import Launch

GENTLE_S = 3.0
"""How long a worker may take to close what it holds."""
TAIL_LINES = 20
"""Lines of a dead worker's output that its error shows."""


class LocalLauncher:
    """Starts worker processes and speaks with them over one control socket."""

    def __init__(self, launch: Launch) -> None:
        if launch.graph_spec is None:
            raise ConfigError(
                "worker processes import the graph from a file, and this graph has none",
                fix="save it as a .py file and run that, or use launcher='inline'",
            )
        self.launch = launch
        self._secret = uuid4().hex
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, str] = {}
        """Worker by the file descriptor that is readable once its process has ended."""
        self._tails: dict[str, deque[str]] = {}
        self._readers: list[threading.Thread] = []
        self._addresses: dict[str, str] = {}
        self._fds: list[int] = []
        self._folder = Path(tempfile.gettempdir(), f"flowrl-{uuid4().hex[:12]}")
        self._made = contextlib.ExitStack()
        self._server: ControlServer

    def start(self) -> None:
        """Start all processes; they load in parallel. What this makes, `stop` removes, also if this is cut short."""
        self._made.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        self._server = ControlServer(self._folder, secret=self._secret)
        self._made.callback(self._server.close)
        for name in self.launch.plan.workers():
            self._spawn(name)

    def send(self, command: Fire | Send | Free) -> None:
        """Carry one command; one to a worker that is gone is lost, its death will be told."""
        address = self._addresses[command.to] if isinstance(command, Send) else None
        self._server.send(command.worker, pack_command(command, address))

    def poll(self, timeout_s: float) -> list[Event]:
        """Messages of workers, then deaths: what a worker said before it died comes first."""
        polled = self._server.poll(timeout_s, self._fds)
        events = [event for worker, message in polled.messages if (event := self._event(worker, message))]
        if not events:
            events += [self._died(fd) for fd in polled.fds]
        return events

    def stop(self, *, gently: bool) -> None:
        """End all processes and everything that they have started. No signal cuts it short: it takes seconds."""
        with signals_wait():
            self._stop(gently=gently)

    # --- parts

    def _stop(self, *, gently: bool) -> None:
        try:
            if gently:
                for name in self._processes:
                    self._server.send(name, {"do": "stop"})
                self._wait(GENTLE_S)
        finally:
            for process in self._processes.values():
                _kill_group(process.pid)
            kill_marked(str(self._folder))
            self._wait(GENTLE_S)
            for process in self._processes.values():
                if process.stdin:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
            for reader in self._readers:
                reader.join(1.0)
            for fd in self._exits:
                os.close(fd)
            self._exits.clear()
            self._made.close()

    def _spawn(self, name: str) -> None:
        launch = self.launch
        spec = {
            "name": name,
            "graph": launch.graph_spec,
            "overrides": dict(launch.overrides),
            "fingerprint": launch.plan.graph.fingerprint,
            "scheduler": self._server.address,
            "sockets": str(self._folder),
            "secret": self._secret,
            "seed": launch.seed,
            "device": launch.devices.get(name, "cpu"),
            "threads": launch.threads,
            "samples": str(launch.samples) if launch.samples else None,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flowrl.runtime.process", name],  # the name is for `ps` alone
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**_environment(launch.threads), MARK: str(self._folder)},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        process.stdin.flush()
        self._processes[name] = process
        self._tails[name] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=self._read_output, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)
        fd = os.pidfd_open(process.pid)
        self._exits[fd] = name
        self._fds = list(self._exits)

    def _read_output(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self._tails[name].append(text)
                self.launch.on_output(name, text)

    def _event(self, worker: str, message: dict[str, object]) -> Event | None:
        if message["is"] == "joined":
            self._addresses[worker] = str(message["address"])
            return Joined(worker)
        return unpack_event(worker, message)

    def _died(self, fd: int) -> Died:
        name = self._exits.pop(fd)
        os.close(fd)
        self._fds = list(self._exits)
        process = self._processes[name]
        code = process.wait()
        _kill_group(process.pid)  # its own children
        self._readers[list(self._processes).index(name)].join(0.5)
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        tail = "\n".join(self._tails[name])
        return Died(name, f"{how} (pid {process.pid})" + (f"; its last lines:\n{tail}" if tail else ""))

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _environment(threads: int) -> dict[str, str]:
    """Of a worker: as many threads as it may use, and unbuffered output; the checkout stays importable under ``-P``."""
    import flowrl

    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **os.environ}
    root = Path(flowrl.__file__).parent.parent
    if (root / "setup.cfg").is_file():
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def _signal_name(number: int) -> str:
    """``SIGKILL``; of real-time signals only the first and the last have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

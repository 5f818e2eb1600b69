"""A worker process: reads what it is on stdin, joins the run, fires what it is told in order, and ends with its parent.

The main thread fires nodes. The I/O thread of its `Endpoint` goes on meanwhile: it hands out and forgets blocks as
the scheduler asks, so that a consumer never waits for a producer's next firing. Stdin stays open as long as the
parent lives: its end kills this process and whatever a node function has started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from flowrl.errors import RunError
from flowrl.graph import Graph
from flowrl.location import location

from .config import apply
from .endpoint import Control, Data, Endpoint
from .events import NO_FIRING, Failed, Firing
from .firing import describe_error, fire
from .graphfile import load_graph
from .json_lines import JsonLines
from .marked import kill_marked
from .messages import pack_event, unpack_firing, unpack_rows
from .plan import HOST, compile_plan
from .ranks import place
from .record import Recorder
from .registry import load_backend
from .worker import Content, Worker

MODULE = "flowrl.runtime.process"
"""What a worker's command line names."""
SWITCH_S = 0.0005
"""Longest that the firing thread keeps Python from the I/O thread: ten times less than the default, for a block that
waits to be sent holds up a whole mesh."""
WAIT_S = 1.0
"""How often a worker without work wakes: often enough for a signal, too seldom to cost anything."""


def main() -> None:
    """Run one worker, as the JSON object on the first line of stdin describes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    sys.setswitchinterval(SWITCH_S)
    spec = json.loads(sys.stdin.buffer.readline())
    _no_terminal()
    threading.Thread(target=_die_with_parent, args=(spec["sockets"],), daemon=True).start()
    process = Process(spec)
    try:
        process.join()
        process.serve()
    finally:
        process.close()


class Process:
    """The process's parts: its worker, its endpoint and the firings that it owes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.peers: dict[str, str] = {}
        self.endpoint = Endpoint(
            self.name,
            scheduler=spec["scheduler"],
            run_dir_socket=Path(spec["sockets"]),
            on_control=self._on_control,
            secret=spec["secret"],
        )
        self.owed: deque[Firing] = deque()
        self.arrived: dict[tuple[int, int], Content] = {}
        """Inputs by (firing, index)."""
        self.worker: Worker | None = None
        self._samples: JsonLines | None = None

    def join(self) -> None:
        """Trace the graph, load the models, and say so; or say why not."""
        self.endpoint.start()
        try:
            self.worker = self._make_worker()
        except Exception as error:
            self._say(pack_event(Failed(self.name, NO_FIRING, 0, describe_error(error))))
            self.endpoint.close(drain_s=1.0)
            raise SystemExit(1) from error
        self._say({"is": "joined", "address": self.endpoint.data_endpoint})

    def serve(self) -> None:
        """Fire what is owed, in order, until told to stop."""
        while True:
            while self.owed and self._complete(self.owed[0]):
                self._fire(self.owed.popleft())
                if not self._take(0.0):
                    return
            if not self._take(WAIT_S):
                return

    def close(self) -> None:
        """Close what is held."""
        if self._samples is not None:
            self._samples.close()
        self.endpoint.close()
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()

    # --- messages

    def _take(self, timeout_s: float) -> bool:
        """Take everything that has arrived, waiting for the first; False when the run is over."""
        arrival = self.endpoint.receive(timeout_s)
        while arrival is not None:
            match arrival:
                case Control(message):
                    if message["do"] == "stop":
                        return False
                    self.owed.append(unpack_firing(message))
                case Data() as data:
                    self.arrived[data.header["firing"], data.header["index"]] = data.content
                    self.endpoint.commit(data)
            arrival = self.endpoint.receive(0.0)
        return True

    def _complete(self, firing: Firing) -> bool:
        """Whether all inputs that lie elsewhere have arrived."""
        return all(
            each.worker == self.name or (firing.id, index) in self.arrived for index, each in enumerate(firing.inputs)
        )

    def _fire(self, firing: Firing) -> None:
        assert self.worker is not None
        parts = []
        for index, each in enumerate(firing.inputs):
            if each.worker == self.name:
                parts.append(self.worker.block(each.number, each.rows, each.columns))
            else:
                parts.append(self.arrived.pop((firing.id, index)))
        for event in fire(self.worker, firing, parts):
            self._say(pack_event(event))

    def _on_control(self, message: dict[str, Any]) -> bool:
        """Serve the data plane at once, in the I/O thread; firings wait for the main thread."""
        worker = self.worker
        if message["do"] == "send" and worker is not None:
            try:
                self._send_block(worker, message)
            except Exception as error:
                self._say(pack_event(Failed(self.name, NO_FIRING, 0, describe_error(error))))
            return True
        if message["do"] == "free" and worker is not None:
            worker.free(message["numbers"])
            return True
        return False

    def _send_block(self, worker: Worker, message: dict[str, Any]) -> None:
        content = worker.block(message["number"], unpack_rows(message), message["columns"])
        header = {"firing": message["firing"], "index": message["index"]}
        if isinstance(content, dict):
            self.endpoint.send_tensors(message["to"], message["at"], header, content)
        else:
            edge = f"node '{worker.makers[message['number']]}', rows for worker '{message['to']}'"
            self.endpoint.send_rows(message["to"], message["at"], header, content, context=edge)

    def _say(self, message: dict[str, Any]) -> None:
        self.endpoint.send_control(message)

    # --- starting

    def _make_worker(self) -> Worker:
        spec = self.spec
        graph = _trace(spec)
        if graph.fingerprint != spec["fingerprint"]:
            raise RunError(
                f"worker '{self.name}' traced another graph than its parent",
                found=graph.fingerprint,
                wanted=spec["fingerprint"],
                fix="a graph must be a function of its parameters alone: no clock, no random number, no changing file",
            )
        plan = compile_plan(graph)
        pool = next(pool for pool in plan.pools.values() if self.name in pool.workers)
        rank = place(pool, pool.workers.index(self.name))
        if pool.models:
            import torch

            torch.set_num_threads(spec["threads"])
        if pool.kind == "model" and pool.size > 1:
            _join_group(rank.rank, rank.world_size, spec["device"], Path(spec["sockets"]) / f"{pool.name}.store")
        if self.name == HOST and spec["samples"]:
            self._samples = JsonLines(Path(spec["samples"]))
        worker = Worker(
            name=self.name,
            plan=plan,
            pool=pool,
            rank=rank,
            device=spec["device"],
            seed=spec["seed"],
            load_backend=load_backend,
            recorder=Recorder(plan, self._samples) if self.name == HOST else None,
        )
        worker.load()
        return worker


def _trace(spec: dict[str, Any]) -> Graph:
    loaded = load_graph(spec["graph"])
    return loaded if isinstance(loaded, Graph) else loaded(**apply(loaded, spec["overrides"]))


def _join_group(rank: int, world_size: int, device: str, store: Path) -> None:
    """Make the process group of a mesh; its ranks meet in a file, so no port is picked."""
    import torch
    import torch.distributed as dist

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )


def _no_terminal() -> None:
    """Nobody can type into a worker: what would wait for a line says so at once."""
    sys.stdin = open(os.devnull)  # noqa: SIM115 (open as long as the process; `sys.__stdin__` keeps the pipe open)
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _refuse_breakpoint


def _refuse_breakpoint(*_: object, **__: object) -> None:
    frame = sys._getframe(1)
    raise RunError(
        "breakpoint() in a worker process, which has no terminal",
        at=location(frame.f_code.co_filename, frame.f_lineno),
        wanted="a run in one process, or PYTHONBREAKPOINT naming a debugger that is reached from elsewhere",
        fix="--launcher inline",
    )


def _die_with_parent(sockets: str) -> None:
    """Wait for the end of stdin: the parent is gone, however it ended. Then nothing of the run stays."""
    while os.read(0, 1):  # not sys.stdin: this thread would hold its lock, and Python aborts at exit when it is held
        pass
    shutil.rmtree(sockets, ignore_errors=True)
    kill_marked(sockets, sparing=MODULE)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Every worker in this process, one firing at a time: breakpoints work, also in a notebook's event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from flowrl.errors import MeshError

from ..events import Event, Fire, Firing, Free, Joined, Send
from ..firing import fire
from ..json_lines import JsonLines
from ..plan import HOST
from ..ranks import place
from ..record import Recorder
from ..registry import load_backend
from ..worker import Worker
from .launcher import Launch


class InlineLauncher:
    """Fires nodes in the order of their commands, inside `poll`.

    Raises:
        MeshError: a mesh of models has several ranks: their collectives would wait for each other for ever.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        for pool in launch.plan.pools.values():
            if pool.kind == "model" and pool.size > 1:
                raise MeshError(
                    f"mesh '{pool.name}' has {pool.size} ranks, which the inline launcher cannot run in one process",
                    found=str(pool.mesh),
                    wanted="one rank",
                    fix="--launcher local",
                )
        self._workers: dict[str, Worker] = {}
        self._queue: deque[Fire] = deque()
        self._events: deque[Event] = deque()
        self._running: Iterator[Event] | None = None
        self._samples = JsonLines(launch.samples) if launch.samples else None
        self._threads = 0

    def start(self) -> None:
        """Load all models here."""
        launch = self.launch
        if any(pool.models for pool in launch.plan.pools.values()):
            import torch

            self._threads = torch.get_num_threads()
            torch.set_num_threads(launch.threads)
        for pool in launch.plan.pools.values():
            for index, name in enumerate(pool.workers):
                worker = Worker(
                    name=name,
                    plan=launch.plan,
                    pool=pool,
                    rank=place(pool, index),
                    device=launch.devices.get(name, "cpu"),
                    seed=launch.seed,
                    load_backend=load_backend,
                    recorder=Recorder(launch.plan, self._samples) if pool.name == HOST else None,
                )
                worker.load()
                self._workers[name] = worker
                self._events.append(Joined(name))

    def send(self, command: Fire | Send | Free) -> None:
        """Queue a firing; rows need no sending here."""
        match command:
            case Fire():
                self._queue.append(command)
            case Free(worker, numbers):
                self._workers[worker].free(numbers)
            case Send():
                pass

    def poll(self, timeout_s: float) -> list[Event]:
        """The next event, for which a firing may have to be run up to it."""
        if self._events:
            return [self._events.popleft()]
        if self._running is None and self._queue:
            command = self._queue.popleft()
            worker = self._workers[command.worker]
            self._running = fire(worker, command.firing, self._parts(command.firing))
        if self._running is None:
            return []
        event = next(self._running, None)
        if event is None:
            self._running = None
            return self.poll(timeout_s)
        return [event]

    def stop(self, *, gently: bool) -> None:
        """Close the samples' file and give torch its threads back."""
        if self._running is not None:
            self._running = None
        if self._samples is not None:
            self._samples.close()
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)

    def _parts(self, firing: Firing) -> list[object]:
        return [self._workers[each.worker].block(each.number, each.rows, each.columns) for each in firing.inputs]

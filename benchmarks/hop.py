"""What a control hop costs beside a bare ZeroMQ ping-pong: ``python benchmarks/hop.py``.

A hop is one decision of the scheduler: its message goes to a worker's main thread, whose answer comes back to the
scheduler's poll. Both rows run between two processes, in turn in each round, over the same kind of socket. CPU counts
the user and system time of both processes, ZeroMQ's own threads included. Prints the median of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import zmq

from flowrl.runtime.control import ControlServer
from flowrl.runtime.endpoint import Control, Endpoint

_MESSAGE = {"op": "fire", "node": "reward", "firing": 7, "keys": [[3, 1, 0], [3, 1, 1]]}


def main() -> None:
    """Measure, and print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hops", type=int, default=500, help="hops in one round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = _measure(Path(folder), options.hops, options.rounds)
    bare_wall, bare_cpu = rows["bare zmq"]
    for name, (wall, cpu) in rows.items():
        print(
            f"{name:10} wall {wall * 1e6:6.0f} us ({wall / bare_wall:.2f} x bare)   "
            f"cpu {cpu * 1e6:6.0f} us ({cpu / bare_cpu:.2f} x bare)"
        )


def _measure(folder: Path, num_hops: int, num_rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of wall time and of CPU a hop, by row."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = ControlServer(folder)
    bare = zmq.Context.instance().socket(zmq.ROUTER)
    bare.bind(f"ipc://{folder}/bare.sock")
    child = spawn.Process(target=_worker, args=(server.address, f"ipc://{folder}/bare.sock", there))
    child.start()
    while not server.workers:
        server.poll(0.1)
    peer = bare.recv_multipart()[0]

    def hop() -> None:
        server.send("worker", _MESSAGE)
        assert server.poll(10).messages

    def bare_hop() -> None:
        bare.send_multipart([peer, b"x" * 64])
        bare.recv_multipart()

    rows: dict[str, list[tuple[float, float]]] = {"bare zmq": [], "flowrl": []}
    for _ in range(num_rounds + 1):
        here.send("bare")
        rows["bare zmq"].append(_time(bare_hop, num_hops, lambda: bare.send_multipart([peer, b""]), here))
        here.send("flowrl")
        rows["flowrl"].append(_time(hop, num_hops, lambda: server.send("worker", {"op": "next"}), here))
    here.send("stop")
    child.join()
    server.close()
    bare.close(0)
    return {name: _median(times[1:]) for name, times in rows.items()}  # the first round warms up


def _time(hop: Callable[[], None], num_hops: int, end: Callable[[], object], child: Connection) -> tuple[float, float]:
    child_cpu = child.recv()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(num_hops):
        hop()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    end()
    child.send("cpu")
    return wall / num_hops, (cpu + child.recv() - child_cpu) / num_hops


def _median(times: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def _worker(scheduler: str, bare_address: str, parent: Connection) -> None:
    bare = zmq.Context.instance().socket(zmq.DEALER)
    bare.connect(bare_address)
    bare.send(b"here")
    endpoint = Endpoint("worker", scheduler=scheduler)
    endpoint.start()
    while (row := parent.recv()) != "stop":
        parent.send(time.process_time())
        if row == "cpu":
            continue
        if row == "bare":
            while frame := bare.recv():
                bare.send(frame)
        else:
            _answer(endpoint)
    endpoint.close()
    bare.close(0)


def _answer(endpoint: Endpoint) -> None:
    while True:
        arrival = endpoint.receive(None)
        assert isinstance(arrival, Control)
        if arrival.message["op"] == "next":
            return
        endpoint.send_control({"op": "done", "firing": 7, "keys": [[3, 1, 0], [3, 1, 1]]})


if __name__ == "__main__":
    main()

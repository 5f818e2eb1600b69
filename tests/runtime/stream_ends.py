"""What test_queue.py does at one end of a stream, here or in a process of its own; light, for each imports it anew."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from flowrl.rows import Key, Rows
from flowrl.runtime.endpoint import Data, Endpoint


def row(number: int, num_bytes: int = 8) -> Rows:
    return Rows([Key(0, number)], {"number": np.array([number]), "load": np.zeros((1, num_bytes), np.uint8)})


def take(endpoint: Endpoint, count: int, *, timeout_s: float = 10.0) -> list[int]:
    """The numbers of the next `count` blocks, each committed."""
    numbers = []
    for _ in range(count):
        data = endpoint.receive(timeout_s)
        assert isinstance(data, Data), f"{data} after {numbers}"
        numbers.append(int(data.content["number"][0]))  # type: ignore[index]
        endpoint.commit(data)
    return numbers


def consume(address_to: Any, count: int) -> None:
    """A process that commits `count` blocks, takes more without committing them, and sits there."""
    consumer = Endpoint("c", scheduler=None, window_items=8)
    consumer.start()
    address_to.send(consumer.data_endpoint)
    address_to.send(take(consumer, count))
    assert isinstance(consumer.receive(10), Data)
    address_to.send("holding")
    time.sleep(60)


def exit_with_unsent(report: Any) -> None:
    """A process that sends one block to a port where nobody listens, and ends."""
    producer = Endpoint("p", scheduler="tcp://127.0.0.1:9")
    producer.start()
    producer.send_control({"op": "hello"})
    producer.send_rows("c", "tcp://127.0.0.1:9", {}, row(0))
    start = time.monotonic()
    producer.close(drain_s=0.2)
    report.send((time.monotonic() - start, producer.statistics().undelivered, threading.active_count()))

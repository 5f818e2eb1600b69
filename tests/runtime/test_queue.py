"""Streams between processes: bounded exactly, lossless through kills, and nothing left when they end."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from flowrl.errors import DeadlineError, RunError, WireError
from flowrl.runtime import sockets, wire
from flowrl.runtime.control import ControlServer
from flowrl.runtime.credit import Arrival, Item, ReceiveWindow, SendWindow, Window
from flowrl.runtime.endpoint import Control, Data, Ended, Endpoint
from flowrl.runtime.wire import Flag, Kind
from tests.runtime.stream_ends import consume, exit_with_unsent, row, take

pytestmark = pytest.mark.timeout(30)
SPAWN = multiprocessing.get_context("spawn")


def item(seq: int, num_bytes: int = 10) -> Item:
    return Item(seq, wire.Payload(b"", 0, 0), num_bytes)


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def made() -> Iterator[list[Endpoint | ControlServer]]:
    things: list[Endpoint | ControlServer] = []
    yield things
    for thing in things:
        thing.close()


@pytest.fixture
def endpoint(made: list[Endpoint | ControlServer]) -> Callable[..., Endpoint]:
    def make(name: str, **options: Any) -> Endpoint:
        one = Endpoint(name, **{"scheduler": None, **options})
        made.append(one)
        one.start()
        return one

    return make


@pytest.fixture
def server(made: list[Endpoint | ControlServer]) -> ControlServer:
    one = ControlServer()
    made.append(one)
    return one


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("s")
    path.chmod(0o700)
    return path


# The state machines, without sockets.


def test_credits_let_go_exactly_the_window_of_items() -> None:
    window = SendWindow()
    for number in range(40):
        window.offer(item(number))
    assert window.next() is None, "nothing before WELCOME"
    window.window = Window(items=16)
    assert sum(1 for _ in iter(window.next, None)) == 16


def test_credits_bound_bytes_and_let_a_larger_block_pass_alone() -> None:
    window = SendWindow()
    window.window = Window(items=16, num_bytes=100)
    for number, size in enumerate([60, 60, 500, 10], start=1):
        window.offer(item(number, size))
    order = []
    while sending := list(iter(window.next, None)):
        order.append([block.num_bytes for block in sending])
        window.acknowledge([block.seq for block in sending])
    assert order == [[60], [60], [500], [10]]


@pytest.mark.parametrize("seed", range(20))
def test_random_breaks_neither_lose_nor_double_a_block_nor_leak_credit(seed: int) -> None:
    chance = random.Random(seed)
    sender, receiver = SendWindow(), ReceiveWindow("life")
    wanted = list(range(1, 200))
    for seq in wanted:
        sender.offer(item(seq))
    sender.window = Window(items=7)
    line: list[int] = []
    acks: list[int] = []
    taken: list[int] = []
    while sender.statistics().undelivered:
        line += [block.seq for block in iter(sender.next, None)]
        assert sender.statistics().in_flight_items <= 7
        if chance.random() < 0.1:  # the connection breaks: the end of the line is lost, and so are acknowledgements
            del line[chance.randint(0, len(line)) :]
            acks.clear()
            sender.disconnect()
            sender.window = Window(items=7)
        while line and chance.random() < 0.7:
            seq = line.pop(0)
            match receiver.arrive(seq, 10):
                case Arrival.NEW:
                    taken.append(seq)
                case Arrival.COMMITTED:
                    acks.append(seq)
        held = [seq for seq in receiver.held if chance.random() < 0.5]
        acks += [seq for seq in held if receiver.commit(seq)]
        sender.acknowledge(acks)
        acks.clear()
    assert taken == wanted
    assert sender.statistics().in_flight_bytes == 0
    assert not receiver.held


# Real sockets.


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_a_receiver_that_reads_nothing_gets_exactly_the_window(
    endpoint: Callable[..., Endpoint], folder: Path, over: str
) -> None:
    where = {"run_dir_socket": folder} if over == "ipc" else {}
    producer, consumer = endpoint("p", **where), endpoint("c", window_items=16, **where)
    assert consumer.data_endpoint.startswith(over)
    for number in range(100):
        producer.send_rows("c", consumer.data_endpoint, {}, row(number))
    wait_for(lambda: consumer.statistics().inbox.received >= 16)
    time.sleep(0.1)
    sent = producer.statistics().peers["c"]
    assert consumer.statistics().inbox.held_items == sent.in_flight_items == sent.sent == 16
    assert (sent.waiting_items, sent.credit_items) == (84, 0)
    assert take(consumer, 100) == list(range(100))
    assert consumer.receive(0.05) is None
    wait_for(lambda: not producer.statistics().undelivered)
    assert producer.statistics().peers["c"].credit_items == 16


def test_a_slow_consumer_makes_the_producer_block_and_sees_no_gap(endpoint: Callable[..., Endpoint]) -> None:
    producer, consumer = endpoint("p"), endpoint("c", window_items=8)
    count, most = 400, 0

    def produce() -> None:
        for number in range(count):
            producer.put("c", consumer.data_endpoint, {}, row(number), timeout_s=20)

    thread = threading.Thread(target=produce)
    thread.start()
    numbers = []
    for _ in range(count):
        time.sleep(0.001)
        numbers += take(consumer, 1)
        most = max(most, consumer.statistics().inbox.held_items + producer.statistics().undelivered)
    thread.join()
    assert numbers == list(range(count))
    assert most <= 8 + 8 + 1, "in flight, counted on both sides, and one that waits"


def test_bytes_bound_what_is_in_flight(endpoint: Callable[..., Endpoint]) -> None:
    producer, consumer = endpoint("p"), endpoint("c", window_bytes=5_000_000)
    for number in range(8):
        producer.send_rows("c", consumer.data_endpoint, {}, row(number, 2_000_000))
    wait_for(lambda: consumer.statistics().inbox.received >= 2)
    time.sleep(0.1)
    assert consumer.statistics().inbox.held_items == 2
    assert take(consumer, 8) == list(range(8))


def test_a_window_smaller_than_a_firing_and_a_block_larger_than_the_window_pass(
    endpoint: Callable[..., Endpoint],
) -> None:
    producer, consumer = endpoint("p"), endpoint("c", window_items=1, window_bytes=1000)
    for number in range(5):
        producer.send_rows("c", consumer.data_endpoint, {}, row(number, 100_000))
    assert take(consumer, 5) == list(range(5))


def test_put_that_gets_no_credit_says_who_withholds_it_and_takes_the_block_back(
    endpoint: Callable[..., Endpoint],
) -> None:
    producer, consumer = endpoint("p"), endpoint("c", window_items=2)
    for number in range(2):
        producer.put("c", consumer.data_endpoint, {}, row(number), timeout_s=5)
    with pytest.raises(DeadlineError, match=r"(?s)peer 'c' gave no credit .* within 0.1 s.*found: *2 blocks"):
        producer.put("c", consumer.data_endpoint, {}, row(2), timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"(?s)peer 'x' gave no credit .*found: *no answer from tcp://127.0.0.1:9"):
        producer.put("x", "tcp://127.0.0.1:9", {}, row(2), timeout_s=0.1)
    assert take(consumer, 2) == [0, 1]
    assert consumer.receive(0.1) is None


def test_blocks_sent_before_the_consumer_exists_arrive(endpoint: Callable[..., Endpoint], folder: Path) -> None:
    producer = endpoint("p")
    address = f"ipc://{folder}/late.sock"
    for number in range(15):
        producer.send_rows("c", address, {}, row(number))
    time.sleep(0.5)
    consumer = Late(address)
    try:
        assert consumer.numbers(15) == list(range(1, 16))
    finally:
        consumer.close()


class Late:
    """A consumer of frames that binds to a given address, to be late, deaf or gone at will."""

    def __init__(self, address: str, *, window: int = 100) -> None:
        self.context: sockets.Context = zmq.Context()
        self.socket = sockets.socket(self.context, zmq.ROUTER)
        sockets.bind(self.socket, address=address)
        self.socket.rcvtimeo = 10_000
        self.window = window
        self.flags: list[int] = []

    def numbers(self, count: int, *, acknowledge: bool = True) -> list[int]:
        """The sequence numbers of the next blocks."""
        seqs: list[int] = []
        while len(seqs) < count:
            identity, first, *_ = self.socket.recv_multipart()
            message = wire.decode(first)
            if message.kind == Kind.HELLO:
                welcome = {0: 1, 1: [self.window, 1 << 30], 4: 0}
                self.socket.send_multipart([identity, wire.encode(Kind.WELCOME, welcome)])
                continue
            seqs.append(message.seq)
            self.flags.append(message.flags)
            if acknowledge:
                self.socket.send_multipart([identity, wire.encode(Kind.ACK, {0: [message.seq]})])
        return seqs

    def close(self) -> None:
        self.context.destroy(0)


def test_what_a_broken_connection_left_unacknowledged_comes_again_marked(
    endpoint: Callable[..., Endpoint], folder: Path
) -> None:
    producer, address = endpoint("p"), f"ipc://{folder}/c.sock"
    for number in range(6):
        producer.send_rows("c", address, {}, row(number))
    first = Late(address, window=4)
    assert first.numbers(4, acknowledge=False) == [1, 2, 3, 4]
    first.close()
    second = Late(address)
    assert second.numbers(6) == [1, 2, 3, 4, 5, 6]
    assert [bool(flags & Flag.REDELIVERED) for flags in second.flags] == [True] * 4 + [False] * 2
    wait_for(lambda: producer.statistics().peers["c"].acknowledged == 6)
    assert producer.statistics().peers["c"].redelivered == 4
    second.close()


def test_a_block_that_comes_twice_is_seen_once(endpoint: Callable[..., Endpoint]) -> None:
    producer, consumer = endpoint("p"), endpoint("c", window_items=8)
    for number in range(6):
        producer.send_rows("c", consumer.data_endpoint, {}, row(number))
    assert take(consumer, 3) == [0, 1, 2]
    wait_for(lambda: consumer.statistics().inbox.received == 6)
    producer.redirect(
        "c", consumer.data_endpoint
    )  # as after a break: three held, up to three not known to be committed
    wait_for(lambda: consumer.statistics().inbox.duplicates >= 3)
    assert take(consumer, 3) == [3, 4, 5]
    assert consumer.receive(0.1) is None
    wait_for(lambda: not producer.statistics().undelivered)
    assert consumer.statistics().inbox.committed == 6


def started(target: Callable[..., None], *args: object) -> tuple[BaseProcess, Any]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    return process, here


def test_kill_9_of_a_consumer_loses_nothing_that_its_replacement_can_get(endpoint: Callable[..., Endpoint]) -> None:
    producer = endpoint("p")
    process, pipe = started(consume, 6)
    address = pipe.recv()
    for number in range(50):
        producer.send_rows("c", address, {}, row(number))
    assert pipe.recv() == [0, 1, 2, 3, 4, 5]
    assert pipe.recv() == "holding"
    wait_for(lambda: producer.statistics().peers["c"].acknowledged == 6)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    replacement = endpoint("c")
    producer.redirect("c", replacement.data_endpoint)
    assert take(replacement, 44) == list(range(6, 50))
    assert replacement.receive(0.1) is None
    assert 1 <= producer.statistics().peers["c"].redelivered <= 8, "at most the window"


def test_a_process_with_unsent_blocks_exits_in_time_and_says_how_many() -> None:
    process, pipe = started(exit_with_unsent)
    took_s, undelivered, num_threads = pipe.recv()
    process.join(5)
    assert process.exitcode == 0
    assert took_s < 1.0
    assert undelivered == 1
    assert num_threads == 1


def test_strangers_and_garbage_are_dropped_and_counted(
    endpoint: Callable[..., Endpoint], server: ControlServer
) -> None:
    producer, consumer = endpoint("p", scheduler=server.address), endpoint("c")
    context: sockets.Context = zmq.Context()
    stranger = sockets.socket(context, zmq.DEALER)
    stranger.connect(consumer.data_endpoint)
    stranger.connect(server.address)
    garbage = [b"", b"GET / HTTP/1.1", b"\x91" * 5000, wire.encode(Kind.DATA, {0: 1}, seq=1)]
    garbage += [wire.encode(Kind.HELLO, {0: "x"}), wire.encode(Kind.HELLO, {0: [1, 1], 1: ["n" * 2000, ""]})]
    for frame in garbage * 2:  # a DEALER deals them out in turn
        stranger.send(frame)
        stranger.send_multipart([frame, b"more", b"and more"])
    producer.send_control({"op": "ready"})
    producer.send_rows("c", consumer.data_endpoint, {}, row(7))
    assert take(consumer, 1) == [7]
    messages: list[Any] = []
    wait_for(lambda: messages.extend(server.poll(0.05).messages) or messages)
    assert messages == [("p", {"op": "ready"})]
    wait_for(lambda: server.poll(0.01) and consumer.statistics().rejected + server.rejected == 24)
    context.destroy(0)


def test_a_stranger_under_a_workers_name_is_not_listened_to(
    endpoint: Callable[..., Endpoint], made: list[Endpoint | ControlServer]
) -> None:
    server = ControlServer(secret="ours")
    made.append(server)
    consumer = endpoint("c", secret="ours")
    producer = endpoint("p", scheduler=server.address, secret="ours")
    producer.send_rows("c", consumer.data_endpoint, {}, row(1))
    assert take(consumer, 1) == [1]
    stranger = endpoint("p", scheduler=server.address)
    stranger.send_control({"is": "failed"})
    stranger.send_rows("c", consumer.data_endpoint, {}, row(2))
    wait_for(lambda: server.poll(0.01) and server.rejected == 2 and consumer.statistics().rejected == 1)
    producer.send_control({"op": "ready"})
    producer.send_rows("c", consumer.data_endpoint, {}, row(3))
    assert take(consumer, 1) == [3]
    found: list[Any] = []
    wait_for(lambda: found.extend(server.poll(0.05).messages) or found)
    assert found == [("p", {"op": "ready"})]


def test_a_block_that_cannot_be_read_is_refused_and_the_sender_hears_of_it(endpoint: Callable[..., Endpoint]) -> None:
    producer, consumer = endpoint("p"), endpoint("c")
    packed = wire.pack_header({0: 1, 1: [["keys", 4, 0, [9, 9], 0, 12]], 2: 0}, what="test")
    broken = wire.Payload(packed, len(packed), Flag.OOB.value, [bytes(12)])
    producer._send("c", consumer.data_endpoint, broken)
    producer.send_rows("c", consumer.data_endpoint, {}, row(1))
    with pytest.raises(WireError, match=r"peer 'c' refuses what it was sent: .*'keys' has 12 bytes"):
        producer.receive(5)
    assert take(consumer, 1) == [1]
    assert producer.statistics().peers["c"].refused == 1


def test_a_finished_stream_ends_after_its_last_block(endpoint: Callable[..., Endpoint]) -> None:
    producer, consumer = endpoint("p"), endpoint("c", window_items=2)
    for number in range(5):
        producer.send_rows("c", consumer.data_endpoint, {}, row(number))
    producer.finish("c")
    assert take(consumer, 5) == list(range(5))
    assert consumer.receive(5) == Ended("p")
    producer.send_rows("c", consumer.data_endpoint, {}, row(5))
    assert take(consumer, 1) == [5]
    consumer.drain()
    assert consumer.receive(5) == Ended("p")


def test_tensors_and_large_rows_arrive_equal(endpoint: Callable[..., Endpoint]) -> None:
    producer, consumer = endpoint("p"), endpoint("c")
    tensors = {"w": torch.randn(400, 300).bfloat16(), "b": torch.zeros(3)}
    producer.send_tensors("c", consumer.data_endpoint, {"version": 4}, tensors)
    data = consumer.receive(5)
    assert isinstance(data, Data)
    assert data.header == {"version": 4}
    assert all(torch.equal(data.content[name], tensor) for name, tensor in tensors.items())
    assert data.from_peer == "p"


def test_a_folder_that_others_can_enter_and_an_address_of_other_machines_are_refused(
    tmp_path: Path, endpoint: Callable[..., Endpoint]
) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(WireError, match="can be entered by other users"):
        Endpoint("p", scheduler=None, run_dir_socket=tmp_path).start()
    for address in ("tcp://0.0.0.0:*", "tcp://10.0.0.1:5000", "tcp://*:*"):
        with pytest.raises(WireError, match="can be reached from other machines"):
            ControlServer(address=address)
    with pytest.raises(WireError, match="can be reached from other machines"):
        endpoint("p").send_rows("c", "tcp://10.0.0.1:5000", {}, row(1))


def test_a_port_that_is_taken_is_named(server: ControlServer) -> None:
    with pytest.raises(WireError, match=f"cannot listen at {server.address}: Address already in use"):
        ControlServer(address=server.address)


def test_many_binds_at_once_never_meet() -> None:
    for _ in range(5):
        endpoints = [Endpoint(f"e{number}", scheduler=None) for number in range(8)]
        threads = [threading.Thread(target=endpoint.start) for endpoint in endpoints]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({endpoint.data_endpoint for endpoint in endpoints}) == 8
        for endpoint in endpoints:
            endpoint.close()


def test_nothing_is_left_after_close(folder: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        server = ControlServer(folder)
        one, other = (Endpoint(name, scheduler=server.address, run_dir_socket=folder) for name in "ab")
        one.start()
        other.start()
        one.send_rows("b", other.data_endpoint, {}, row(1))
        assert take(other, 1) == [1]
        for thing in (one, other, server) * 2:
            thing.close()
        with pytest.raises(RunError, match="endpoint 'a' is closed"):
            one.send_control({})

    once()
    files, threads = open_files(), threading.active_count()
    once()
    assert list(folder.iterdir()) == []
    assert (open_files(), threading.active_count()) == (files, threads)


# Control.


def test_control_goes_both_ways_in_order(endpoint: Callable[..., Endpoint], server: ControlServer) -> None:
    worker = endpoint("w", scheduler=server.address)
    assert not server.send("nobody", {})
    for number in range(20):
        worker.send_control({"number": number})
    found: list[Any] = []
    while len(found) < 20:
        found += server.poll(5).messages
    assert found == [("w", {"number": number}) for number in range(20)]
    for number in range(20):
        assert server.send("w", {"number": number})
    assert [worker.receive(5) for _ in range(20)] == [Control({"number": number}) for number in range(20)]


def test_what_a_worker_says_just_before_it_closes_arrives(server: ControlServer) -> None:
    for number in range(10):
        worker = Endpoint("w", scheduler=server.address)
        worker.start()
        worker.send_control({"number": number, "text": "x" * 100_000})
        worker.close()
        ((_, message),) = server.poll(5).messages
        assert message["number"] == number


def test_poll_ends_when_a_file_descriptor_is_ready_and_when_its_time_is_over(server: ControlServer) -> None:
    read, write = os.pipe()
    assert server.poll(0.02, [read]) == ([], [])
    os.write(write, b"x")
    assert server.poll(5, [read]) == ([], [read])
    assert server.poll(0) == ([], [])
    os.close(read)
    os.close(write)


def test_a_busy_main_thread_neither_stops_pings_nor_requests(
    endpoint: Callable[..., Endpoint], server: ControlServer
) -> None:
    worker, other = endpoint("w", scheduler=server.address), endpoint("o")

    def serve(message: dict[str, Any]) -> bool:
        if message["op"] != "fetch":
            return False
        worker.send_rows("o", other.data_endpoint, {}, row(message["number"]))
        return True

    worker.on_control = serve
    wait_for(lambda: server.poll(0.01) and server.workers)
    server.send("w", {"op": "fetch", "number": 3})
    assert take(other, 1) == [3], "while the main thread of the worker never looks"
    before = server.last_seen("w") or 0.0
    server.poll(1.3)
    assert (server.last_seen("w") or 0.0) > before
    server.send("w", {"op": "fire"})
    assert worker.receive(5) == Control({"op": "fire"})


def test_a_receive_without_time_sees_what_has_come_and_does_not_wait(
    endpoint: Callable[..., Endpoint], server: ControlServer
) -> None:
    worker = endpoint("w", scheduler=server.address)
    wait_for(lambda: server.poll(0.01) and server.workers)
    for _ in range(3):
        assert worker.receive(0.0) is None
        server.send("w", {"op": "fire"})
        wait_for(lambda: worker.receive(0.0) == Control({"op": "fire"}))


def test_a_handler_that_raises_reaches_the_main_thread(
    endpoint: Callable[..., Endpoint], server: ControlServer
) -> None:
    worker = endpoint("w", scheduler=server.address)

    def fail(message: dict[str, Any]) -> bool:
        raise RuntimeError(f"no {message['op']} today")

    worker.on_control = fail
    wait_for(lambda: server.poll(0.01) and server.workers)
    server.send("w", {"op": "fetch"})
    with pytest.raises(RuntimeError, match="no fetch today"):
        worker.receive(5)

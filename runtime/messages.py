"""Events and commands as plain maps for the control sockets, and back.

Keys travel as packed 32-bit integers and tuples as lists: a firing over 256 rows is some hundred bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from flowrl.backend import metric_of
from flowrl.rows import Key, pack_keys, unpack_keys

from .events import Block, Event, Failed, Finished, Fire, Firing, Free, Input, Joined, Produced, Send


def pack_command(command: Fire | Send | Free, address: str | None = None) -> dict[str, Any]:
    """A command for a worker; `address` is where a `Send` goes."""
    match command:
        case Fire(_, firing):
            inputs = [[i.source, i.worker, i.number, _numbers(i.rows), list(i.columns)] for i in firing.inputs]
            head = [firing.id, firing.node, firing.action, firing.step, firing.attempt, firing.version]
            return {"do": "fire", "head": head, "keys": _keys(firing.keys), "in": inputs, "set": firing.settings}
        case Send(_, to, firing_id, index, number, rows, columns):
            return {
                "do": "send", "to": to, "at": address, "firing": firing_id, "index": index,
                "number": number, "rows": _numbers(rows), "columns": list(columns),
            }  # fmt: skip
        case Free(_, numbers):
            return {"do": "free", "numbers": list(numbers)}


def unpack_firing(message: dict[str, Any]) -> Firing:
    """The firing of a ``fire`` message."""
    number, node, action, step, attempt, version = message["head"]
    inputs = tuple(Input(s, w, n, _tuple(rows), tuple(columns)) for s, w, n, rows, columns in message["in"])
    return Firing(number, node, action, step, attempt, _unkeys(message["keys"]), inputs, version, message["set"])


def unpack_rows(message: dict[str, Any]) -> tuple[int, ...] | None:
    """The row positions of a ``send`` message."""
    return _tuple(message["rows"])


def pack_event(event: Event) -> dict[str, Any]:
    """What a worker tells the scheduler."""
    match event:
        case Produced(_, firing, attempt, block, dropped):
            packed = None
            if block is not None:
                lengths = _numbers(block.lengths)
                packed = [block.number, _keys(block.keys), list(block.columns), block.num_bytes, lengths]
            reasons: dict[str, list[Key]] = {}
            for key, reason in dropped.items():
                reasons.setdefault(reason, []).append(key)
            packed_reasons = [[reason, _keys(keys)] for reason, keys in reasons.items()]
            return {"is": "produced", "firing": firing, "attempt": attempt, "block": packed, "dropped": packed_reasons}
        case Finished(_, firing, attempt, metrics, compute_s):
            sums = {name: list(value) for name, value in metrics.items()}
            return {"is": "finished", "firing": firing, "attempt": attempt, "metrics": sums, "compute_s": compute_s}
        case Failed(_, firing, attempt, error):
            return {"is": "failed", "firing": firing, "attempt": attempt, "error": error}
        case Joined():
            return {"is": "joined"}
        case _:
            raise AssertionError(f"a worker does not send {event}")


def unpack_event(worker: str, message: dict[str, Any]) -> Event:
    """What a worker told."""
    match message["is"]:
        case "produced":
            block = None
            if message["block"] is not None:
                number, keys, columns, num_bytes, lengths = message["block"]
                block = Block(worker, number, _unkeys(keys), tuple(columns), num_bytes, _tuple(lengths))
            dropped = {key: reason for reason, keys in message["dropped"] for key in _unkeys(keys)}
            return Produced(worker, message["firing"], message["attempt"], block, dropped)
        case "finished":
            metrics = {name: metric_of(value) for name, value in message["metrics"].items()}
            return Finished(worker, message["firing"], message["attempt"], metrics, message["compute_s"])
        case "failed":
            return Failed(worker, message["firing"], message["attempt"], message["error"])
        case "joined":
            return Joined(worker)
        case other:
            raise AssertionError(f"worker {worker!r} sent an unknown event {other!r}")


def _keys(keys: Sequence[Key]) -> bytes:
    return pack_keys(keys).tobytes()


def _unkeys(packed: bytes) -> tuple[Key, ...]:
    numbers = array("i")
    numbers.frombytes(packed)
    return tuple(unpack_keys(numbers))


def _numbers(numbers: Sequence[int] | None) -> bytes | None:
    return None if numbers is None else array("q", numbers).tobytes()


def _tuple(packed: bytes | None) -> tuple[int, ...] | None:
    if packed is None:
        return None
    numbers = array("q")
    numbers.frombytes(packed)
    return tuple(numbers)

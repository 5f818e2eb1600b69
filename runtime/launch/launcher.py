"""What a launcher does: start workers, carry commands to them and events back, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..events import Event, Fire, Free, Send
from ..plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a launcher needs to know of a run."""

    plan: Plan
    seed: int
    devices: Mapping[str, str]
    """By model worker."""
    threads: int
    """Torch threads of each worker."""
    samples: Path | None = None
    """Where samples are written."""
    graph_spec: str | None = None
    """``file.py:name``, for processes that have to trace the graph again; None for one that has no file."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Graph parameters that differ from their defaults, as plain data."""
    on_output: Callable[[str, str], None] = lambda worker, line: None
    """Called with each line that a worker process prints."""


class Launcher(Protocol):
    """Carries a run's commands and events; used by one thread."""

    def start(self) -> None:
        """Begin to start workers; each is announced by a `Joined`."""
        ...

    def send(self, command: Fire | Send | Free) -> None:
        """Carry one command to its worker. Commands to one worker arrive in order."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Events that have come; waits for one at most `timeout_s`."""
        ...

    def stop(self, *, gently: bool) -> None:
        """End all workers, within seconds; `gently` lets them close what they hold."""
        ...

"""How long a run goes on, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How long, from where, and how patiently."""

    num_steps: int
    """Steps of the whole run, those before `first_step` included."""
    first_step: int = 0
    """Version that the run starts from: 0, or a checkpoint's."""
    load_from: str | None = None
    """Folder of the checkpoint to start from."""
    cursors: Mapping[str, Any] = field(default_factory=dict)
    """What that checkpoint says of prompts: see cursor.py."""
    coefficients: Mapping[str, Any] = field(default_factory=dict)
    """What it says of adaptive settings: see adaptive.py."""
    save_every: int | None = None
    """Versions between two checkpoints; the last version is always saved. None saves none."""
    save_to: str = ""
    """Folder of the checkpoints."""
    lease_s: float = 600.0
    """Longest that a worker with work may go without a sign of progress."""


@dataclass(slots=True)
class Course:
    """How far a run is: steps ``closed`` to ``opened - 1`` are in memory."""

    closed: int
    """First step that is not closed yet."""
    opened: int
    """First step that is not open yet."""
    end: int
    """The step that the run ends before: `Options.num_steps`, or the first that the data has no prompts for."""

    @classmethod
    def start(cls, options: Options) -> Course:
        """Nothing is done yet."""
        first = options.first_step
        return cls(first, first, max(first, options.num_steps))


def shown(step: int) -> int:
    """How users count steps: step 0 is the first, and makes version 1."""
    return step + 1

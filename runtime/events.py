"""What the scheduler hears and what it says: the words between it and the workers.

An `Event` is a fact (a worker joined, rows exist, a firing ended); a `Command` is a wish (fire this there, send those
rows to that worker). Both are frozen records of plain values: they cross a socket as msgpack maps and are easy to
invent in a test. Bodies of rows never appear here: a `Block` says which rows lie with which worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.backend import Metrics
from flowrl.rows import Key

Action = Literal[
    "prompts",
    "rollout",
    "responses",
    "forward",
    "judge",
    "function",
    "filter",
    "backward",
    "step",
    "evaluate",
    "record",
    "export",
    "import",
    "save",
    "load",
]
"""What a worker does in a firing."""
MAKES_SAMPLES: frozenset[Action] = frozenset({"rollout", "responses"})
"""Those that take prompts and give their samples."""


NO_FIRING = -1
"""The firing of a failure that none was running on."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows (or, for a weight sync, tensors) that lie with the worker that made them."""

    worker: str
    number: int
    """Unique on its worker."""
    keys: tuple[Key, ...]
    columns: tuple[str, ...]
    num_bytes: int
    lengths: tuple[int, ...] | None = None
    """Tokens of each row (prompt and response), from a rollout: what an update packs by."""


@dataclass(frozen=True, slots=True)
class Input:
    """Rows of one block that a firing reads."""

    source: str
    """The node that made the block."""
    worker: str
    number: int
    rows: tuple[int, ...] | None
    """Positions in the block; None is all."""
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Firing:
    """One execution of a node on a worker."""

    id: int
    node: str
    action: Action
    step: int
    attempt: int
    keys: tuple[Key, ...]
    """The rows that it is about, in the order that it takes them; a rollout's are its prompts'."""
    inputs: tuple[Input, ...] = ()
    version: int = 0
    """Of the weights that it reads, or, for ``step`` and ``import``, that it publishes."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Plain values of one action: a denominator, a folder, reasons of dropped rows; of a function, numbers in place of
    its adaptive settings."""


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is ready: its graph is traced and its models are loaded."""

    worker: str


@dataclass(frozen=True, slots=True)
class Produced:
    """Some rows of a firing exist; more may follow until its `Finished`.

    By then every row of a rollout (each sample), forward pass, function or filter has been in a block or in `dropped`;
    a filter's block has no columns. A metric node says nothing of its rows. No prompts mean that the data has ended.
    """

    worker: str
    firing: int
    attempt: int
    block: Block | None
    dropped: dict[Key, str] = field(default_factory=dict)
    """Rows that the node dropped, with the reason."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A firing ended well."""

    worker: str
    firing: int
    attempt: int
    metrics: Metrics = field(default_factory=dict)
    compute_s: float = 0.0
    """Seconds inside the node's own code."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A firing raised; or, with ``firing=-1``, its worker cannot go on."""

    worker: str
    firing: int
    """Or `NO_FIRING`: it could not join, or not serve a block."""
    attempt: int
    error: dict[str, Any]
    """``type``, ``problem`` and the other parts of a FlowrlError, ``traceback``."""


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process ended."""

    worker: str
    reason: str
    """Its exit code or signal, and the tail of its stderr."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: what leases are measured by."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user, or the system, wants the run to end."""

    signal: str


Event = Joined | Produced | Finished | Failed | Died | Tick | Interrupted


# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fire:
    """Run a firing on a worker, once its inputs are there."""

    worker: str
    firing: Firing


@dataclass(frozen=True, slots=True)
class Send:
    """Send rows of a block straight to another worker, for one of its firings."""

    worker: str
    """Where the block lies."""
    to: str
    firing: int
    index: int
    """Position among the firing's inputs."""
    number: int
    rows: tuple[int, ...] | None
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Forget blocks: every reader is done with them."""

    worker: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is consumed and recorded: one line of ``metrics.jsonl``."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """All ranks have written a checkpoint of a version: publish it."""

    version: int
    cursors: dict[str, Any] = field(default_factory=dict)
    """By prompts stage whose batches are no function of the step: see cursor.py."""
    coefficients: dict[str, Any] = field(default_factory=dict)
    """By adaptive setting of a function: see adaptive.py."""


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user; the run goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Halt:
    """The run is over."""

    outcome: Literal["done", "failed", "interrupted"]
    error: dict[str, Any] | None = None


Command = Fire | Send | Free | StepDone | Saved | Warn | Halt

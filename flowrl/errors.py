"""Every exception of flowrl, in one tree.

::

    FlowrlError
    ├── GraphError            the graph as declared cannot be right; found before any process starts
    │   ├── TracedValueError  a handle was used as a value (``if samples:``)
    │   ├── NameConflict      two things carry one name
    │   ├── UnknownName       a name that nothing carries (a graph, a model, a setting)
    │   ├── WrongType         an edge or a setting of the wrong type
    │   ├── UnknownColumn     a node reads a column that no given stream has
    │   ├── AmbiguousColumn   a node reads a column that several given streams have
    │   ├── GraphCycle        a cycle that no model version breaks
    │   ├── UnreadOutput      a node whose output nobody reads
    │   ├── GroupError        a group too small for what reads it
    │   ├── LengthError       prompt + response longer than the model
    │   ├── MeshError         mesh factors, ranks and batch do not fit
    │   ├── RateError         no repetition vector, or the bounded queues would deadlock
    │   └── ProvenanceError   log-probs of different temperature, support or model are mixed, or tokens of two models
    ├── ConfigError           a graph parameter: unknown key, wrong type, unreadable file
    ├── DataError             the rows of a source: none, too few, too long, a missing value
    ├── BackendError          a backend that is not installed, or cannot do what is asked
    ├── PackageError          a package that a node function needs is not installed
    ├── WireError             a value or a message that the wire does not carry
    └── RunError              the run failed after it had started
        ├── NodeError         a node's own exception, with its traceback, node and rank
        ├── ResultError       a node function gave the wrong count, type or value
        ├── SandboxError      a program could not be run in a sandbox: a failure, and no result of the program's
        ├── TemplateError     a chat template renders what was sampled as something else
        ├── WorkerDied        a process ended without saying why
        ├── DeadlineError     a wait ran out; says what for, and who owes it
        ├── MismatchError     the sampler is further from the trainer than the update allows
        ├── CheckpointError   a checkpoint that cannot be written or read
        └── LedgerError       the ledger's sums do not add up: a bug of flowrl

The first five, up to `PackageError`, end `flowrl` with exit code 2; the others with 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """A line in the user's file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class FlowrlError(Exception):
    """A message in five parts: where, what is wrong, what was found, what was wanted and the way out.

    Args:
        problem: one sentence that names the node, mesh, field or file.
        at: the line of the user's file that has to change.
        node: the name of the node, when one is concerned.
        found: the value found.
        wanted: the value wanted.
        fix: what to do.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        at: Location | None = None,
        node: str | None = None,
        found: object = None,
        wanted: object = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.at = at
        self.node = node
        self.found = found
        self.wanted = wanted
        self.fix = fix
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [f"{self.at}: {self.problem}" if self.at else self.problem]
        for label, value in (("found", self.found), ("wanted", self.wanted), ("fix", self.fix)):
            if value is not None:
                lines.append(f"  {label + ':':<8}{value}")
        return "\n".join(lines)


class GraphError(FlowrlError):
    """The graph as declared cannot be right."""

    exit_code = 2


class TracedValueError(GraphError):
    """A handle was used as a value while the graph is traced."""


class NameConflict(GraphError):
    """Two things carry one name."""


class UnknownName(GraphError):
    """A name that nothing carries."""


class WrongType(GraphError):
    """An edge or a setting of the wrong type."""


class UnknownColumn(GraphError):
    """A node reads a column that no given stream has."""


class AmbiguousColumn(GraphError):
    """A node reads a column that several given streams have."""


class GraphCycle(GraphError):
    """A cycle that no model version breaks."""


class UnreadOutput(GraphError):
    """A node whose output nobody reads."""


class GroupError(GraphError):
    """A group too small for the estimator that reads it."""


class LengthError(GraphError):
    """Prompt and response together are longer than the model."""


class MeshError(GraphError):
    """Mesh factors, ranks and batch do not fit each other."""


class RateError(GraphError):
    """No repetition vector exists, or the bounded queues would deadlock."""


class ProvenanceError(GraphError):
    """Log-probs of different temperature, support or model are mixed."""


class ConfigError(FlowrlError):
    """A graph parameter: unknown key, wrong type, unreadable file."""

    exit_code = 2


class DataError(FlowrlError):
    """The rows of a source: none, too few, too long, a missing value."""

    exit_code = 2


class BackendError(FlowrlError):
    """A backend that is not installed, or cannot do what is asked of it."""

    exit_code = 2


class PackageError(FlowrlError):
    """A package that a node function needs is not installed."""

    exit_code = 2


class WireError(FlowrlError):
    """A value or a message that the wire does not carry."""


class RunError(FlowrlError):
    """The run failed after it had started."""


class NodeError(RunError):
    """A node's own exception; `traceback` is the text that Python printed in the worker."""

    def __init__(self, problem: str, *, traceback: str = "", **parts: object) -> None:
        super().__init__(problem, **parts)  # type: ignore[arg-type]
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.traceback}".rstrip()


class ResultError(RunError):
    """A node function gave the wrong count, type or value."""


class SandboxError(RunError):
    """A program could not be run in a sandbox; what a program does wrong is a result, and no error."""


class TemplateError(RunError):
    """A chat template renders what was sampled as something else."""


class WorkerDied(RunError):
    """A process ended without saying why."""


class DeadlineError(RunError):
    """A wait ran out."""


class MismatchError(RunError):
    """The sampler is further from the trainer than the update allows."""


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read."""


class LedgerError(RunError):
    """The ledger's sums do not add up: a bug of flowrl."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` was most likely meant to be, or None."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """``did you mean 'advantages'?``, or None when no candidate is near."""
    match = nearest(name, candidates)
    return f"did you mean {match!r}?" if match else None

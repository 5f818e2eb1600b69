"""Settings as plain values, for pictures, reports and records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .coefficients import Coefficient
from .loss import Loss
from .mesh import AXES, Mesh
from .model import Model
from .sources import Source

LONGEST = 16
"""Items of a list that are written out; a longer one is a data set and is counted."""


def describe(value: Any) -> Any:
    """A setting as what JSON holds: meshes by their axes, models and functions by name, losses by their formula,
    adaptive coefficients as they are declared.

    Anything else is described by its type, never by its ``repr``: that of a data set may be pages long, and one with an
    address differs from run to run.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mesh):
        return _mesh(value)
    if isinstance(value, Model):
        return value.name
    if isinstance(value, Loss | Coefficient):
        return str(value)
    if isinstance(value, Source):
        return value.name if value.num_rows is None else f"{value.name}, {value.num_rows:,} rows"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        short = len(value) <= LONGEST
        return [describe(item) for item in value] if short else f"{type(value).__name__} of {len(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return function_name(value)


def function_name(value: Any) -> str:
    """``module:name`` of a function, decorated or not, or of the type of anything else."""
    function = getattr(value, "function", value)
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}:{name}" if name else f"{type(value).__module__}:{type(value).__qualname__}"


def _mesh(mesh: Mesh) -> dict[str, Any]:
    if mesh.workers:
        return {"name": mesh.name, "workers": mesh.workers}
    axes = {axis: getattr(mesh, axis) for axis in AXES}
    return {"name": mesh.name, **axes, "sequence_parallel": mesh.sequence_parallel, "device": mesh.device}

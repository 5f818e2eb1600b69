"""The parameters of a graph as the ``--help`` of its command line."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from flowrl.trace import GraphFunction

from .parameters import MISSING, Parameter, parameters_of, type_name

_COLUMN = 34
"""Where a parameter's text begins; a longer option stands on a line of its own."""


def help_text(function: GraphFunction[Any], *, width: int = 100) -> str:
    """Every parameter with its type, default and docstring, one under the other.

    Fields of a section follow their section; the text of a field is printed once, at the first section of its kind.
    """
    doc = inspect.getdoc(function.function) or ""
    lines = [f"Parameters of graph '{function.name}' ({function.at})", *_intro(doc), ""]
    explained: set[type[Any]] = set()
    for parameter in parameters_of(function).fields.values():
        lines += _entry(parameter, explained, width)
    return "\n".join(lines)


def _intro(doc: str) -> list[str]:
    head = doc.split("\n\n", 1)[0].strip()
    return ["", *head.splitlines()] if head else []


def _entry(parameter: Parameter, explained: set[type[Any]], width: int) -> list[str]:
    if parameter.section is None:
        return _option(parameter, False, width)
    described = parameter.section in explained
    explained.add(parameter.section)
    title = f"{parameter.section.__name__}, {_default(parameter)}"
    lines = ["", f"  {parameter.name}: {title}" + (f". {parameter.doc}" if parameter.doc else "")]
    for field in parameter.fields.values():
        lines += _entry(field, explained, width) if field.section else _option(field, described, width)
    return [*lines, ""]


def _option(parameter: Parameter, described: bool, width: int) -> list[str]:
    option = f"  --{parameter.name} {type_name(parameter.type)}"
    doc = "" if described else parameter.doc
    text = ". ".join(part.rstrip(".") for part in (_default(parameter), doc) if part)
    wrapped = textwrap.wrap(text, width - _COLUMN) or [""]
    first = [option] if len(option) >= _COLUMN else [f"{option:<{_COLUMN}}{wrapped.pop(0)}"]
    return [*first, *(" " * _COLUMN + line for line in wrapped)]


def _default(parameter: Parameter) -> str:
    if parameter.default is MISSING:
        return "required"
    if parameter.section and isinstance(parameter.default, parameter.section):
        return f"default {_changed(parameter.default, parameter.fields)}"
    return f"default {parameter.default!r}"


def _changed(value: Any, fields: Mapping[str, Parameter]) -> str:
    """The fields of a dataclass that are not its class's defaults."""
    plain = {field.name: field.default for field in dataclasses.fields(value)}
    set_fields = [f"{name}={field.default!r}" for name, field in fields.items() if field.default != plain.get(name)]
    return f"{type(value).__name__}({', '.join(set_fields)})"

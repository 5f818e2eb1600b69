"""The parameters of a graph function, and of the dataclasses in them, as a tree of typed settings.

A value is *plain* (what JSON carries) until `build` makes the objects, so that a launcher can hand the same overrides
to every worker. Nothing is coerced: `check_plain` takes a value only if it has its declared type already, except that
an integer is fine where a float is asked for; `parse` reads text by the declared type.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from flowrl.errors import ConfigError
from flowrl.trace import GraphFunction

MISSING: Any = inspect.Parameter.empty
"""As a default: there is none. As a type: there is no annotation."""
_SCALARS = (bool, int, float, str)


class Mismatch(Exception):
    """A value is not of its declared type; the message is what was wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One setting, or a section of them."""

    path: tuple[str, ...]
    """Names from the graph function's parameter down to the field."""
    type: Any
    default: Any
    doc: str = ""
    section: type[Any] | None = None
    """The dataclass whose fields are its settings."""
    fields: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """With dots: ``train.dp``."""
        return ".".join(self.path)

    def leaves(self) -> list[Parameter]:
        """Every setting below, or itself."""
        return [leaf for field in self.fields.values() for leaf in field.leaves()] if self.fields else [self]


def parameters_of(function: GraphFunction[Any]) -> Parameter:
    """The root of the tree: a section whose fields are the graph function's parameters.

    Raises:
        ConfigError: an annotation names nothing, or a parameter takes ``*args`` or ``**kwargs``.
    """
    try:
        parameters = function.parameters
    except (NameError, AttributeError, SyntaxError) as error:
        fix = "import the name at the top of the graph file, outside of 'if TYPE_CHECKING'"
        problem = f"a parameter of graph '{function.name}' has an annotation that cannot be read"
        raise ConfigError(problem, at=function.at, found=str(error), wanted="a type", fix=fix) from None
    docs = _argument_docs(inspect.getdoc(function.function) or "")
    fields = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problem = f"graph '{function.name}' takes '{parameter}', whose names are not known"
            raise ConfigError(problem, at=function.at, found=str(parameter), wanted="named parameters")
        fields[name] = _parameter((name,), parameter.annotation, parameter.default, docs.get(name, ""))
    return Parameter(path=(), type=MISSING, default=MISSING, section=None, fields=fields)


def section_of(annotation: Any) -> type[Any] | None:
    """The dataclass of ``T`` or ``T | None``, or None."""
    options = [option for option in _options(annotation) if option is not type(None)]
    if len(options) == 1 and isinstance(options[0], type) and dataclasses.is_dataclass(options[0]):
        return options[0]
    return None


def _parameter(path: tuple[str, ...], annotation: Any, default: Any, doc: str) -> Parameter:
    if annotation is MISSING and (type(default) in _SCALARS or dataclasses.is_dataclass(default)):
        annotation = type(default)
    section = section_of(annotation)
    fields = _fields(section, path, default) if section else {}
    return Parameter(path=path, type=annotation, default=default, doc=doc, section=section, fields=fields)


def _fields(section: type[Any], path: tuple[str, ...], default: Any) -> dict[str, Parameter]:
    hints = typing.get_type_hints(section)
    docs = _field_docs(section)
    result = {}
    for field in dataclasses.fields(section):
        if field.init:
            own = getattr(default, field.name) if isinstance(default, section) else _field_default(field)
            result[field.name] = _parameter((*path, field.name), hints[field.name], own, docs.get(field.name, ""))
    return result


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and _field_default(field) is MISSING


def _field_default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else MISSING


def check_plain(value: Any, annotation: Any) -> Any:
    """`value`, if it is of the type already.

    Raises:
        Mismatch: it is not.
    """
    if annotation is Any or annotation is object:
        return value
    if get_origin(annotation) is Literal:
        if any(type(value) is type(allowed) and value == allowed for allowed in get_args(annotation)):
            return value
    elif _is_union(annotation):
        return _first(annotation, lambda option: check_plain(value, option))
    elif sequence := _sequence(annotation):
        if isinstance(value, list | tuple):
            return [check_plain(item, kind) for item, kind in zip(value, sequence(len(value)), strict=True)]
    elif annotation is None or annotation is type(None):
        if value is None:
            return None
    elif annotation is float and type(value) in (int, float):
        if not math.isnan(value):
            return value
    elif annotation is Path:
        if isinstance(value, str):
            return value
    elif annotation in _SCALARS and type(value) is annotation:
        return value
    raise Mismatch(type_name(annotation))


def parse(words: Sequence[str], annotation: Any) -> Any:
    """The plain value that the words after an option say, read by the declared type.

    Raises:
        Mismatch: they say no such value.
    """
    if _is_union(annotation):
        # Text fits every str: what is more special goes first.
        return _first(annotation, lambda option: parse(words, option))
    if sequence := _sequence(annotation):
        return [parse([word], kind) for word, kind in zip(words, sequence(len(words)), strict=True)]
    if len(words) != 1:
        raise Mismatch(type_name(annotation))
    return _parse_word(words[0], annotation)


def _parse_word(word: str, annotation: Any) -> Any:
    if annotation in (str, Any, object, Path):
        return word
    if annotation in (None, type(None)) and word.lower() in ("none", "null"):
        return None
    if annotation is bool and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if annotation is int and re.fullmatch(r"[-+]?[0-9][0-9_]*", word):
        return int(word)
    if annotation is float:
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            return number
    if get_origin(annotation) is Literal:
        for allowed in get_args(annotation):
            if word == str(allowed):
                return allowed
    raise Mismatch(type_name(annotation))


def build(value: Any, annotation: Any, default: Any) -> Any:
    """The object of a plain value: a map changes fields of `default`, or makes a new dataclass where there is none.

    Raises:
        TypeError, ValueError, FlowrlError: what the dataclass itself raises.
    """
    section = section_of(annotation)
    if section and isinstance(value, Mapping):
        base = default if isinstance(default, section) else None
        hints = typing.get_type_hints(section)
        built = {
            name: build(item, hints[name], getattr(base, name, None) if base else None) for name, item in value.items()
        }
        if base:
            return dataclasses.replace(base, **built)
        missing = [
            field.name for field in dataclasses.fields(section) if _is_required(field) and field.name not in built
        ]
        if missing:
            raise ValueError(f"a new {section.__name__} needs a value for '{missing[0]}'")
        return section(**built)
    if _is_union(annotation):
        options = [option for option in _options(annotation) if _fits(value, option)]
        return build(value, options[0], default) if options else value
    if annotation is Path:
        return Path(value)
    if annotation is float:
        return float(value)
    if sequence := _sequence(annotation):
        items = [build(item, kind, None) for item, kind in zip(value, sequence(len(value)), strict=True)]
        return tuple(items) if get_origin(annotation) is tuple or annotation is tuple else items
    return value


def type_name(annotation: Any) -> str:
    """A type in words: ``int``, ``'cpu' | 'cuda'``, ``float | None``."""
    if annotation is MISSING:
        return "no type"
    if annotation in (None, type(None)):
        return "None"
    if get_origin(annotation) is Literal:
        return " | ".join(repr(value) for value in get_args(annotation))
    if _is_union(annotation):
        return " | ".join(type_name(option) for option in get_args(annotation))
    if get_origin(annotation) is not None:
        inner = ", ".join("..." if kind is ... else type_name(kind) for kind in get_args(annotation))
        return f"{get_origin(annotation).__name__}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def settable(annotation: Any) -> bool:
    """Whether text or YAML can say a value of the type."""
    if annotation in (*_SCALARS, Any, object, Path, None, type(None)) or get_origin(annotation) is Literal:
        return True
    if _is_union(annotation):
        return any(settable(option) for option in _options(annotation) if option is not type(None))
    return _sequence(annotation) is not None and all(settable(kind) for kind in get_args(annotation) if kind is not ...)


def takes_many(annotation: Any) -> bool:
    """Whether an option takes all words up to the next option."""
    return any(_sequence(option) is not None for option in _options(annotation))


def accepts_none(annotation: Any) -> bool:
    """Whether None is a value of the type."""
    return type(None) in _options(annotation)


def is_flag(annotation: Any) -> bool:
    """Whether ``--name`` alone means true."""
    return any(option is bool for option in _options(annotation))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if _is_union(annotation) else (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    try:
        check_plain(value, annotation)
    except Mismatch:
        return section_of(annotation) is not None and isinstance(value, Mapping)
    return True


def _first(annotation: Any, attempt: Any) -> Any:
    """The first option of a union that takes the value; text last."""
    for option in sorted(_options(annotation), key=lambda option: option in (str, Path, Any, object)):
        try:
            return attempt(option)
        except Mismatch:
            continue
    raise Mismatch(type_name(annotation))


def _sequence(annotation: Any) -> Any:
    """For a list or tuple type: a function from a length to the type of each item; else None."""
    origin, kinds = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (list, Sequence):
        return lambda length: (kinds[0] if kinds else str,) * length
    if origin is not tuple:
        return None
    if not kinds or kinds[-1] is ...:
        return lambda length: (kinds[0] if kinds else str,) * length

    def fixed(length: int) -> tuple[Any, ...]:
        if length != len(kinds):
            raise Mismatch(f"{len(kinds)} values: {type_name(annotation)}")
        return kinds

    return fixed


def _argument_docs(doc: str) -> dict[str, str]:
    """The lines ``name: text`` under ``Args:``."""
    found: dict[str, str] = {}
    inside = False
    for line in doc.splitlines():
        if line.strip() in ("Args:", "Arguments:", "Parameters:"):
            inside = True
        elif inside and line and not line.startswith(" "):
            inside = False
        elif inside and (match := re.match(r" {2,4}(\w+)(?: *\(.*?\))?: *(.*)", line)):
            found[match[1]] = match[2]
        elif inside and found and line.strip():
            last = next(reversed(found))
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _field_docs(section: type[Any]) -> dict[str, str]:
    """The string under each field, or the ``name: text`` of the class's own docstring."""
    docs = _argument_docs(re.sub(r"^Args.*:$", "Args:", inspect.getdoc(section) or "", flags=re.M))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    except (OSError, TypeError, SyntaxError):
        return docs
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value.value if isinstance(text.value, ast.Constant) else None
            if isinstance(value, str):
                docs[field.target.id] = " ".join(value.split())
    return docs

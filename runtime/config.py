"""A graph's parameters from its defaults, a settings file and the command line, in this order of rank.

The graph function's parameters are the only configuration. A key that is none of them is an error that names the
nearest one and its section; a value of another type is an error, never a conversion. What is resolved holds only what
was overridden, as plain data: `apply` makes the keyword arguments of the graph function out of it, in any process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, Location, nearest
from flowrl.trace import GraphFunction

from .parameters import (
    MISSING,
    Mismatch,
    Parameter,
    accepts_none,
    build,
    check_plain,
    is_flag,
    parameters_of,
    parse,
    settable,
    takes_many,
    type_name,
)
from .settings_file import SettingsFile, read_settings


def resolve(function: GraphFunction[Any], arguments: Sequence[str] = (), config: Path | None = None) -> dict[str, Any]:
    """What a settings file and the command line override.

    Args:
        function: whose parameters are the configuration.
        arguments: ``--name value``, ``--name=value``, ``--section.name value``, ``--flag``, ``--no-flag``; a list takes
            all words up to the next option; ``-`` and ``_`` are the same in a name.
        config: a YAML file; sections are maps.

    Returns:
        Plain data: a section is a dict of its overridden fields.

    Raises:
        ConfigError: an unknown key, a value of another type, a key given twice, an unreadable file.
    """
    root = parameters_of(function)
    overrides: dict[str, Any] = {}
    places: dict[str, Location | None] = {}
    if config is not None:
        settings = read_settings(config)
        overrides = _checked(function, root, root, settings.values, settings)
        places = {path[0]: at for path, at in settings.lines.items() if len(path) == 1}
    for parameter, value in _options(function, root, arguments):
        _put(overrides, parameter.path, value)
        places[parameter.path[0]] = None
    _build(function, root, overrides, places)
    return overrides


def apply(function: GraphFunction[Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that `overrides` stand for; parameters that are not overridden are left out.

    Raises:
        ConfigError: a dataclass refuses its fields.
    """
    return _build(function, parameters_of(function), overrides, {})


def _build(
    function: GraphFunction[Any], root: Parameter, overrides: Mapping[str, Any], places: Mapping[str, Location | None]
) -> dict[str, Any]:
    result = {}
    for name, value in overrides.items():
        parameter = root.fields[name]
        try:
            result[name] = build(value, parameter.type, parameter.default)
        except (FlowrlError, TypeError, ValueError) as error:
            problem = error.problem if isinstance(error, FlowrlError) else str(error)
            found = (error.found if isinstance(error, FlowrlError) else None) or value
            raise ConfigError(
                f"parameter '{name}' of graph '{function.name}': {problem}",
                at=places.get(name) or function.at,
                found=found,
                wanted=(error.wanted if isinstance(error, FlowrlError) else None) or type_name(parameter.type),
                fix=(error.fix if isinstance(error, FlowrlError) else None) or f"change a field of '{name}'",
            ) from error
    return result


def _put(overrides: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = overrides.get(name)
        if not isinstance(inner, dict):
            inner = overrides[name] = {}
        overrides = inner
    overrides[path[-1]] = value


def _checked(
    function: GraphFunction[Any], root: Parameter, section: Parameter, values: Mapping[str, Any], file: SettingsFile
) -> dict[str, Any]:
    """The maps of a settings file, every key known and every value of its type."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        path = (*section.path, key)
        parameter = section.fields.get(key)
        if parameter is None:
            raise _unknown(function, root, path, at=file.lines.get(path), shown=".".join(path))
        if parameter.section and isinstance(value, Mapping):
            result[key] = _checked(function, root, parameter, value, file)
            continue
        try:
            result[key] = check_plain(value, _writable(function, parameter, none=value is None))
        except Mismatch as mismatch:
            raise _wrong(function, parameter, repr(value), str(mismatch), file.lines.get(path)) from None
    return result


def _options(
    function: GraphFunction[Any], root: Parameter, arguments: Sequence[str]
) -> Iterator[tuple[Parameter, Any]]:
    """Each option of the command line with its plain value."""
    seen: dict[tuple[str, ...], str] = {}
    position = 0
    while position < len(arguments):
        option, equals, attached = arguments[position].partition("=")
        if not option.startswith("--") or option == "--":
            raise ConfigError(
                f"argument {arguments[position]!r} belongs to no parameter",
                found=arguments[position],
                wanted="--name value",
                fix=f"--{next(iter(root.fields), 'name')} {arguments[position]}",
            )
        parameter, negated = _find(function, root, option)
        position += 1
        words = [attached] if equals else list(_words(parameter, arguments[position:]))
        position += 0 if equals else len(words)
        if parameter.path in seen:
            given = f"{seen[parameter.path]} and {option}"
            fix = "remove one of the two"
            raise ConfigError(f"option '{option}' is given twice", found=given, wanted="once", fix=fix)
        seen[parameter.path] = option
        yield parameter, _value(function, parameter, option, words, negated)


def _words(parameter: Parameter, rest: Sequence[str]) -> Iterator[str]:
    """The words that belong to an option: one, or all up to the next option for a list."""
    for word in rest:
        if word.startswith("--"):
            return
        yield word
        if not takes_many(parameter.type):
            return


def _value(function: GraphFunction[Any], parameter: Parameter, option: str, words: Sequence[str], negated: bool) -> Any:
    annotation = _writable(function, parameter, none=[word.lower() for word in words] in (["none"], ["null"]))
    if negated and not words:
        return False
    if is_flag(annotation) and not words:
        return True
    if negated:
        raise ConfigError(f"option '{option}' takes no value", found=words[0], wanted=option)
    if not words and not takes_many(annotation):
        wanted = type_name(annotation)
        raise ConfigError(f"option '{option}' needs a value", found="nothing", wanted=wanted, fix=f"{option} VALUE")
    try:
        return parse(words, annotation)
    except Mismatch as mismatch:
        raise _wrong(function, parameter, " ".join(map(repr, words)), str(mismatch), None) from None


def _find(function: GraphFunction[Any], root: Parameter, option: str) -> tuple[Parameter, bool]:
    """The parameter of an option, and whether the option negates it (``--no-flag``)."""
    path = tuple(option.removeprefix("--").replace("-", "_").split("."))
    if found := _lookup(root, path):
        return found, False
    for negated in ((path[0].removeprefix("no_"), *path[1:]), (*path[:-1], path[-1].removeprefix("no_"))):
        found = _lookup(root, negated)
        if found and negated != path and is_flag(found.type):
            return found, True
    raise _unknown(function, root, path, at=None, shown=option)


def _lookup(root: Parameter, path: Sequence[str]) -> Parameter | None:
    found: Parameter | None = root
    for name in path:
        found = found.fields.get(name) if found else None
    return found


def _writable(function: GraphFunction[Any], parameter: Parameter, *, none: bool = False) -> Any:
    """The type that a value is read by; `none` says that the value is None, which an optional section takes.

    Raises:
        ConfigError: the parameter has a type that neither text nor YAML can say, or is a section.
    """
    if parameter.section:
        if accepts_none(parameter.type) and none:
            return None
        raise ConfigError(
            f"parameter '{parameter.name}' of graph '{function.name}' is a section, not a value",
            at=function.at,
            found=parameter.name,
            wanted=", ".join(f"{parameter.name}.{field}" for field in parameter.fields),
            fix=f"--{parameter.name}.{next(iter(parameter.fields))} VALUE",
        )
    if not settable(parameter.type):
        raise ConfigError(
            f"parameter '{parameter.name}' of graph '{function.name}' cannot be set from outside",
            at=function.at,
            found=type_name(parameter.type),
            wanted="int, float, bool, str, Path, Literal, a list or tuple of these, or a dataclass",
            fix="annotate it with such a type" if parameter.type is MISSING else None,
        )
    return parameter.type


def _wrong(
    function: GraphFunction[Any], parameter: Parameter, found: str, wanted: str, at: Location | None
) -> ConfigError:
    fix = None
    if wanted == "int" and found.strip("'").replace(".", "", 1).isdigit():
        fix = f"write {int(float(found.strip(chr(39))))}"
    elif wanted in ("int", "float", "bool") and at and _reads_as(found[1:-1], parameter.type):
        fix = f"write {found[1:-1]} without quotes"
    return ConfigError(
        f"parameter '{parameter.name}' of graph '{function.name}' has the wrong type",
        at=at,
        found=found,
        wanted=wanted,
        fix=fix or f"give it as {wanted}",
    )


def _reads_as(text: str, annotation: Any) -> bool:
    try:
        parse([text], annotation)
    except Mismatch:
        return False
    return True


def _unknown(
    function: GraphFunction[Any], root: Parameter, path: Sequence[str], *, at: Location | None, shown: str
) -> ConfigError:
    """A key that is no parameter: where it belongs, or which one is near."""
    depth = next(i for i in range(len(path)) if _lookup(root, path[: i + 1]) is None)
    section = _lookup(root, path[:depth]) or root
    dashes = "--" if shown.startswith("--") else ""
    place = f"section '{section.name}' of graph '{function.name}'" if section.path else f"graph '{function.name}'"
    return ConfigError(
        f"{place} has no parameter '{path[depth]}'",
        at=at,
        found=shown,
        wanted=", ".join(section.fields) or f"a value: '{section.name}' has no fields",
        fix=_way_out(root, section, path[depth:], dashes),
    )


def _way_out(root: Parameter, section: Parameter, rest: Sequence[str], dashes: str) -> str:
    leaves = {leaf.name: leaf for leaf in root.leaves()}
    elsewhere = [leaf for leaf in leaves.values() if leaf.path[-1] == rest[-1]]
    if elsewhere:
        homes = [f"under '{'.'.join(leaf.path[:-1])}'" if leaf.path[1:] else "at the top level" for leaf in elsewhere]
        names = " or ".join(f"{dashes}{leaf.name}" for leaf in elsewhere)
        return f"'{rest[-1]}' belongs {' or '.join(homes)}: {names}"
    if near := _near(rest[0], section.fields):
        prefix = f"{section.name}." if section.path and dashes else ""
        return f"did you mean '{dashes}{prefix}{near}'?"
    by_field = {leaf.path[-1]: name for name, leaf in leaves.items()}
    if (near := _near(rest[-1], by_field)) is not None:
        return f"did you mean '{dashes}{by_field[near]}'?"
    return "--help lists every parameter" if dashes else "'flowrl run GRAPH.py --help' lists every parameter"


def _near(name: str, candidates: Mapping[str, Any]) -> str | None:
    """The candidate that a key was meant to be: near in letters, its initials, or its beginning."""
    if match := nearest(name, candidates):
        return match
    initials = "".join(part[:1] for part in name.split("_"))
    for candidate in candidates:
        if len(candidate) > 1 and (candidate == initials or name.startswith(candidate) or candidate.startswith(name)):
            return candidate
    return None

"""A YAML file of graph parameters, as plain data with the line of every key.

Scalars follow YAML 1.2: ``1e-6`` is a float, ``on`` and ``no`` are text, ``010`` is ten. (YAML 1.1, which PyYAML reads
by default, makes of these a text, two booleans and eight.) A key that stands twice in one map is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import ConfigError, Location
from flowrl.location import location

Path_ = tuple[str, ...]
"""Where a value stands: the keys of the maps around it, and its own."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a settings file says."""

    values: dict[str, Any]
    """By top-level key; maps are dicts."""
    lines: dict[Path_, Location]
    """The line of every key, by its path."""


def read_settings(path: Path) -> SettingsFile:
    """Read a YAML file whose top level is a map.

    Raises:
        ConfigError: there is no such file, it is no YAML, its top level is no map, or a key is given twice or no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"settings file {path} cannot be read", found=reason, wanted="a YAML file") from None
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        reader = _Reader(loader, str(path))
        values = {} if root is None else reader.read(root, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        at = location(str(path), line)
        raise ConfigError(f"not YAML: {error.problem}", at=at, found=error.context, wanted="key: value") from None
    finally:
        loader.dispose()
    if values is None:
        values = {}
    if not isinstance(values, dict):
        at = location(str(path), 1)
        raise ConfigError("a settings file is a map", at=at, found=type(values).__name__, wanted="key: value")
    return SettingsFile(values, reader.lines)


class _Loader(yaml.SafeLoader):
    """The scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own shape)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


class _Reader:
    def __init__(self, loader: _Loader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.lines: dict[Path_, Location] = {}

    def read(self, node: yaml.Node, path: Path_) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._map(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, str(i))) for i, item in enumerate(node.value)]
        return self.loader.construct_object(node, deep=True)

    def _map(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = location(self.file, key_node.start_mark.line + 1)
            key = self.read(key_node, path)
            if not isinstance(key, str):
                raise ConfigError("a key is no name", at=at, found=repr(key), wanted="text", fix=f"'{key}': ...")
            place = (*path, key)
            if place in self.lines:
                raise ConfigError(
                    f"key '{'.'.join(place)}' is given twice",
                    at=at,
                    found=f"lines {self.lines[place].line} and {at.line}",
                    wanted="each key once",
                    fix="remove one of the two",
                )
            self.lines[place] = at
            values[key] = self.read(value_node, place)
        return values

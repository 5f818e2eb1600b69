"""Load a graph from a user's file: ``path/to/graph.py`` or ``path/to/graph.py:name``.

The file is imported under one fixed module name, in every process: a worker that loads the same specification finds
the same functions under the same names, so nothing of the user's code has to travel.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, GraphError, did_you_mean, nearest
from flowrl.graph import Graph
from flowrl.location import locate, location
from flowrl.trace import GraphFunction

MODULE = "__flowrl_graph__"
"""What the user's file is called in `sys.modules`, whatever its own name is."""

_WANTED = "a .py file with an @fl.graph function"

Loaded = GraphFunction[Any] | Graph


def load_graph(spec: str) -> Loaded:
    """Import a graph file and take the graph out of it.

    The file's folder becomes importable, as with ``python file.py``. A graph that the file defines goes before one that
    it only imports.

    Args:
        spec: a .py file, with ``:name`` when it defines several graphs.

    Raises:
        ConfigError: there is no such file; it cannot be imported (with the line and traceback of the user's mistake);
            it has no graph, several without ``:name``, or none of that name.
    """
    path, name = split_spec(spec)
    return _choose(graphs_in(_import(path)), name, path)


def split_spec(spec: str) -> tuple[Path, str | None]:
    """The absolute path and the graph's name of ``file.py:name``.

    Raises:
        ConfigError: there is no such file, or it is no .py file.
    """
    head, colon, tail = spec.rpartition(":")
    named = bool(colon) and not os.path.exists(spec)
    path = Path(head if named else spec).expanduser()
    if not path.is_file():
        raise _missing(path)
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no graph file", found=path.suffix or "no suffix", wanted=_WANTED)
    return path.resolve(), (tail or None) if named else None


def graphs_in(module: ModuleType) -> dict[str, Loaded]:
    """The graphs of a module by name: those that it defines, or if there are none those that it imports."""
    every = _every_graph(module)
    own = {name: value for name, value in every.items() if _defined_in(value, module)}
    return _each_once(own or every)


def _every_graph(module: ModuleType) -> dict[str, Loaded]:
    return {name: value for name, value in vars(module).items() if isinstance(value, GraphFunction | Graph)}


def _defined_in(value: Loaded, module: ModuleType) -> bool:
    return isinstance(value, Graph) or value.function.__module__ == module.__name__


def _each_once(graphs: Mapping[str, Loaded]) -> dict[str, Loaded]:
    """Without the second names of one object (``main = grpo``)."""
    seen: dict[int, str] = {}
    for name, value in graphs.items():
        seen.setdefault(id(value), name)
    return {name: graphs[name] for name in seen.values()}


def _choose(graphs: Mapping[str, Loaded], name: str | None, path: Path) -> Loaded:
    shown = shown_path(path)
    names = ", ".join(graphs) or "no graph"
    if not graphs:
        fix = "put @fl.graph above the function that declares the nodes"
        raise ConfigError(f"{shown} has no graph", found=names, wanted="a function under @fl.graph", fix=fix)
    if name is not None:
        aliases = _every_graph(sys.modules[MODULE])
        if name not in aliases:
            fix = did_you_mean(name, graphs) or f"{shown}:{next(iter(graphs))}"
            raise ConfigError(f"{shown} has no graph '{name}'", found=name, wanted=names, fix=fix)
        return aliases[name]
    if len(graphs) > 1:
        fix = " or ".join(f"{shown}:{known}" for known in graphs)
        raise ConfigError(f"{shown} has {len(graphs)} graphs", found=names, wanted="the name of one", fix=fix)
    return next(iter(graphs.values()))


def _missing(path: Path) -> ConfigError:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.glob("*.py") if not entry.name.startswith("_"))
        return ConfigError(f"{path} is a folder", found=", ".join(inside) or "no .py file in it", wanted=_WANTED)
    if not path.parent.is_dir():
        return ConfigError(f"no file {path}: there is no folder {path.parent}", found=str(path), wanted=_WANTED)
    near = nearest(path.name, (entry.name for entry in path.parent.glob("*.py")))
    fix = f"did you mean {str(path.parent / near)!r}?" if near else None
    return ConfigError(f"no file {path}", found=str(path), wanted=_WANTED, fix=fix)


def _import(path: Path) -> ModuleType:
    """Run the file as module `MODULE`; an earlier one of that name is replaced."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert isinstance(spec, ModuleSpec)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(MODULE)
        if before is not None:
            sys.modules[MODULE] = before
        raise _import_error(error, path) from error.__cause__
    return module


def _import_error(error: BaseException, path: Path) -> BaseException:
    """What the user sees of an exception in their file: its own line and traceback, none of ours."""
    if isinstance(error, FlowrlError):
        locate(error)
        return error
    if isinstance(error, SyntaxError):
        at = location(error.filename or str(path), error.lineno or 1)
        found = (error.text or "").strip() or None
        problem = f"{type(error).__name__}: {error.msg}"
        return ConfigError(problem, at=at, found=found, wanted="a line of Python", fix="correct this line")
    if not isinstance(error, Exception | SystemExit):
        return error
    own = _own_frames(error.__traceback__, path)
    shown = "".join(traceback.format_exception(type(error), error, own)).rstrip()
    line = own.tb_lineno if own else 1
    return ConfigError(
        f"importing the graph file failed: {type(error).__name__}: {error}\n{shown}",
        at=location(str(path), line),
        found=type(error).__name__,
        wanted="a file that imports without an error",
        fix=f"'python {shown_path(path)}' shows the same error",
    ).with_traceback(own)


def body_error(error: Exception, loaded: GraphFunction[Any]) -> Exception:
    """What the user sees of an exception in the body of a graph function: its own line and traceback, none of ours."""
    path = Path(inspect.unwrap(loaded.function).__code__.co_filename)
    own = _own_frames(error.__traceback__, path)
    if own is None or isinstance(error, FlowrlError):
        return error
    shown = "".join(traceback.format_exception(type(error), error, own)).rstrip()
    return GraphError(
        f"declaring graph '{loaded.name}' failed: {type(error).__name__}: {error}\n{shown}",
        at=location(str(path), own.tb_lineno),
        found=type(error).__name__,
        wanted="a graph function that runs without an error: it only declares nodes",
        fix=_body_fix(error),
    ).with_traceback(own)


def _body_fix(error: Exception) -> str | None:
    if isinstance(error, AttributeError) and error.name:
        return did_you_mean(error.name, dir(error.obj))
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return "a function of your own is a node under @fl.reward, @fl.advantage or @fl.node(out=...)"
    return None


def shown_path(path: Path) -> str:
    """A path as the user would type it: relative when it lies below the working directory."""
    return location(str(path), 1).file


def _own_frames(frames: TracebackType | None, path: Path) -> TracebackType | None:
    """The traceback from the first frame of the user's file on."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(path):
        frames = frames.tb_next
    return frames

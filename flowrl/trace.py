"""Tracing: running a graph function once, with handles for values, to learn its nodes."""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, ParamSpec

from .errors import FlowrlError, GraphError, Location, NameConflict, UnknownName, did_you_mean
from .graph import Graph, Node, PromptsSpec
from .location import caller, locate, location
from .mesh import Mesh
from .model import Model

P = ParamSpec("P")

RESERVED = frozenset({"record", "sync", "host", "scheduler", "all"})
"""Names that the runtime gives to its own parts."""

_tracer: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("flowrl_tracer", default=None)


class Tracer:
    """Collects the nodes of one graph function while it runs."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.models: dict[str, Model] = {}

    def add(self, make: Callable[[str], Node], *, name: str | None, default: str) -> Node:
        """Add the node that `make` builds under its final name.

        A name that was asked for must be free; a default one gets the suffix ``_2``, ``_3``, ... in order of
        declaration.
        """
        node = make(self._free_name(name, default))
        if node.model is not None:
            self._know(node.model, node.at)
        self.nodes[node.name] = node
        return node

    def read_by(self, prompts: str, model: Model) -> None:
        """Let a prompts node use the tokenizer of the first model that reads it."""
        node = self.nodes[prompts]
        if isinstance(node.spec, PromptsSpec) and node.spec.model is None:
            self.nodes[prompts] = replace(node, spec=replace(node.spec, model=model))

    def _free_name(self, name: str | None, default: str) -> str:
        at = caller()
        if name is None:
            taken = {*self.nodes, *RESERVED}
            numbered = (default if i == 1 else f"{default}_{i}" for i in range(1, len(taken) + 2))
            return next(candidate for candidate in numbered if candidate not in taken)
        if not isinstance(name, str) or not name.isidentifier():
            fix = f"name='{re.sub('[^0-9a-zA-Z_]', '_', str(name))}'"
            problem = "a node's name is no identifier"
            raise GraphError(problem, at=at, node=default, found=repr(name), wanted="letters, digits and _", fix=fix)
        if name in RESERVED:
            raise NameConflict(
                f"node name '{name}' is reserved for the runtime",
                at=at,
                node=name,
                found=f"name='{name}'",
                wanted=f"none of {', '.join(sorted(RESERVED))}",
                fix=f"name='{default if default not in RESERVED else f'{default}_node'}'",
            )
        if name in self.nodes:
            first = self.nodes[name].at
            raise NameConflict(
                f"two nodes are named '{name}'",
                at=at,
                node=name,
                found=f"{first} and {at}",
                wanted="one node under each name",
                fix=f"give the second its own: name='{name}_2'",
            )
        return name

    def _know(self, model: Model, at: Location) -> None:
        known = self.models.setdefault(model.name, model)
        if known is not model:
            raise NameConflict(
                f"two models are named '{model.name}'",
                at=model.at or at,
                found=f"{known.source} and {model.source}",
                wanted="one model under each name",
                fix="give one its own: fl.Model(..., name='critic')",
            )


def tracer() -> Tracer:
    """The tracer of the graph function that is running.

    Raises:
        GraphError: none is: a node was declared outside a graph function.
    """
    active = _tracer.get()
    if active is None:
        raise GraphError(
            "a node is declared outside a graph function",
            at=caller(),
            found="no graph function is running",
            wanted="a call inside a function under @fl.graph",
            fix="put the call into the graph function",
        )
    return active


class GraphFunction(Generic[P]):
    """A function under `graph`: its parameters are the configuration, its body declares the nodes."""

    def __init__(self, function: Callable[P, None]) -> None:
        self.function = function
        functools.update_wrapper(self, function)
        code = inspect.unwrap(function).__code__
        self.at = location(code.co_filename, code.co_firstlineno)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """By name, with annotations resolved to types."""
        return inspect.signature(self.function, eval_str=True).parameters

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Graph:
        """Trace the graph with the given parameters, the others at their defaults."""
        values = self._bind(args, kwargs)
        active = Tracer()
        token = _tracer.set(active)
        try:
            self.function(**_name_meshes(values))  # type: ignore[call-arg]
        except FlowrlError as error:
            locate(error)
            raise
        finally:
            _tracer.reset(token)
        if not active.nodes:
            fix = "call fl.prompts(...) in its body"
            problem = f"graph '{self.name}' declares no node"
            raise GraphError(problem, at=self.at, found="no node", wanted="one node or more", fix=fix)
        return Graph.build(
            self.name, active.nodes.values(), values, doc=inspect.getdoc(self.function) or "", at=self.at
        )

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.signature(self.function)
        for name in kwargs:
            if name not in signature.parameters:
                raise UnknownName(
                    f"graph '{self.name}' has no parameter '{name}'",
                    at=self.at,
                    found=name,
                    wanted=", ".join(signature.parameters),
                    fix=did_you_mean(name, signature.parameters),
                )
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        missing = [name for name in signature.parameters if name not in bound.arguments]
        if missing:
            problem = f"graph '{self.name}' needs a value for '{missing[0]}'"
            fix = f"--{missing[0]} VALUE"
            raise GraphError(problem, at=self.at, found="no default", wanted=f"a value for '{missing[0]}'", fix=fix)
        return dict(bound.arguments)


def graph(function: Callable[P, None]) -> GraphFunction[P]:
    """Declare a graph. The function's parameters are its configuration; calling it traces it and returns a `Graph`."""
    return GraphFunction(function)


def _name_meshes(values: dict[str, Any]) -> dict[str, Any]:
    """Name each mesh after the first parameter that holds it; a mesh held by two parameters stays one mesh."""
    named: dict[int, Mesh] = {}
    for name, value in values.items():
        if isinstance(value, Mesh):
            named.setdefault(id(value), value if value.name else replace(value, name=name))
    return {name: named[id(value)] if isinstance(value, Mesh) else value for name, value in values.items()}

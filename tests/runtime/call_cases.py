"""Graphs of one function node, called with columns and no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import flowrl as fl
from flowrl.graph import Binding, FilterSpec, FunctionSpec, Node
from flowrl.rows import Key
from flowrl.runtime.calls import Called, call_filter, call_function

KEYS = [Key(0, 0, 0), Key(0, 0, 1), Key(0, 0, 2)]


def declare(function: Any, *, extra: tuple[Any, ...] = (), **settings: Any) -> Node:
    """The node that a decorated function becomes in a small graph."""

    @fl.graph
    def small() -> None:
        policy = fl.Model("tiny", backend="tiny", optimizer=fl.AdamW(lr=1e-3))
        prompts = fl.prompts([{"prompt": "a", "answer": "b", "level": 1}] * 2, batch=1)
        samples = fl.rollout(policy, prompts, n=3, max_new_tokens=4)
        streams = [other(samples) for other in extra]
        function(samples, *streams, name="judge", **settings)

    return small()["judge"]


def call(function: Any, keys: list[Key] = KEYS, *, extra: tuple[Any, ...] = (), **columns: Any) -> Called:
    """Call a decorated function for rows."""
    node = declare(function, extra=extra)
    assert isinstance(node.spec, FunctionSpec)
    return call_function(node, node.spec, keys, columns)


def keep(function: Callable[..., Any], per: str, keys: list[Key] = KEYS, **columns: Any) -> Called:
    """Ask a filter."""
    node = declare(lambda samples, name: fl.filter(samples, keep=function, per=per, name=name))  # type: ignore[arg-type]
    assert isinstance(node.spec, FilterSpec)
    return call_filter(node, node.spec, keys, columns)


def scored(called: Called, column: str = "scores") -> dict[Key, Any]:
    """A column of what came of a call, by key."""
    if called.rows is None:
        return {}
    values = called.rows[column]
    return dict(zip(called.rows.keys, values.tolist() if hasattr(values, "tolist") else values, strict=True))


def bare(node: Node, bindings: Mapping[str, str]) -> Node:
    """A node that binds other columns, by parameter."""
    return replace(node, bindings=tuple(Binding(name, "rollout", column) for name, column in bindings.items()))

"""Binding: which column of which node fills a parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from .errors import AmbiguousColumn, Location, UnknownColumn, UnknownName, did_you_mean
from .graph import Binding
from .rows import GROUP
from .stream import ANY, Stream

MADE_BY: Mapping[str, str] = {
    "old_logprobs": "pass fl.logprobs(policy, samples), of the model that is trained",
    "ref_logprobs": "pass fl.logprobs(policy.frozen(), samples)",
    "logit_energy": "pass fl.logit_energy(policy, samples)",
    "importance_weights": "pass what flowrl.correction.truncated_is(samples, fl.logprobs(policy, samples)) gives",
}
"""What to do for a column that a built-in node writes and nobody asked for."""


def bind(
    parameters: Sequence[inspect.Parameter],
    streams: Sequence[Stream],
    named: Mapping[str, Stream],
    *,
    node: str,
    at: Location,
    aliases: Mapping[str, str] | None = None,
) -> tuple[Binding, ...]:
    """Fill each parameter by the column of its name among the columns that `streams` show.

    A ``*name`` takes the column of every stream that shows one, in order: parameters ``name[0]``, ``name[1]``, ...

    Args:
        parameters: the positional parameters of a node function; one with a default may stay unfilled.
        streams: the handles that the node was called with.
        named: handles given by keyword: the parameter gets the one column that the handle's own node writes.
        node: the node's name, for errors.
        at: the line of the call.
        aliases: a second name to look for when a parameter's own is not there.

    Raises:
        UnknownColumn, AmbiguousColumn: a parameter has no column, or several.
        UnknownName: a handle is given to what is no such parameter.
    """
    _check_named(parameters, named, node, at)
    bindings = []
    for parameter in parameters:
        name = parameter.name
        if name == GROUP:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            bindings += _every(name, streams, node, at)
            continue
        if name in named:
            bindings.append(Binding(name, *_only_column(named[name], name, node, at)))
            continue
        alias = (aliases or {}).get(name)
        found = _find(name, streams, node, at) or (_find(alias, streams, node, at) if alias else None)
        if found:
            bindings.append(Binding(name, *found))
        elif parameter.default is parameter.empty:
            raise _unknown(name, streams, node, at, aliases or {})
    return tuple(bindings)


def parameter(name: str, *, optional: bool = False) -> inspect.Parameter:
    """A parameter of that name, for a node that has no function; an optional one may stay unfilled."""
    default = None if optional else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function that are columns, a ``*name`` among them."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]


def slots(parameter: inspect.Parameter, bound: Container[str]) -> list[str]:
    """The names under which a parameter's columns are bound: its own, or those of a ``*name`` as far as they go."""
    if parameter.kind is not parameter.VAR_POSITIONAL:
        return [parameter.name] if parameter.name in bound else []
    return list(takewhile(bound.__contains__, (_numbered(parameter.name, number) for number in count())))


def settings(function: Callable[..., Any], given: Mapping[str, Any], *, node: str, at: Location) -> dict[str, Any]:
    """The keyword-only parameters of a function that were given.

    Raises:
        UnknownName: one is not a setting of this function, or one without a default was not given.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in given:
        if name not in known:
            raise UnknownName(
                f"node '{node}' has no setting '{name}'",
                at=at,
                node=node,
                found=name,
                wanted=", ".join([*known, "name", "mesh"]),
                fix=did_you_mean(name, known) or "a setting is a keyword-only parameter of the node function",
            )
    missing = [name for name, p in known.items() if p.default is p.empty and name not in given]
    if missing:
        raise UnknownName(
            f"node '{node}' needs a value for its setting '{missing[0]}'",
            at=at,
            node=node,
            found="no value, and no default",
            wanted=f"{missing[0]}=VALUE",
            fix=f"give {missing[0]}= in the call, or a default in the function",
        )
    return dict(given)


def _find(name: str, streams: Sequence[Stream], node: str, at: Location) -> tuple[str, str] | None:
    sources = {stream.columns[name] for stream in streams if name in stream.columns}
    if len(sources) > 1:
        raise AmbiguousColumn(
            f"node '{node}' reads column '{name}', which several of its streams have",
            at=at,
            node=node,
            found=" and ".join(f"'{source}'" for source in sorted(sources)),
            wanted="one",
            fix=f"say which: {name}=HANDLE, or name the parameters apart and give each its handle by keyword",
        )
    if not sources:  # a data set whose columns are not known yet may have it
        sources = {stream.columns[ANY] for stream in streams if ANY in stream.columns}
    return (next(iter(sources)), name) if sources else None


def _every(name: str, streams: Sequence[Stream], node: str, at: Location) -> list[Binding]:
    """The column of every stream that shows it."""
    sources = [stream.columns[name] for stream in streams if name in stream.columns]
    if not sources:
        found = _find(name, streams, node, at)
        if found is None:
            raise _unknown(name, streams, node, at, {})
        sources = [found[0]]
    return [Binding(_numbered(name, number), source, name) for number, source in enumerate(sources)]


def _numbered(name: str, number: int) -> str:
    return f"{name}[{number}]"


def _check_named(parameters: Sequence[inspect.Parameter], named: Mapping[str, Stream], node: str, at: Location) -> None:
    known = {p.name: p for p in parameters if p.name != GROUP}
    for name in named:
        if name not in known:
            raise UnknownName(
                f"node '{node}' has no input '{name}'",
                at=at,
                node=node,
                found=f"{name}= with the output of node '{named[name].node}'",
                wanted=", ".join(known) or "no input by name",
                fix=did_you_mean(name, known) or "name a positional parameter of the node function",
            )
        if known[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise UnknownName(
                f"node '{node}' takes *{name} by position",
                at=at,
                node=node,
                found=f"{name}= with the output of node '{named[name].node}'",
                wanted=f"each handle that has '{name}', in order",
                fix=f"leave '{name}=' out and pass the handle itself",
            )


def _only_column(stream: Stream, parameter: str, node: str, at: Location) -> tuple[str, str]:
    own = [name for name, source in stream.columns.items() if source == stream.node]
    if parameter in own:
        return stream.node, parameter
    if len(own) != 1:
        raise AmbiguousColumn(
            f"node '{node}' gets '{parameter}' from node '{stream.node}', which does not write one column",
            at=at,
            node=node,
            found=", ".join(own) or "no column",
            wanted=f"one column, or one named '{parameter}'",
            fix="pass the handle by position: its columns then bind by their names",
        )
    return stream.node, own[0]


def _unknown(
    name: str, streams: Sequence[Stream], node: str, at: Location, aliases: Mapping[str, str]
) -> UnknownColumn:
    columns = {column for stream in streams for column in stream.columns}
    visible = sorted(columns | {name for name, column in aliases.items() if column in columns})
    return UnknownColumn(
        f"node '{node}' reads column '{name}', which no stream that it is given has",
        at=at,
        node=node,
        found=f"columns {', '.join(visible)}" if visible else "no stream",
        wanted=f"a column '{name}'",
        fix=MADE_BY.get(name)
        or did_you_mean(name, visible)
        or f"pass the handle that has '{name}', or any as {name}=...",
    )

"""Typed handles: what calling a node gives while a graph is traced.

A handle is a promise of columns, not a value. Its type says what flows on it, so that a type checker marks a wrong
edge in the editor; its `columns` say which node writes each column that a reader of this stream can see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NoReturn, TypeVar

from .errors import TracedValueError, UnknownColumn, did_you_mean
from .location import caller

S = TypeVar("S", bound="Stream")

ANY = "*"
"""As a column name: a node whose columns are not known before its data is read may hold any other column."""


class Stream:
    """Rows that a node will emit.

    Args:
        node: the name of the node that this handle is the output of.
        columns: every column that its reader can see, with the node that writes it.
        gates: filters that a row has passed when it is on this stream.
    """

    __slots__ = ("columns", "gates", "node")

    def __init__(self, node: str, columns: Mapping[str, str], gates: tuple[str, ...] = ()) -> None:
        self.node = node
        self.columns = MappingProxyType(dict(columns))
        self.gates = gates

    def only(self: S, column: str) -> S:
        """The handle of one of the node's columns: what a keyword takes when the node writes several.

        Raises:
            UnknownColumn: the node does not write it.
        """
        own = [name for name, source in self.columns.items() if source == self.node]
        if column not in own:
            raise UnknownColumn(
                f"node '{self.node}' writes no column '{column}'",
                at=caller(),
                node=self.node,
                found=", ".join(own) or "no column",
                wanted="one of its own columns",
                fix=did_you_mean(column, own),
            )
        return type(self)(self.node, {column: self.node}, self.gates)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of node '{self.node}'>"

    def __bool__(self) -> NoReturn:
        raise self._not_a_value("a truth value", "fl.filter(samples, keep=...) drops rows by their values")

    def __iter__(self) -> Iterator[NoReturn]:
        raise self._not_a_value(
            "iterated", "write the body of the loop as a node: @fl.node(out=...) is called once a row"
        )

    def __len__(self) -> int:
        raise self._not_a_value("counted", "a node with per='group' or per='batch' sees how many rows it has")

    def __getitem__(self, index: object) -> NoReturn:
        raise self._not_a_value("indexed", "name the column as a parameter of the node function that reads it")

    def __float__(self) -> float:
        raise self._not_a_value("a number", "compute with it inside a node function")

    def _not_a_value(self, used_as: str, fix: str) -> TracedValueError:
        return TracedValueError(
            f"the output of node '{self.node}' is used as a value ({used_as}) while the graph is traced",
            at=caller(),
            node=self.node,
            found=repr(self),
            wanted="a handle is only passed to other nodes: no row exists yet",
            fix=fix,
        )


class Prompts(Stream):
    """Rows of a data source: ``prompt``, ``prompt_ids`` and every column of the data set."""

    __slots__ = ()


class Samples(Stream):
    """Sampled responses, with the columns of their prompts."""

    __slots__ = ()


class Scores(Stream):
    """``scores``: one number a response."""

    __slots__ = ()


class LogProbs(Stream):
    """``ref_logprobs`` or ``old_logprobs``: one number a response token."""

    __slots__ = ()


class TopK(Stream):
    """``teacher_ids`` and ``teacher_logprobs``, or ``student_ids`` and ``student_logprobs``: k numbers a response token
    each, the ids of some tokens and their log-probs."""

    __slots__ = ()


class Values(Stream):
    """``values``: one number a response token."""

    __slots__ = ()


class Advantages(Stream):
    """``advantages``: one number a response, or one a response token."""

    __slots__ = ()


class Metrics(Stream):
    """Numbers of a whole batch, written to ``metrics.jsonl`` under the node's name; nobody needs to read it."""

    __slots__ = ()

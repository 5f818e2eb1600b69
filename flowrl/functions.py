"""`@fl.reward`, `@fl.advantage`, `@fl.node`: a function of the user's as a node.

A decorated function keeps its signature. Called with handles inside a graph function it declares a node; called with
values it runs. Positional parameters are columns, keyword-only parameters are settings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from .adaptive import expect_numbers
from .columns import bind, positional, settings
from .errors import GraphError, Location, WrongType
from .expect import expect
from .graph import Binding, FunctionSpec, Node, Per
from .location import caller, location
from .mesh import Mesh
from .stream import Advantages, LogProbs, Metrics, Samples, Scores, Stream, Values
from .trace import tracer

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Stream)
OnError = Literal["fail", "drop"]
Check = Callable[..., None]
"""Called with the names of the parameters that are bound, and with the settings as keywords, while the graph is traced:
raises `flowrl.errors.WrongType` where they do not fit."""
Needs = Callable[[], None]
"""Raises a `flowrl.errors.FlowrlError` where this machine cannot run a function."""

COLUMN_OF: Mapping[type[Stream], str] = {
    Scores: "scores",
    Advantages: "advantages",
    Values: "values",
    LogProbs: "old_logprobs",
}
"""The column that a typed handle carries."""


class NodeFunction(Generic[P, R, S]):
    """A function that is a node. `S` is the handle that it returns inside a graph."""

    def __init__(
        self,
        function: Callable[P, R],
        handle: type[S],
        outputs: tuple[str, ...],
        per: Per,
        options: Mapping[str, Any],
        check: Check | None = None,
    ) -> None:
        refuse_async(function, "a node", "; per='batch' gets all rows of a step in one call")
        self.function = function
        self.handle = handle
        self.outputs = outputs
        self.per = per
        self.options = options
        self.check = check
        functools.update_wrapper(self, function)

    @overload
    def __call__(
        self, samples: Samples, *streams: Stream, name: str | None = None, mesh: Mesh | None = None, **settings: Any
    ) -> S: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Stream) for value in (*args, *kwargs.values())):
            expect_numbers(self.function, kwargs)
            return self.function(*args, **kwargs)
        name, mesh = kwargs.pop("name", None), kwargs.pop("mesh", None)
        at = caller()
        node = tracer().add(
            lambda final: self._node(final, args, kwargs, mesh, at),
            name=name,
            default=self.function.__name__.strip("<>"),
        )
        columns = dict.fromkeys(self.outputs, node.name)
        passed = gates_of([value for value in (*args, *kwargs.values()) if isinstance(value, Stream)])
        return self.handle(node.name, columns, passed)

    def spec(self, given: Mapping[str, Any]) -> FunctionSpec:
        """What a node of this function does, with the given settings."""
        return FunctionSpec(function=self.function, settings=given, **self.options)

    def _node(self, name: str, streams: tuple[Any, ...], given: dict[str, Any], mesh: Mesh | None, at: Any) -> Node:
        for stream in streams:
            expect(stream, Stream, node=name, parameter="input", at=at)
        if streams:
            expect(streams[0], Samples, node=name, parameter="first argument", at=at)
        if mesh is not None and not (isinstance(mesh, Mesh) and mesh.workers):
            raise WrongType(
                f"node '{name}' is a function and runs on CPU workers",
                at=at,
                node=name,
                found=str(mesh),
                wanted="Mesh.cpu(n)",
                fix="mesh=fl.Mesh.cpu(4), or leave mesh= out to run it in the host process",
            )
        named = {key: value for key, value in given.items() if isinstance(value, Stream)}
        spec = self.spec(settings(self.function, {k: v for k, v in given.items() if k not in named}, node=name, at=at))
        bindings = bind(positional(self.function), streams, named, node=name, at=at)
        self._check([binding.parameter for binding in bindings], spec.settings, name, at)
        gates = gates_of([*streams, *named.values()])
        return Node(
            name=name,
            spec=spec,
            per=self.per,
            bindings=bindings,
            gates=with_rollout(gates, bindings, streams[0]) if streams else gates,
            outputs=self.outputs,
            at=at,
            mesh=mesh,
        )

    def _check(self, parameters: list[str], given: Mapping[str, Any], node: str, at: Location) -> None:
        try:
            if self.check is not None:
                self.check(parameters, **given)
        except GraphError as error:
            error.problem, error.node, error.at = f"node '{node}': {error.problem}", node, at
            raise


def gates_of(streams: list[Any]) -> tuple[str, ...]:
    """Every filter that one of the streams has passed, each once."""
    return tuple(dict.fromkeys(gate for stream in streams for gate in stream.gates))


def with_rollout(gates: tuple[str, ...], bindings: Iterable[Binding], samples: Samples) -> tuple[str, ...]:
    """The gates; for a node that reads only columns of the prompts, the rollout whose samples it is called with.

    Such a column is the same for all rollouts that answer the prompts: it does not say which samples are meant.
    """
    prompts = samples.columns["prompt_ids"]
    told = gates or any(binding.source != prompts for binding in bindings)
    return gates if told else (samples.columns["response_ids"],)


@overload
def reward(function: Callable[P, R], /) -> NodeFunction[P, R, Scores]: ...
@overload
def reward(
    *,
    per: Per = "row",
    timeout: float | None = 60.0,
    on_error: OnError = "fail",
    retries: int = 0,
    max_failure_rate: float = 0.5,
    check: Check | None = None,
    needs: Needs | None = None,
) -> Callable[[Callable[P, R]], NodeFunction[P, R, Scores]]: ...
def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    per: Per = "row",
    timeout: float | None = 60.0,
    on_error: OnError = "fail",
    retries: int = 0,
    max_failure_rate: float = 0.5,
    check: Check | None = None,
    needs: Needs | None = None,
) -> Any:
    """Declare a function that scores responses.

    Args:
        function: takes columns by name and returns a float; with ``per="group"`` or ``per="batch"`` it takes lists and
            tensors and returns one number a row.
        per: what one call sees.
        timeout: seconds that one call may take; None for no limit.
        on_error: ``"fail"`` ends the run when a call raises, times out or gives no number; ``"drop"`` drops its rows
            with the reason. A failure is never a score of 0 and never enters a baseline.
        retries: calls after the first before `on_error` applies.
        max_failure_rate: with ``"drop"``, the run fails once more than this share of a step's calls has failed.
        check: refuses settings that do not fit, before the run (see `Check`).
        needs: asked by ``flowrl check`` and before a run: raises a `FlowrlError` where this machine cannot run the
            function, for want of a package or of a right.
    """
    options = call_options("reward", timeout, on_error, retries, max_failure_rate) | {"needs": needs}
    return _decorate(function, Scores, ("scores",), per, options, check)


@overload
def advantage(function: Callable[P, R], /) -> NodeFunction[P, R, Advantages]: ...
@overload
def advantage(
    *,
    per: Per = "group",
    min_group: int = 1,
    out: tuple[str, ...] = ("advantages",),
    check: Check | None = None,
) -> Callable[[Callable[P, R]], NodeFunction[P, R, Advantages]]: ...
def advantage(
    function: Callable[..., Any] | None = None,
    /,
    *,
    per: Per = "group",
    min_group: int = 1,
    out: tuple[str, ...] = ("advantages",),
    check: Check | None = None,
) -> Any:
    """Declare an advantage estimator.

    Args:
        function: takes columns as tensors ([rows], or [rows, tokens] padded at the right) and, when it names it,
            ``group`` ([rows] int); returns [rows] or [rows, tokens].
        per: ``"group"`` calls it once a prompt, ``"batch"`` once a step. A function per group that names ``group`` is
            called once for all the groups that are complete: what it gives to a group must not depend on which others
            share the call, as a mean per group does not.
        min_group: fewest samples of a prompt that it is defined for; checked before the run. A group that drops have
            left smaller is dropped, with that reason.
        out: the columns that it returns, when there are several.
        check: refuses settings that do not fit, before the run (see `Check`).
    """
    options = call_options("advantage", None, "fail", 0, 0.0) | {"min_group": min_group}
    return _decorate(function, Advantages, out, per, options, check)


@overload
def node(
    *,
    out: type[S],
    per: Per | None = None,
    timeout: float | None = None,
    on_error: OnError = "fail",
    retries: int = 0,
    max_failure_rate: float | None = None,
    check: Check | None = None,
) -> Callable[[Callable[P, R]], NodeFunction[P, R, S]]: ...
@overload
def node(
    *,
    out: str | tuple[str, ...],
    per: Per | None = None,
    timeout: float | None = None,
    on_error: OnError = "fail",
    retries: int = 0,
    max_failure_rate: float | None = None,
    check: Check | None = None,
) -> Callable[[Callable[P, R]], NodeFunction[P, R, Stream]]: ...
def node(
    *,
    out: Any,
    per: Per | None = None,
    timeout: float | None = None,
    on_error: OnError = "fail",
    retries: int = 0,
    max_failure_rate: float | None = None,
    check: Check | None = None,
) -> Any:
    """Declare any other function over columns.

    Args:
        out: what it returns: a handle type (``fl.Scores``), the name of a new column, or several names for a function
            that returns a tuple. ``fl.Metrics`` is a number, or a dict of numbers, of a whole batch.
        per: what one call sees: a row (Python values), a group or a batch (lists and tensors); see `advantage` for
            functions per group that name ``group``. None is a row, and a batch for a metric.
        timeout: seconds that one call may take.
        on_error: ``"fail"`` or ``"drop"``, as for `reward`; a metric drops no row, but its number.
        retries: calls after the first before `on_error` applies.
        max_failure_rate: as for `reward`; a metric has none.
        check: as for `advantage`.
    """
    if out is Metrics:
        _expect_metric(per, max_failure_rate)
        return lambda f: _decorate(
            f, Metrics, (), "batch", call_options("metric", timeout, on_error, retries, 0.0), check
        )
    handle, outputs = (out, (COLUMN_OF[out],)) if isinstance(out, type) and out in COLUMN_OF else (Stream, _names(out))
    rate = 0.5 if max_failure_rate is None else max_failure_rate
    options = call_options("node", timeout, on_error, retries, rate)
    return lambda function: _decorate(function, handle, outputs, "row" if per is None else per, options, check)


def _expect_metric(per: object, max_failure_rate: object) -> None:
    """Refuse what a metric would pass over in silence."""
    if per not in (None, "batch"):
        raise WrongType(
            "a metric is a number of a whole batch", at=caller(), found=f"per={per!r}", wanted="per='batch', or no per="
        )
    if max_failure_rate is not None:
        raise WrongType(
            "a metric drops no row, and has no share of failures",
            at=caller(),
            found=f"max_failure_rate={max_failure_rate!r}",
            wanted="no max_failure_rate=: with on_error='drop' a call that fails leaves its number out, with a warning",
        )


def _names(out: Any) -> tuple[str, ...]:
    names = (out,) if isinstance(out, str) else out
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise WrongType(
            "a node's out= names no column", at=caller(), found=repr(out), wanted="fl.Scores, 'column' or ('a', 'b')"
        )
    return names


def call_options(
    role: str,
    timeout: float | None,
    on_error: str,
    retries: int,
    rate: float,
    policies: Sequence[str] = ("fail", "drop"),
) -> dict[str, Any]:
    """The fields of a `FunctionSpec` that a decorator sets.

    Raises:
        WrongType: `on_error` is none of the policies, or a number is no time, no count or no share.
    """
    if on_error not in policies:
        wanted, fix = " or ".join(map(repr, policies)), f"on_error={policies[0]!r}"
        raise WrongType("on_error has an unknown policy", at=caller(), found=repr(on_error), wanted=wanted, fix=fix)
    if timeout is not None and not timeout > 0:
        raise WrongType("a timeout is no time", at=caller(), found=timeout, wanted="seconds > 0, or None")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise WrongType(
            "retries is no count", at=caller(), found=repr(retries), wanted="an integer >= 0", fix="retries=2"
        )
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise WrongType(
            "max_failure_rate is no share",
            at=caller(),
            found=repr(rate),
            wanted="0 <= rate <= 1",
            fix="max_failure_rate=0.5",
        )
    return {"role": role, "timeout_s": timeout, "on_error": on_error, "retries": retries, "max_failure_rate": rate}


def _decorate(
    function: Callable[..., Any] | None,
    handle: type[Stream],
    outputs: tuple[str, ...],
    per: Per,
    options: dict[str, Any],
    check: Check | None = None,
) -> Any:
    if per not in ("row", "group", "batch"):
        raise WrongType("per= has an unknown value", at=caller(), found=repr(per), wanted="'row', 'group' or 'batch'")

    def wrap(f: Callable[..., Any]) -> NodeFunction[Any, Any, Any]:
        if not callable(f):
            raise GraphError("a decorator of flowrl is called on what is no function", at=caller(), found=repr(f))
        if not hasattr(f, "__name__"):  # functools.partial, callable objects
            f = named_function(f)
        return NodeFunction(f, handle, outputs, per, options, check)

    return wrap if function is None else wrap(function)


def refuse_async(function: Callable[..., Any], what: str, more: str = "") -> None:
    """Refuse a coroutine function: it is called and waited for, and would give a coroutine.

    Raises:
        WrongType: at the line of the function.
    """
    if inspect.iscoroutinefunction(function):
        code = function.__code__
        raise WrongType(
            f"'{function.__name__}' is an async function, and {what} is called and waited for",
            at=location(code.co_filename, code.co_firstlineno),
            found=f"async def {function.__name__}",
            wanted="def",
            fix=f"def, with asyncio.run(...) inside{more}",
        )


def named_function(f: Callable[..., Any]) -> Callable[..., Any]:
    """A callable without a name (a partial, an object with ``__call__``) under the name of what it wraps."""
    inner = getattr(f, "func", None)

    @functools.wraps(f, assigned=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    call.__name__ = getattr(inner, "__name__", type(f).__name__)
    return call

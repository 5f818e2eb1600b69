"""`@fl.tool`: a function that answers the model's turns within a response.

A rollout with a tool is a conversation: the model writes a turn, the tool reads it and answers, the model goes on,
until the tool has nothing to say. The tool is a plain function of the turn, with no state of its own: what a game or a
sandbox has to remember follows from ``turns``, so that a run that is resumed or repeated sees the same answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from .columns import positional, settings
from .errors import Location, WrongType
from .expect import expect_counts_or_none, expect_policy, wrong
from .functions import Needs, call_options, named_function, refuse_async
from .graph import FunctionSpec, ToolSpec
from .location import caller

P = ParamSpec("P")
R = TypeVar("R")
OnToolError = Literal["fail", "drop", "tell"]
OnLongAnswer = Literal["right", "left", "drop", "error"]

TOOL_COLUMNS = ("response", "turns")
"""Parameters of a tool that the conversation fills; the others are columns of the prompts."""
MESSAGES = "prompt_messages"
"""Column of the prompts that says whether a conversation is a chat: its first messages, or None where it is text."""


class Tool(Generic[P, R]):
    """A decorated tool: runs on a turn; called with settings alone, it is the tool with those settings."""

    def __init__(
        self, function: Callable[P, R], call: Mapping[str, Any], answer: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.call = call
        """Limits of its calls: fields of `FunctionSpec`."""
        self.answer = answer
        """What becomes of its answers: fields of `ToolSpec`."""
        self.given = given
        """Settings."""
        functools.update_wrapper(self, function)

    @overload
    def __call__(self, **settings: Any) -> Tool[P, R]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        columns = {parameter.name for parameter in positional(self.function)}
        if args or columns & kwargs.keys():
            return self.function(*args, **{**self.given, **kwargs})
        return Tool(self.function, self.call, self.answer, {**self.given, **kwargs})

    def spec(self, *, max_turns: int | None, node: str, at: Location) -> ToolSpec:
        """What a node with this tool does.

        Raises:
            UnknownName: a setting is not one of the function, or one without a default was not given.
        """
        given = settings(self.function, self.given, node=node, at=at)
        call = FunctionSpec(function=self.function, settings=given, **self.call)
        return ToolSpec(call=call, max_turns=max_turns, **self.answer)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    per: Literal["row", "batch"] = "row",
    timeout: float | None = 60.0,
    on_error: OnToolError = "fail",
    retries: int = 0,
    max_failure_rate: float = 0.5,
    role: str | None = "tool",
    max_answer_tokens: int | None = None,
    on_too_long: OnLongAnswer = "right",
    needs: Needs | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    per: Literal["row", "batch"] = "row",
    timeout: float | None = 60.0,
    on_error: OnToolError = "fail",
    retries: int = 0,
    max_failure_rate: float = 0.5,
    role: str | None = "tool",
    max_answer_tokens: int | None = None,
    on_too_long: OnLongAnswer = "right",
    needs: Needs | None = None,
) -> Any:
    """Declare a tool, for ``fl.rollout(..., tool=)`` and ``fl.evaluate(..., tool=)``.

    Args:
        function: answers a turn with text, or with None when the turn calls no tool and the response is over. It takes
            by name ``response``, the text of the model's turn (special tokens within it kept, the one that ended it
            left out); ``turns``, the messages ``{"role", "content"}`` of the response so far, this turn's last; and
            columns of the prompts. Keyword-only parameters are settings: ``tool=calculator(digits=3)``.
        per: ``"row"`` calls it for each turn as it ends. ``"batch"`` calls it once a round, for the turns of all
            responses that are open, with lists and tensors; it returns an answer or None for each. That is for tools
            that have to be waited for: one call may ask for all answers at once.
        timeout: seconds that one call may take; None for no limit.
        on_error: ``"fail"`` ends the run when a call raises, times out or gives no text; ``"drop"`` drops its row with
            the reason; ``"tell"`` answers the model with the error's text.
        retries: calls after the first before `on_error` applies.
        max_failure_rate: with ``"drop"``, the run fails once more than this share of a step's responses was dropped.
        role: in a chat, of the message that an answer is in the chat template. None appends the answer as text to
            whatever the model wrote, as is done with prompts that are text.
        max_answer_tokens: longest answer, without what a chat template puts around it; None sets no limit.
        on_too_long: a longer one is cut on its ``"right"`` (its first tokens stay) or ``"left"``, drops its row, or is
            an error. Cut answers are counted.
        needs: as for `reward`.
    """
    at = caller()
    call = call_options("tool", timeout, on_error, retries, max_failure_rate, policies=("fail", "drop", "tell"))
    call["needs"] = needs
    expect_policy("tool", at, "per", per, ("row", "batch"))
    expect_counts_or_none("tool", at, max_answer_tokens=max_answer_tokens)
    expect_policy("tool", at, "on_too_long", on_too_long, ("right", "left", "drop", "error"))
    if role is not None and not (isinstance(role, str) and role):
        raise wrong("tool", at, "role names no role", role, "'tool', 'user', ..., or None", "role='tool'")
    answer = {"per": per, "role": role, "max_answer_tokens": max_answer_tokens, "on_too_long": on_too_long}

    def wrap(f: Callable[..., Any]) -> Tool[Any, Any]:
        if not callable(f):
            raise WrongType("fl.tool decorates what is no function", at=at, found=repr(f), wanted="a function")
        refuse_async(f, "a tool", "; per='batch' gets all turns of a round in one call")
        return Tool(f if hasattr(f, "__name__") else named_function(f), call, answer, {})

    return wrap if function is None else wrap(function)

"""Calling a tool for turns, and turning what it says into ids that follow the record.

A call that raises, runs out of time or gives no text has *failed*, as for any function of a user's (see `calls`); so
has one whose answer the tokenizer or the chat template cannot append to what was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from flowrl.backend import Metrics, Sum, Tokenizer
from flowrl.columns import positional, slots
from flowrl.errors import FlowrlError, ResultError, TemplateError
from flowrl.graph import Node, ToolSpec
from flowrl.rows import Column, Key, Rows
from flowrl.tool import MESSAGES, TOOL_COLUMNS

from .calls import FAILED, call_function
from .conversation import Conversation, Message
from .timeout import function_name


class ToolCalls:
    """The tool of one firing.

    Args:
        node: the rollout or evaluation, for errors.
        tool: what is called, and what becomes of its answers.
        tokenizer: of the model.
        keys: of the prompts.
        columns: [prompts] by parameter of the tool, and their chat messages.
    """

    def __init__(
        self, node: Node, tool: ToolSpec, tokenizer: Tokenizer, keys: Sequence[Key], columns: Mapping[str, Column]
    ) -> None:
        self.node, self.tool, self.tokenizer = node, tool, tokenizer
        self.calls = self.failures = self.cut = 0
        """Calls, those that failed, and answers that were cut."""
        parameters = positional(tool.call.function)
        self._own = [parameter.name for parameter in parameters if parameter.name in TOOL_COLUMNS]
        bound = [slot for parameter in parameters for slot in slots(parameter, columns)]
        self._prompts = Rows(keys, {name: columns[name] for name in bound})
        self._messages: Sequence[Any] = columns.get(MESSAGES) or [None] * len(keys)
        self._ids = cache(self.tokenizer.encode_text)  # samples of one prompt often ask the same
        self._called = replace(node, spec=tool.call, per=tool.per, bindings=(), outputs=("answer",))

    def ask(self, conversations: Sequence[Conversation]) -> dict[Key, str | None]:
        """What the tool says to each newest turn: None to one that calls no tool.

        A conversation that a failed call drops is marked, and has no answer.
        """
        if not conversations:
            return {}
        self.calls += len(conversations)
        said: dict[str, Column] = {
            "response": [conversation.turns[-1]["content"] for conversation in conversations],
            "turns": [[dict(message) for message in conversation.turns] for conversation in conversations],
        }
        columns = self._prompts.take([conversation.row for conversation in conversations]).columns
        columns = {**columns, **{name: said[name] for name in self._own}}
        called = call_function(self._called, self.tool.call, [c.key for c in conversations], columns)
        answers = {} if called.rows is None else dict(zip(called.rows.keys, called.rows["answer"], strict=True))
        self.failures += len(called.dropped)
        if self.tool.call.on_error == "tell":
            return answers | {key: reason.split(FAILED, 1)[1] for key, reason in called.dropped.items()}
        for conversation in conversations:
            conversation.dropped = called.dropped.get(conversation.key, "")
        return answers

    def encode(self, conversation: Conversation, answer: str) -> tuple[list[int], Message] | None:
        """Ids that follow the record, with the message that they are; None for a conversation that is given up."""
        try:
            ids = self._ids(answer)
        except Exception as error:  # each tokenizer raises its own
            self._fail(conversation, self._unencodable(conversation, answer, error))
            return None
        limit = self.tool.max_answer_tokens
        if limit is not None and len(ids) > limit:
            if self.tool.on_too_long in ("drop", "error"):
                self._give_up(conversation, self._too_long(conversation, len(ids)), self.tool.on_too_long)
                return None
            self.cut += 1
            ids = ids[:limit] if self.tool.on_too_long == "right" else ids[-limit:]
            answer = self.tokenizer.decode(ids, special=True)
        message = {"role": self.tool.role or "tool", "content": answer}
        prompt = self._messages[conversation.row]
        if prompt is None:
            return ids, message
        turns = [*conversation.turns, message]
        try:
            return self.tokenizer.encode_reply(prompt, conversation.prompt_ids, turns, conversation.ids), message
        except TemplateError as error:
            error.found = f"{error.found}, of {conversation.key}"
            self._fail(conversation, error)
            return None

    def metrics(self) -> Metrics:
        """Counts."""
        found = {"tool_calls": self.calls, "tool_failures": self.failures, "tool_cut": self.cut}
        return {name: Sum(count, 1) for name, count in found.items()}

    def _fail(self, conversation: Conversation, error: FlowrlError) -> None:
        """Nothing can be told to a model whose record cannot go on: only dropping goes around the error."""
        self.failures += 1
        self._give_up(conversation, error, self.tool.call.on_error)

    def _give_up(self, conversation: Conversation, error: FlowrlError, policy: str) -> None:
        if policy != "drop":
            error.at, error.node = self.node.at, self.node.name
            raise error
        conversation.dropped = f"{function_name(self._called)}{FAILED}{error.problem}"

    def _unencodable(self, conversation: Conversation, answer: str, error: Exception) -> ResultError:
        return ResultError(
            f"an answer of tool '{function_name(self._called)}' of node '{self.node.name}' cannot be tokenized",
            found=f"{answer[:80]!r} for {conversation.key}: {type(error).__name__}: {error}",
            wanted="text that the model's tokenizer knows",
            fix="answer in the model's own characters, or drop such rows with on_error='drop'",
        )

    def _too_long(self, conversation: Conversation, length: int) -> ResultError:
        limit = self.tool.max_answer_tokens
        return ResultError(
            f"an answer of tool '{function_name(self._called)}' of node '{self.node.name}' is too long",
            found=f"{length} tokens for {conversation.key}",
            wanted=f"at most {limit} (max_answer_tokens)",
            fix="answer in fewer words, or on_too_long='right', 'left' or 'drop'",
        )

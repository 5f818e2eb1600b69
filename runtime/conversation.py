"""One sample of a rollout with a tool: the turns of a model, and between them what the tool said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrl.backend import Response, StopReason
from flowrl.rows import Key

Message = dict[str, str]
"""``{"role": ..., "content": ...}``"""


@dataclass(kw_only=True, slots=True)
class Conversation:
    """A sample, as far as it has come. What was sampled and what was said is carried as ids."""

    key: Key
    row: int
    """Of its prompt, in the columns of the firing."""
    prompt_ids: Sequence[int]
    ids: list[int] = field(default_factory=list)
    """[tokens] turns and answers."""
    logprobs: list[float] = field(default_factory=list)
    """[tokens] of the sampler; 0 for a tool's."""
    mask: list[bool] = field(default_factory=list)
    """[tokens] whether the model sampled it."""
    turns: list[Message] = field(default_factory=list)
    """Turns and answers, by turns."""
    stop: StopReason = "length"
    """Why the last turn ended; ``length`` too where turns or tokens were used up before the tool was silent."""
    version: int = 0
    dropped: str = ""
    """Why it is given up; empty for a good one."""

    @property
    def num_turns(self) -> int:
        """Turns of the model."""
        return (len(self.turns) + 1) // 2

    @property
    def response(self) -> Response:
        """All of it."""
        return Response(key=self.key, ids=self.ids, logprobs=self.logprobs, stop=self.stop, version=self.version)

    def say(self, response: Response, text: str) -> None:
        """The model has written a turn."""
        self.ids += response.ids
        self.logprobs += response.logprobs
        self.mask += [True] * len(response.ids)
        self.turns.append({"role": "assistant", "content": text})
        self.stop, self.version = response.stop, response.version

    def hear(self, ids: Sequence[int], message: Message) -> None:
        """The tool has answered."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)
        self.turns.append(message)

"""Multi-turn sampling: rounds of a model's turns and a tool's answers.

A round decodes one turn of every conversation that is open, as one batch; each leaves as soon as its tool has nothing
to say, or with the round where the tool answers all of its turns in one call. The next turn's prompt is the ids of the
prompt and of the response so far, never text that is encoded again. A turn's random numbers are a function of the run's
seed, the sample's key and the number of the turn: no conversation depends on those that share its rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.backend import Backend, Prompt, Response, Sampling
from flowrl.rows import Key
from flowrl.seeds import turn_seed

from .conversation import Conversation
from .tool_calls import ToolCalls


class Turns:
    """All conversations of one firing.

    Args:
        model: what samples.
        tool: what answers.
        sampling: of each turn; its `max_new_tokens` bounds a whole response.
        prompts: what is answered.
        seed: of the run.
    """

    def __init__(
        self, model: Backend, tool: ToolCalls, sampling: Sampling, prompts: Sequence[Prompt], seed: int
    ) -> None:
        self.model, self.tool, self.sampling = model, tool, sampling
        self.prompts, self.seed = prompts, seed
        self._row = {prompt.key: row for row, prompt in enumerate(prompts)}
        self._open: dict[Key, Conversation] = {}

    def run(self) -> Iterator[list[Conversation]]:
        """Yield, with each decoding step, the conversations that are over."""
        asked, turn = list(self.prompts), 0
        together = self.tool.tool.per == "batch"
        while asked:
            spoken: list[Conversation] = []
            for ended in self.model.generate(asked, self.sampling, turn_seed(self.seed, turn)):
                spoken += map(self._take, ended)
                if not together:
                    yield self._answer(spoken)
                    spoken = []
            yield self._answer(sorted(spoken, key=lambda conversation: conversation.key))
            asked, turn = [self._record(self._open[key]) for key in sorted(self._open)], turn + 1

    def _take(self, response: Response) -> Conversation:
        """The conversation of a response, with its turn; it is open no more, until the tool answers."""
        conversation = self._open.pop(response.key, None)
        if conversation is None:
            row = self._row[response.key.group]
            conversation = Conversation(key=response.key, row=row, prompt_ids=self.prompts[row].ids)
        ids = response.ids[:-1] if response.stop == "eos" else response.ids
        conversation.say(response, self.model.tokenizer.decode(ids, special=True))
        return conversation

    def _answer(self, spoken: Sequence[Conversation]) -> list[Conversation]:
        """Let the tool answer some turns; the conversations that are over."""
        answers = self.tool.ask([conversation for conversation in spoken if conversation.stop != "length"])
        over = []
        for conversation in spoken:
            answer = answers.get(conversation.key)
            if answer is not None and self._goes_on(conversation, answer):
                self._open[conversation.key] = conversation
            else:
                over.append(conversation)
        return over

    def _goes_on(self, conversation: Conversation, answer: str) -> bool:
        """Append an answer, unless it leaves the model no turn, or no token to say something to it."""
        if conversation.num_turns == self.tool.tool.max_turns:
            conversation.stop = "length"
            return False
        found = self.tool.encode(conversation, answer)
        if found is None:
            return False
        ids, message = found
        if len(conversation.ids) + len(ids) >= self.sampling.max_new_tokens:
            conversation.stop = "length"
            return False
        conversation.hear(ids, message)
        return True

    def _record(self, conversation: Conversation) -> Prompt:
        """What its next turn goes on from."""
        return Prompt(
            key=conversation.key,
            ids=[*conversation.prompt_ids, *conversation.ids],
            max_new_tokens=self.sampling.max_new_tokens - len(conversation.ids),
        )

"""A chat template must go on from the very tokens that were sampled.

Text to ids and back is not one to one, and templates rewrite what was said: they strip blanks, or drop earlier
thoughts. So the ids of a conversation are carried, never encoded again: of a rendering only what follows them is
encoded, and what stands before must be the text of the ids, character by character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowrl.dialogues import num_common
from flowrl.errors import TemplateError

SHOWN = 24
"""Characters of each text in an error."""


def text_behind(whole: str, prompt: str, num_prompt_ids: int, num_ids: int, text_of: Callable[[int], str]) -> str:
    """The part of a rendering that stands behind a record of prompt and response.

    Args:
        whole: the rendering of all messages.
        prompt: that of the messages that the prompt was made of.
        num_prompt_ids: ids of the prompt.
        num_ids: ids of the response.
        text_of: the text of its first ids, special tokens included.

    Raises:
        TemplateError: `whole` does not begin with the prompt and the text of the response.
    """
    if not whole.startswith(prompt):
        raise _rewritten(whole, prompt, "the prompt")
    response, rest = text_of(num_ids), whole[len(prompt) :]
    if not rest.startswith(response):
        same = num_common(rest, response)
        token = next(n for n in range(num_ids) if len(text_of(n + 1)) > same)
        raise _rewritten(rest, response, f"token {num_prompt_ids + token} of the record, in the response")
    return rest[len(response) :]


def check_prompt_ids(ids: Sequence[int], rendered: Sequence[int]) -> None:
    """The ids of a prompt are those of its messages, or, of one that was cut on its left, the last of them.

    Raises:
        TemplateError: they are not.
    """
    if list(ids) != list(rendered[len(rendered) - len(ids) :]):
        raise TemplateError(
            "the ids of a prompt are not those of its messages",
            found=f"{len(ids)} ids, which are no end of the {len(rendered)} that the chat template gives",
            wanted="one tokenizer and one template for the prompts and for the model that answers",
        )


def _rewritten(rendered: str, record: str, where: str) -> TemplateError:
    at = num_common(rendered, record)
    return TemplateError(
        "the chat template renders a conversation otherwise than it was sampled",
        found=f"{rendered[at : at + SHOWN]!r} at {where}, character {at}",
        wanted=f"{record[at : at + SHOWN]!r}, the text of the ids",
        fix="a template that keeps each message as it was written, or @fl.tool(role=None): the answer is plain text",
    )

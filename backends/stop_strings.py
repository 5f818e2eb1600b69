"""Stop strings: which rows have come to the end of one with their newest token.

Text is made of all tokens of a row, since a character may take several. Most tokens can end no stop string: for those
the tokenizer is asked once a token of the vocabulary, and not once a row and step.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.backend import Tokenizer

REPLACEMENT = "\ufffd"
"""What a part of a character is decoded to."""


class StopStrings:
    """Strings that end a response once they are part of its text."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._last = {string[-1:] for string in strings}
        self._any_may_end = any(not last or last.isspace() for last in self._last)  # a blank alone may have no text
        self._near = 4 * max(map(len, strings), default=0) + 4
        self._may_end: dict[int, bool] = {}

    def may_end_with(self, id: int) -> bool:
        """Whether a token can be the last of a stop string."""
        found = self._may_end.get(id)
        if found is None:
            text = self._tokenizer.decode([id])
            found = self._any_may_end or not text or any(last in text for last in (*self._last, REPLACEMENT))
            self._may_end[id] = found
        return found

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the text of a row has one.

        The last tokens are looked at first: a character takes at most four of them, one a byte.
        """
        return self._in(ids[-self._near :]) and self._in(ids)

    def _in(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(ids)
        return any(string in text for string in self.strings)

"""The text of one row as its reader wants it: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from edge_rt.errors import RequestError
from edge_rt.tokenizer import IncrementalDetokenizer, Tokenizer


class TextStream:
    """Text of a token stream up to the first stop string, as early as it is certain.

    All pieces together are the text before the stop string, or the whole text if there is none,
    however the text is cut into tokens. First is the stop string that is complete first, as if the
    text came character by character; of those that end at the same character, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """RequestError if a stop string is empty."""
        if "" in stop:
            raise RequestError(
                "a stop string is empty; leave it out or give at least one character"
            )
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._first = frozenset(text[0] for text in stop)
        self._held = ""  # a proper prefix of a stop string, the longest that the text ends with
        self._stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has come."""
        return self._stop_string

    def push(self, token_id: int) -> str:
        """Text that this token makes certain; '' once a stop string has come.

        Not certain are an incomplete character and what may turn out to begin a stop string.
        """
        return "" if self.stopped else self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back, and U+FFFD if the stream ended within a character.

        '' if a stop string has come. No token is pushed afterwards.
        """
        if self.stopped:
            return ""
        # U+FFFD goes through `_take` because it can complete a stop string.
        text = self._take(self._detokenizer.finish()) + self._held
        self._held = ""
        return text

    def _take(self, piece: str) -> str:
        if not self._held and self._first.isdisjoint(piece):
            return piece
        text = self._held + piece
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, self._stop_string = min(found)
            self._held = ""
            return text[:start]
        first = max(0, len(text) - max(map(len, self._stop)) + 1)
        certain = next((at for at in range(first, len(text)) if self._may_begin(text[at:])), None)
        self._held = "" if certain is None else text[certain:]
        return text[:certain]

    def _may_begin(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)

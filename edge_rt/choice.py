"""What a reader gets of a request: the continuations of its prompt, as their events come in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_rt.core import FinishReason, SampledToken, TokenEvent
from edge_rt.errors import EngineError
from edge_rt.text import TextStream
from edge_rt.tokenizer import Tokenizer


@dataclass(slots=True)
class Choice:
    """One continuation; `tokens` and `text` grow until `finish` is there.

    `tokens` are those that were read: with a stop string, up to the one that completed it.
    `message` says what happened when `finish` is ERROR.
    """

    row: int
    stream: TextStream
    tokens: list[SampledToken] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    message: str = ""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    ended_ns: int | None = None

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, if they were asked for; -inf where there is no token."""
        found = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(found) / len(found) if found else -math.inf

    def take(self, event: TokenEvent) -> str:
        """Take an event of this row; the text that it makes certain."""
        piece, stopped = "", self.stream.stopped
        if event.token is not None and not stopped:
            self.last_token_ns = time.monotonic_ns()
            if self.first_token_ns is None:
                self.first_token_ns = self.last_token_ns
            self.tokens.append(event.token)
            piece = self.stream.push(event.token.id)
        if event.finish is not None:
            self.finish, self.message = event.finish, event.message
            self.ended_ns = time.monotonic_ns()
            piece += self.stream.finish()
            # Before the loop knew of the stop string: it came with the last token, or from a
            # reader in another thread.
            if self.stream.stopped and self.finish is FinishReason.LENGTH:
                self.finish = FinishReason.STOP
        self.text += piece
        return piece


class Choices:
    """The continuations of one request.

    `on_stop` is called with a row that a stop string has ended, for the loop to cancel it as STOP.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        rows: int,
        on_stop: Callable[[int], None],
    ) -> None:
        """RequestError if a stop string is empty."""
        self.rows = [Choice(row, TextStream(tokenizer, stop)) for row in range(rows)]
        self._on_stop = on_stop

    def take(self, event: TokenEvent) -> list[tuple[Choice, str]]:
        """Take one event of the loop; its row and the text that it made certain, which may be ''.

        A request that was never let in has one event only: it ends all rows.
        """
        choice = self.rows[event.row]
        stopped = choice.stream.stopped
        piece = choice.take(event)
        if choice.finish is None and choice.stream.stopped and not stopped:
            self._on_stop(event.row)
        found = [(choice, piece)]
        if event.is_last:
            end = event._replace(token=None)
            found += [(row, row.take(end)) for row in self.rows if row.finish is None]
        return found

    def check(self) -> None:
        """EngineError if the engine failed in one of them."""
        for choice in self.rows:
            if choice.finish is FinishReason.ERROR:
                raise EngineError(choice.message)

    def best(self, n: int) -> list[Choice]:
        """The `n` rows of the highest log-probability per token, best first.

        All rows in their order if there are no more of them. The tokens' log-probabilities must
        have been asked for (SamplingParams.logprobs 0 is enough).
        """
        if n >= len(self.rows):
            return self.rows
        return sorted(self.rows, key=lambda choice: -choice.mean_logprob)[:n]

"""What a reader makes of a request's events, whatever their order."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edge_rt.choice import Choices
from edge_rt.core import FinishReason, SampledToken, TokenEvent
from edge_rt.errors import EngineError, RequestError
from edge_rt.tokenizer import Tokenizer

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


class Reader:
    """Choices, and what they called."""

    def __init__(self, tokenizer: Tokenizer, rows: int = 1, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stopped: list[int] = []
        self.shown = [""] * rows
        self.choices = Choices(tokenizer, stop, rows, self.stopped.append)

    def take(self, event: TokenEvent) -> None:
        for choice, piece in self.choices.take(event):
            self.shown[choice.row] += piece

    def read(
        self,
        text: str,
        row: int = 0,
        finish: FinishReason | None = LENGTH,
        logprobs: tuple[float, ...] = (),
    ) -> None:
        """All tokens of a text for a row; `finish` comes with the last."""
        ids = self.tokenizer.encode(text)
        found = [*logprobs, *[None] * len(ids)]
        for place, (token, logprob) in enumerate(zip(ids, found, strict=False)):
            end = finish if place == len(ids) - 1 else None
            self.take(TokenEvent("r", SampledToken(token, logprob), end, row))


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(demo_checkpoint)


def test_rows_are_read_apart(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, rows=2)
    reader.read("import os", row=1, finish=None)
    reader.read("def main", row=0)
    reader.read(" and more", row=1)
    first, second = reader.choices.rows
    assert (first.text, second.text) == ("def main", "import os and more")
    assert reader.shown == ["def main", "import os and more"]
    assert [choice.finish for choice in (first, second)] == [LENGTH, LENGTH]
    assert len(first.tokens) == len(tokenizer.encode("def main"))
    assert 0 < (first.first_token_ns or 0) <= (first.ended_ns or 0)


def test_a_stop_string_asks_once_for_the_rows_end(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, rows=2, stop=("os",))
    reader.read("import os and more of it", row=1, finish=None)
    assert reader.stopped == [1]
    read = len(reader.choices.rows[1].tokens)
    reader.take(TokenEvent("r", None, STOP, 1))
    assert (reader.choices.rows[1].text, reader.choices.rows[1].finish) == ("import ", STOP)
    assert read < len(tokenizer.encode("import os and more of it"))
    assert reader.choices.rows[0].finish is None


def test_a_stop_string_in_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, stop=("os",))
    reader.read("import os")
    (choice,) = reader.choices.rows
    assert (choice.text, choice.finish, reader.stopped) == ("import ", STOP, [])


def test_a_stop_string_that_the_loop_heard_of_too_late_is_a_stop(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, stop=("os",))
    reader.read("import os and then some")
    (choice,) = reader.choices.rows
    assert (choice.text, choice.finish, reader.stopped) == ("import ", STOP, [0])


def test_an_error_is_not_hidden_by_a_stop_string(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, stop=("os",))
    ids = tokenizer.encode("import os")
    for token in ids[:-1]:
        reader.take(TokenEvent("r", SampledToken(token)))
    last = TokenEvent("r", SampledToken(ids[-1]), FinishReason.ERROR, message="it broke")
    reader.take(last)
    with pytest.raises(EngineError, match="it broke"):
        reader.choices.check()


def test_a_request_that_was_not_let_in_ends_all_rows(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, rows=3)
    event = TokenEvent("r", None, FinishReason.ERROR, is_last=True, message="the id is taken")
    reader.take(event)
    assert [choice.finish for choice in reader.choices.rows] == [FinishReason.ERROR] * 3
    with pytest.raises(EngineError, match="the id is taken"):
        reader.choices.check()


def test_best_are_those_of_the_highest_log_probability_per_token(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, rows=4)
    reader.read("import os", row=0, logprobs=(-2.0, -2.0, -2.0, -2.0))
    reader.read("import os and so on", row=1, logprobs=(-1.0,) * 20)  # less in all, more per token
    reader.take(TokenEvent("r", None, STOP, 2))  # a stop token at once: nothing to rate
    reader.read("import", row=3, logprobs=(-1.5,) * 9)
    assert reader.choices.rows[2].mean_logprob == -math.inf
    assert [choice.row for choice in reader.choices.best(1)] == [1]
    assert [choice.row for choice in reader.choices.best(3)] == [1, 3, 0]
    assert [choice.row for choice in reader.choices.best(4)] == [0, 1, 2, 3]
    reader.choices.check()


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="a stop string is empty"):
        Choices(tokenizer, ("",), 1, lambda _row: None)

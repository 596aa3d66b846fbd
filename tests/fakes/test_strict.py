"""The strict runner, on which tests of scheduler and loop rely, sees what breaks the protocol."""

from __future__ import annotations

import pytest
from fakes.strict import StrictRunner

from edge_rt.core import DecodeRow, Draw, Limits, PageCopy, PrefillChunk, SamplingParams
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner

LIMITS = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=16,
    prefill_chunk=4,
    pages=8,
    page_tokens=8,
    max_context=32,
    vocab_size=11,
)
PROMPT = (3, 1, 4)


def strict() -> StrictRunner:
    return StrictRunner(NullRunner(LIMITS, NullOptions()))


def draw(*output: int) -> Draw:
    return Draw(SamplingParams(), 0, PROMPT, output)


def chunk(name: str, page: int, *, start: int = 0, last: bool = True) -> PrefillChunk:
    return PrefillChunk(name, (page,), start, PROMPT, (draw(),) if last else ())


def row(name: str, page: int, *, token: int = 5, position: int = 3) -> DecodeRow:
    return DecodeRow(name, (page,), position, token, draw(5))


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([chunk("a", 8)], id="page out of range"),
        pytest.param([chunk("a", 0), chunk("b", 0)._replace(pages=(0, 1))], id="page of two rows"),
        pytest.param([chunk("a", 0)._replace(pages=(0, 0))], id="page twice in a table"),
        pytest.param([chunk("a", 0, start=8)], id="past its pages"),
        pytest.param([chunk("a", 0, start=1)], id="cut elsewhere than at a chunk"),
        pytest.param([chunk("a", 0, last=False), chunk("a", 0, start=4)], id="gap"),
        pytest.param([chunk("a", 0)._replace(tokens=())], id="empty"),
        pytest.param([chunk("a", 0)._replace(tokens=(1,) * 5)], id="longer than a chunk"),
        pytest.param([chunk("a", 0, last=False)._replace(tokens=(11,))], id="no such token"),
        pytest.param([chunk("a", 0)._replace(tokens=(3, 1, 5))], id="not the prompt"),
        pytest.param([chunk(str(page), page) for page in range(5)], id="too many rows"),
    ],
)
def test_a_prefill_that_breaks_the_protocol(chunks: list[PrefillChunk]) -> None:
    with pytest.raises(AssertionError):
        strict().prefill(chunks)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row("a", -1)], id="page out of range"),
        pytest.param([row("a", 0), row("b", 0)], id="one table for two rows"),
        pytest.param([row("a", 0), row("b", 0)._replace(pages=(0, 1))], id="page of two rows"),
        pytest.param([row("a", 0), row("a", 1)], id="row twice"),
        pytest.param([row("a", 0, position=8)], id="past its pages"),
        pytest.param([row("a", 0, token=6)], id="not its own token"),
        pytest.param([row("a", 0, position=2)], id="not behind its prompt"),
        pytest.param([row("a", 5)], id="a page that it has not filled"),
    ],
)
def test_a_decode_that_breaks_the_protocol(rows: list[DecodeRow]) -> None:
    runner = strict()
    runner.prefill([chunk("a", 0), chunk("b", 1)])
    with pytest.raises(AssertionError):
        runner.decode(rows)


def test_what_keeps_the_protocol_passes() -> None:
    runner = strict()
    runner.prefill([chunk("a", 0), chunk("b", 1)])
    runner.copy([PageCopy("a", 0, 2, 3)])
    assert len(runner.decode([row("a", 0), row("b", 1), row("c", 2)]).tokens) == 3


@pytest.mark.parametrize(
    "copy", [PageCopy("a", 0, 0, 3), PageCopy("a", 0, 8, 3), PageCopy("a", 0, 1, 9)]
)
def test_a_copy_that_breaks_the_protocol(copy: PageCopy) -> None:
    runner = strict()
    runner.prefill([chunk("a", 0)])
    with pytest.raises(AssertionError):
        runner.copy([copy])


def test_a_copy_that_was_forgotten_is_seen() -> None:
    runner = strict()
    runner.prefill([chunk("a", 0)])
    with pytest.raises(AssertionError, match="the cache holds"):
        runner.decode([row("a", 2)])

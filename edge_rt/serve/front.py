"""Between the server's asyncio thread and the loop's thread.

The loop's thread turns tokens into text, finds stop strings, and gathers what a step brought, which
goes over all at once. Nothing here waits for a client.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from edge_rt.choice import Choice, Choices
from edge_rt.core import FinishReason, Limits, Load, Request, StepStats, TokenEvent
from edge_rt.loop import Loop
from edge_rt.serve.handover import Handover
from edge_rt.telemetry.metrics import Metrics
from edge_rt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """What an event made certain: text of one row, `tokens` of its choice so far, its end."""

    choice: Choice
    text: str
    tokens: int
    finish: FinishReason | None


class Mailbox:
    """What the requests of one call have been told and nobody has read; in the asyncio thread."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Ticket, Piece]] = []
        self._arrived = asyncio.Event()

    def put(self, ticket: Ticket, piece: Piece) -> None:
        """Wake the reader."""
        self._pieces.append((ticket, piece))
        self._arrived.set()

    async def take(self) -> list[tuple[Ticket, Piece]]:
        """What has come since the last call; waits for the first."""
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pieces = self._pieces, []
        return taken


class Ticket:
    """A request that is being served, the `place`-th of its call."""

    def __init__(self, request: Request, place: int, mailbox: Mailbox) -> None:
        self.request, self.place, self.mailbox = request, place, mailbox
        self.submitted_ns = time.monotonic_ns()
        self.open_rows = request.rows
        self.choices: Choices  # set before the loop has the request


class Front:
    """Submits and cancels requests of an asyncio program; runs the loop in a thread of its own."""

    def __init__(self, loop: Loop, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.failure: BaseException | None = None
        self.alive = 0  # requests that have not ended
        self.loop, self.tokenizer, self._metrics = loop, tokenizer, metrics
        self._aio = asyncio.get_running_loop()
        self._gathered: list[tuple[Ticket, Piece]] = []
        self._ended = asyncio.Event()
        self._handover = Handover(self._deliver)
        loop.after_step = self._after_step
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    @property
    def engine(self) -> tuple[Limits, Load]:
        """What the engine can take, and what it has; those wait too that the loop has not seen."""
        load = self.loop.load
        return self.loop.limits, load._replace(queued=max(0, self.alive - load.running))

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def submit(self, request: Request, stop: Sequence[str], place: int, mailbox: Mailbox) -> Ticket:
        """Hand a request in; RequestError if it can never be served, EngineError once closed."""
        ticket = Ticket(request, place, mailbox)
        on_stop = partial(self.loop.cancel, request.id, finish=FinishReason.STOP)
        ticket.choices = Choices(self.tokenizer, stop, request.rows, on_stop)
        self.loop.submit(request, partial(self._on_event, ticket))
        self.alive += 1
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next step, if it has not ended."""
        self.loop.cancel(ticket.request.id)

    async def stop(self) -> None:
        """Cancel what is alive, close the engine and wait for the thread."""
        self.loop.stop()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # the process can only say so, and end
            logger.exception("the engine's thread has ended")
            self.failure = error
        try:
            self.loop.close()
        except Exception:  # after a failure the books may be wrong too
            logger.exception("the engine did not close")
        finally:
            self._aio.call_soon_threadsafe(self._ended.set)

    async def ended(self) -> None:
        """Wait until the loop's thread has ended."""
        await self._ended.wait()

    def _on_event(self, ticket: Ticket, event: TokenEvent) -> None:
        choices = ticket.choices
        for choice, text in choices.take(event):
            self._gathered.append((ticket, Piece(choice, text, len(choice.tokens), choice.finish)))
        if event.is_last:
            submitted_ns, admitted_ns = ticket.submitted_ns, event.admitted_ns
            self._metrics.on_end(ticket.request, choices.rows, submitted_ns, admitted_ns)

    def _after_step(self, stats: StepStats | None) -> None:
        if stats is not None:
            self._metrics.on_step(stats)
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._handover.put(gathered)

    def _deliver(self, gathered: list[tuple[Ticket, Piece]]) -> None:
        for ticket, piece in gathered:
            ticket.mailbox.put(ticket, piece)
            if piece.finish is not None:
                ticket.open_rows -= 1
                self.alive -= ticket.open_rows == 0

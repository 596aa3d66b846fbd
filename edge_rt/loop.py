"""Inbox -> scheduler -> engine -> events: the only file that knows both scheduler and engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from edge_rt.core import Batch, FinishReason, Request, StepResult, StepStats, TokenEvent
from edge_rt.errors import EngineError, RequestError
from edge_rt.runtime.base import Runner
from edge_rt.sched.scheduler import Scheduler

OnEvent = Callable[[TokenEvent], None]

logger = logging.getLogger(__name__)


class Loop:
    """Serves requests over one engine, which it owns, step by step.

    `submit` and `cancel` may be called from any thread; everything else, and every `on_event`,
    runs in the one thread that calls `step`. An accepted request gets exactly one event with
    `finish`, its last.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler | None = None) -> None:
        self._runner = runner
        self._scheduler = scheduler or Scheduler(runner.limits)
        self._sinks: dict[str, OnEvent] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()  # nothing enters after `close` has drained the inbox
        self._closed = False

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Hand a request in; RequestError if it can never be served, EngineError once closed.

        Only the loop's thread can see that an id is taken: that is an ERROR event to `on_event`.
        """
        self._scheduler.validate(request)
        with self._inbox_lock:
            if self._closed:
                raise EngineError("the engine is shut down and takes no more requests")
            self._inbox.put(partial(self._add, request, on_event))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; an id that is not alive is ignored."""
        self._inbox.put(partial(self._cancel, request_id))

    def step(self) -> StepStats | None:
        """Do one step; None if there was nothing to do. A step that failed counts no tokens."""
        self._drain_inbox()
        started_ns = time.monotonic_ns()
        batch = self._scheduler.schedule(started_ns)
        if not batch.tokens:
            self._scheduler.check_integrity()
            return None
        try:
            result, stats = _run(self._runner, batch, started_ns)
        except EngineError as error:
            logger.error("the engine failed in a step of %d tokens: %s", batch.tokens, error)
            stats = StepStats(started_ns, 0, 0, 0, 0)
            events = self._scheduler.fail(str(error), time.monotonic_ns())
        except Exception as error:  # whatever an engine raises, the requests outside it live on
            logger.exception("the engine failed in a step of %d tokens", batch.tokens)
            stats = StepStats(started_ns, 0, 0, 0, 0)
            events = self._scheduler.fail(f"{type(error).__name__}: {error}", time.monotonic_ns())
        except BaseException:  # an interrupt: the step is lost, its requests still end
            self._deliver(self._scheduler.fail("interrupted", time.monotonic_ns()))
            raise
        else:
            events = self._scheduler.finish(result, time.monotonic_ns())
        self._deliver(events)
        return stats

    def run_until_idle(self) -> None:
        """Step until every request has ended."""
        while self.step() is not None:
            pass

    def close(self) -> None:
        """Cancel every request and close the engine; a second call does nothing.

        Not from an `on_event`: the step that called it is still at work.
        """
        with self._inbox_lock:
            if self._closed:
                return
            self._closed = True
        self._drain_inbox()
        self._deliver(self._scheduler.cancel_all())
        self._runner.close()
        self._scheduler.check_integrity()

    def _drain_inbox(self) -> None:
        # As many as there are now: an `on_event` may hand in a new request while this runs.
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()

    def _add(self, request: Request, on_event: OnEvent) -> None:
        try:
            self._scheduler.add(request)
        except RequestError as error:
            _call(on_event, TokenEvent(request.id, None, FinishReason.ERROR, str(error)))
        else:
            self._sinks[request.id] = on_event

    def _cancel(self, request_id: str) -> None:
        if event := self._scheduler.cancel(request_id):
            self._deliver([event])

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            _call(self._sinks[event.request_id], event)
            if event.finish is not None:
                del self._sinks[event.request_id]


def _run(runner: Runner, batch: Batch, started_ns: int) -> tuple[StepResult, StepStats]:
    begun_ns = time.monotonic_ns()
    prefill = runner.prefill(batch.prefill).tokens if batch.prefill else ()
    prefilled_ns = time.monotonic_ns()
    decode = runner.decode(batch.decode).tokens if batch.decode else ()
    decoded_ns = time.monotonic_ns()
    stats = StepStats(
        started_ns=started_ns,
        prefill_tokens=batch.tokens - len(batch.decode),
        decode_rows=len(batch.decode),
        prefill_ns=prefilled_ns - begun_ns,
        decode_ns=decoded_ns - prefilled_ns,
    )
    return _step_result(batch, prefill, decode, runner.limits.vocab_size), stats


def _step_result(
    batch: Batch,
    prefill: tuple[int | None, ...],
    decode: tuple[int | None, ...],
    vocab_size: int,
) -> StepResult:
    """What the engine sampled, once it is seen to answer the batch; else EngineError."""
    decoded = tuple(token for token in decode if token is not None)
    if [token is not None for token in prefill] != [
        chunk.sampling is not None for chunk in batch.prefill
    ]:
        raise EngineError("the engine did not sample exactly the prompts' last chunks")
    if not len(decoded) == len(decode) == len(batch.decode):
        raise EngineError(f"the engine sampled {len(decoded)} tokens of {len(batch.decode)} rows")
    for token in (*prefill, *decode):
        if token is not None and not 0 <= token < vocab_size:
            raise EngineError(f"the engine sampled token {token} of a vocabulary of {vocab_size}")
    return StepResult(prefill, decoded)


def _call(on_event: OnEvent, event: TokenEvent) -> None:
    try:
        on_event(event)
    except Exception:  # one request's reader must not hurt the others
        logger.exception("the reader of request '%s' failed on an event", event.request_id)

"""Inbox -> scheduler -> engine -> events: the only file that knows both scheduler and engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from edge_rt.core import (
    Batch,
    FinishReason,
    Limits,
    Load,
    PowerBudget,
    Request,
    SampledToken,
    StepResult,
    StepStats,
    TokenEvent,
)
from edge_rt.errors import EngineError, RequestError
from edge_rt.runtime.base import Runner
from edge_rt.sched.scheduler import Scheduler

OnEvent = Callable[[TokenEvent], None]
AfterStep = Callable[[StepStats | None], None]

logger = logging.getLogger(__name__)


class Loop:
    """Serves requests over one engine, which it owns, step by step.

    `submit`, `cancel` and `stop` may be called from any thread; everything else, and every
    `on_event`, runs in the one thread that calls `step` or `run`. An accepted request gets exactly
    one event with `is_last`, its last. `after_step` is called when the events of a step, or those
    that came without one (None), have been delivered: whoever passes them on can do so at once.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler | None = None,
        after_step: AfterStep = lambda _stats: None,
    ) -> None:
        self.budget = PowerBudget()  # what the power governor allows from the next step on
        self._runner = runner
        self._scheduler = scheduler or Scheduler(runner.limits)
        self.after_step = after_step
        self._sinks: dict[str, OnEvent] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()  # nothing enters after `close` has drained the inbox
        self._closed = False
        self._stopping = False

    @property
    def limits(self) -> Limits:
        """Of the engine."""
        return self._runner.limits

    @property
    def load(self) -> Load:
        """What the scheduler has; from any thread, if one step old."""
        scheduler = self._scheduler
        return Load(
            scheduler.queued, scheduler.running, scheduler.pages_in_use, scheduler.preemptions
        )

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Hand a request in; RequestError if it can never be served, EngineError once closed.

        Only the loop's thread can see that an id is taken: that is an ERROR event to `on_event`.
        """
        self._scheduler.validate(request)
        with self._inbox_lock:
            if self._closed:
                raise EngineError("the engine is shut down and takes no more requests")
            self._inbox.put(partial(self._add, request, on_event))

    def cancel(
        self,
        request_id: str,
        row: int | None = None,
        finish: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """End a request, or one of its rows, before the next step; what does not live is ignored.

        A reader that has seen a stop string ends the row with `finish` STOP.
        """
        self._inbox.put(partial(self._cancel, request_id, row, finish))

    def run(self) -> None:
        """Step until `stop`, and wait for requests when there are none."""
        while not self._stopping:
            if self.step() is None and not self._stopping:
                self._wait()

    def stop(self) -> None:
        """Let `run` return after the step that it is in."""
        self._inbox.put(self._stop)

    def step(self) -> StepStats | None:
        """Do one step; None if there was nothing to do."""
        self._drain_inbox()
        started_ns = time.monotonic_ns()
        self._deliver(self._scheduler.expire(started_ns))
        batch = self._scheduler.schedule(started_ns, self.budget)
        if not batch.tokens:
            if self._scheduler.is_idle:
                self._scheduler.check_integrity()
            self.after_step(None)
            return None
        try:
            result, stats = _run(self._runner, batch, started_ns)
        except EngineError as error:
            logger.error("the engine failed in a step of %d tokens: %s", batch.tokens, error)
            stats = StepStats(started_ns, 0, 0, 0, 0, 0, failed=True)
            events = self._scheduler.fail(str(error), time.monotonic_ns())
        except Exception as error:  # whatever an engine raises, the requests outside it live on
            logger.exception("the engine failed in a step of %d tokens", batch.tokens)
            stats = StepStats(started_ns, 0, 0, 0, 0, 0, failed=True)
            events = self._scheduler.fail(f"{type(error).__name__}: {error}", time.monotonic_ns())
        except BaseException:  # an interrupt: the step is lost, its requests still end
            self._deliver(self._scheduler.fail("interrupted", time.monotonic_ns()))
            raise
        else:
            events = self._scheduler.finish(result, time.monotonic_ns())
        self._deliver(events)
        self.after_step(stats)
        return stats

    def run_until_idle(self) -> None:
        """Step until every request has ended."""
        while self.step() is not None or not self._scheduler.is_idle:
            pass

    def close(self) -> None:
        """Cancel every request and close the engine; a second call does nothing.

        Not from an `on_event`: the step that called it is still at work.
        """
        with self._inbox_lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._drain_inbox()
            self._deliver(self._scheduler.cancel_all())
            self.after_step(None)
        finally:
            self._runner.close()
        self._scheduler.check_integrity()

    def _wait(self) -> None:
        """Until something is in the inbox, or a batching window closes."""
        wake_ns = self._scheduler.wake_ns
        timeout_s = None if wake_ns is None else max(0, wake_ns - time.monotonic_ns()) * 1e-9
        with suppress(queue.Empty):
            self._inbox.get(timeout=timeout_s)()

    def _stop(self) -> None:
        self._stopping = True

    def _drain_inbox(self) -> None:
        # As many as there are now: an `on_event` may hand in a new request while this runs.
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()

    def _add(self, request: Request, on_event: OnEvent) -> None:
        try:
            self._scheduler.add(request, time.monotonic_ns())
        except RequestError as error:
            event = TokenEvent(
                request.id, None, FinishReason.ERROR, is_last=True, message=str(error)
            )
            _call(on_event, event)
        else:
            self._sinks[request.id] = on_event

    def _cancel(self, request_id: str, row: int | None, finish: FinishReason) -> None:
        self._deliver(self._scheduler.cancel(request_id, row, finish))

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            _call(self._sinks[event.request_id], event)
            if event.is_last:
                del self._sinks[event.request_id]


def _run(runner: Runner, batch: Batch, started_ns: int) -> tuple[StepResult, StepStats]:
    begun_ns = time.monotonic_ns()
    if batch.copies:
        runner.copy(batch.copies)
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
        sampled_tokens=len(prefill) + len(decode),
    )
    draws = sum(len(chunk.draws) for chunk in batch.prefill)
    _check(prefill, draws, runner.limits.vocab_size)
    _check(decode, len(batch.decode), runner.limits.vocab_size)
    return StepResult(prefill, decode), stats


def _check(tokens: tuple[SampledToken, ...], expected: int, vocab_size: int) -> None:
    """EngineError unless the engine has answered what it was asked."""
    if len(tokens) != expected:
        raise EngineError(f"the engine sampled {len(tokens)} tokens where {expected} were due")
    for token in tokens:
        if not 0 <= token.id < vocab_size:
            raise EngineError(
                f"the engine sampled token {token.id} of a vocabulary of {vocab_size}"
            )


def _call(on_event: OnEvent, event: TokenEvent) -> None:
    try:
        on_event(event)
    except Exception:  # one request's reader must not hurt the others
        logger.exception("the reader of request '%s' failed on an event", event.request_id)

"""POST /v1/completions: from a body to the loop's requests, from their pieces to the answer."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from edge_rt.choice import Choice
from edge_rt.core import FinishReason, Priority, Request, SampledToken, SamplingParams
from edge_rt.errors import EngineError, RequestError
from edge_rt.serve import schema
from edge_rt.serve.errors import Refusal, error_body
from edge_rt.serve.front import Front, Mailbox, Ticket
from edge_rt.serve.schema import Completion, CompletionChoice, CompletionRequest, Logprobs, Usage
from edge_rt.serve.settings import ServerSettings
from edge_rt.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters: from here on text is tokenized in a thread
SEEDS = 2**63

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Call:
    """A body that has been understood: its requests, and how they are to be answered."""

    id: str
    body: CompletionRequest
    requests: tuple[Request, ...]
    stop: tuple[str, ...]

    @property
    def shown(self) -> int:
        """Choices of each prompt."""
        return self.body.n or 1


class Completions:
    """Makes calls, submits them, and answers."""

    def __init__(self, front: Front, tokenizer: Tokenizer, model: str, eos: int | None) -> None:
        self._front, self._tokenizer = front, tokenizer
        self.model, self._eos = model, eos
        self._context = front.engine[0].max_context
        self._most_characters = self._context * tokenizer.longest_token_bytes

    async def understand(
        self,
        body: CompletionRequest,
        settings: ServerSettings,
        priority: Literal["interactive", "batch"] | None,
    ) -> Call:
        """Requests of the loop; RequestError or Refusal for what cannot be.

        `priority` is the key's: "batch" holds whatever the body says.
        """
        check_model(body.model, self.model)
        if body.echo and body.logprobs is not None:
            raise RequestError("echo with logprobs is not served: a prompt's are not computed")
        if body.suffix:
            raise RequestError("suffix is not supported: GPT-J does not fill in")
        rows = max(body.n or 1, body.best_of or 1)
        if body.best_of is not None and body.best_of < (body.n or 1):
            raise RequestError(f"best_of {body.best_of} is less than n {body.n}")
        if body.stream and rows > (body.n or 1):
            raise RequestError("best_of cannot be streamed: it is known at the end which are best")
        prompts = await self._tokens(schema.prompts(body))
        sampling, now_ns = self._sampling(body, rows), time.monotonic_ns()
        timeout_s = min(body.timeout_s or settings.timeout_s, settings.max_timeout_s)
        name = f"cmpl-{secrets.token_hex(12)}"
        interactive = "batch" not in {body.priority, priority}
        requests = tuple(
            Request(
                f"{name}-{index}",
                tuple(prompt),
                sampling,
                rows,
                Priority.INTERACTIVE if interactive else Priority.BATCH,
                now_ns + int(timeout_s * 1e9),
            )
            for index, prompt in enumerate(prompts)
        )
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return Call(name, body, requests, stop)

    async def _tokens(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Of all prompts; RequestError at once for a text that cannot fit, however it is cut."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            if len(text) > self._most_characters:
                raise RequestError(
                    f"a prompt of {len(text)} characters is more than the {self._context} tokens "
                    f"of a request"
                )

        def encode() -> list[list[int]]:
            return [
                self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        if sum(map(len, texts)) > LONG_TEXT:
            return await asyncio.to_thread(encode)
        return encode()

    def _sampling(self, body: CompletionRequest, rows: int) -> SamplingParams:
        default = SamplingParams()
        stop_tokens = frozenset(body.stop_token_ids or ())
        if self._eos is not None and not body.ignore_eos:
            stop_tokens |= {self._eos}
        bias = _bias(body.logit_bias or {})
        logprobs = body.logprobs
        if logprobs is None and rows > (body.n or 1):
            logprobs = 0  # best_of chooses by them
        return SamplingParams(
            max_tokens=16 if body.max_tokens is None else body.max_tokens,
            stop_token_ids=stop_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            top_p=default.top_p if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=secrets.randbelow(SEEDS) if body.seed is None else body.seed % SEEDS,
            logprobs=logprobs,
        )

    def submit(self, call: Call) -> list[Ticket]:
        """Hand all requests of a call in, or none."""
        tickets: list[Ticket] = []
        mailbox = Mailbox()
        try:
            for place, request in enumerate(call.requests):
                tickets.append(self._front.submit(request, call.stop, place, mailbox))
        except (RequestError, EngineError):
            self.cancel(tickets)
            raise
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """End what is alive of them."""
        for ticket in tickets:
            if ticket.open_rows:
                self._front.cancel(ticket)

    async def whole(self, call: Call, tickets: Sequence[Ticket]) -> Completion:
        """The answer when all rows have ended; EngineError if the engine failed in one."""
        while any(ticket.open_rows for ticket in tickets):
            await tickets[0].mailbox.take()
        for ticket in tickets:
            ticket.choices.check()
        choices, echoed = [], self._echoed(call)
        for place, ticket in enumerate(tickets):
            for index, choice in enumerate(ticket.choices.best(call.shown)):
                prefix = echoed[place] if echoed else ""
                choices.append(
                    CompletionChoice(
                        index=place * call.shown + index,
                        text=prefix + choice.text,
                        logprobs=self._logprobs(call, choice, 0, len(choice.tokens), 0),
                        finish_reason=reason(choice.finish),
                    )
                )
        return self._completion(call, choices, usage(tickets))

    async def stream(self, call: Call, tickets: Sequence[Ticket]) -> AsyncIterator[bytes]:
        """Server-sent events: one for each token, and one for an end that brings none."""
        created = int(time.time())
        read = [[0] * call.shown for _ in tickets]  # tokens of each row
        offset = [[0] * call.shown for _ in tickets]  # characters
        for place, text in enumerate(self._echoed(call)):
            for row in range(call.shown):
                prompt = CompletionChoice(place * call.shown + row, text, None, None)
                yield self._event(call, created, prompt)
        frames = [
            [self._frame(call, created, place * call.shown + row) for row in range(call.shown)]
            for place in range(len(tickets))
        ]
        is_plain = call.body.logprobs is None
        mailbox, unread = tickets[0].mailbox, sum(ticket.request.rows for ticket in tickets)
        while unread:  # not ticket.open_rows: a row may have ended that is not read to its end
            events = []
            for ticket, (choice, text, tokens, finish) in await mailbox.take():
                row, place = choice.row, ticket.place
                if finish is None and is_plain:
                    before, after = frames[place][row]
                    events.append(b"".join((before, _encode(text), after)))
                    continue
                unread -= finish is not None
                if finish is FinishReason.ERROR:
                    events.append(_sse(error_body(500, choice.message, "engine_error")))
                    continue
                start, at = read[place][row], offset[place][row]
                logprobs = self._logprobs(call, choice, start, tokens, at)
                read[place][row], offset[place][row] = tokens, at + len(text)
                index = place * call.shown + row
                shown = CompletionChoice(index, text, logprobs, reason(finish))
                events.append(self._event(call, created, shown))
            yield b"".join(events)
        options = call.body.stream_options
        if options is not None and options.include_usage:
            yield _sse(_encode(self._completion(call, [], usage(tickets), created)))
        yield b"data: [DONE]\n\n"

    def _echoed(self, call: Call) -> list[str]:
        """The prompts' texts, where they are wanted; only of tokens that the engine has."""
        wanted = call.requests if call.body.echo else ()
        return [self._tokenizer.decode(request.prompt) for request in wanted]

    def _frame(self, call: Call, created: int, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of an event that brings nothing else."""
        blank = self._event(call, created, CompletionChoice(index, "", None, None))
        before, name, rest = blank.partition(b'"text":')
        return before + name, rest.removeprefix(b'""')

    def _event(self, call: Call, created: int, choice: CompletionChoice) -> bytes:
        return _sse(_encode(self._completion(call, [choice], created=created)))

    def _completion(
        self,
        call: Call,
        choices: list[CompletionChoice],
        used: Usage | UnsetType = UNSET,
        created: int | None = None,
    ) -> Completion:
        when = int(time.time()) if created is None else created
        return Completion(id=call.id, created=when, model=self.model, choices=choices, usage=used)

    def _logprobs(
        self, call: Call, choice: Choice, start: int, end: int, offset: int
    ) -> Logprobs | None:
        if call.body.logprobs is None:
            return None
        tokens = choice.tokens[start:end]
        names = [self._tokenizer.token_text(token.id) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return Logprobs(names, [t.logprob for t in tokens], [self._top(t) for t in tokens], offsets)

    def _top(self, token: SampledToken) -> dict[str, float] | None:
        return {self._tokenizer.token_text(one): logprob for one, logprob in token.top} or None


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if not all(re.fullmatch(schema.BIAS_KEY, token) for token in given):
        raise RequestError("logit_bias maps token ids, as 0 or 15496, to numbers")
    return tuple((int(token), value) for token, value in given.items())


def check_model(asked: str | None, served: str) -> None:
    """Refusal of another model."""
    if asked is not None and asked != served:
        message = f"the model '{asked[:100]}' is not served here, '{served}' is"
        raise Refusal(404, message, "model_not_found", "model")


def reason(finish: FinishReason | None) -> str | None:
    """`finish_reason`; OpenAI has "stop" and "length", the others are ours."""
    return None if finish is None else finish.value


def usage(tickets: Sequence[Ticket]) -> Usage:
    """What all rows took, those that best_of did not choose included."""
    prompt = sum(len(ticket.request.prompt) for ticket in tickets)
    made = sum(len(choice.tokens) for ticket in tickets for choice in ticket.choices.rows)
    return Usage(prompt, made, prompt + made)


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

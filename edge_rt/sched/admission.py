"""What a request must be to be served at all."""

from __future__ import annotations

from edge_rt.core import Limits, Priority, Request, SamplingParams
from edge_rt.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIAS = 1e9


def pages_for(tokens: int, limits: Limits) -> int:
    """Pages that hold `tokens` positions of one row."""
    return -(-tokens // limits.page_tokens)


def check(request: Request, limits: Limits) -> None:
    """Raise RequestError if this request can never be served; it says what would be."""
    prompt, rows = len(request.prompt), request.rows
    # Types too: a float that gets in would break a step, and with it everyone's.
    for value in (request.sampling.max_tokens, rows, *request.prompt):
        if type(value) is not int:
            raise RequestError(f"tokens, rows and max_tokens are whole numbers, found {value!r}")
    if prompt < 1:
        raise RequestError("the prompt is empty; it needs at least 1 token")
    for token in request.prompt:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"token id {token} in the prompt is not in the vocabulary, "
                f"0 to {limits.vocab_size - 1}"
            )
    most = min(limits.max_rows, limits.pages)
    if not 1 <= rows <= most:
        raise RequestError(f"a request may take 1 to {most} continuations, found {rows}")
    if request.priority not in list(Priority):
        raise RequestError(f"priority {request.priority!r} is none of {[*Priority]}")
    if request.deadline_ns is not None and type(request.deadline_ns) is not int:
        raise RequestError(f"deadline_ns must be a whole number, found {request.deadline_ns!r}")
    _check_sampling(request.sampling, limits)
    _check_size(request, limits)


def _check_size(request: Request, limits: Limits) -> None:
    prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
    # Every row for itself: what they share of the prompt they lose when they are preempted.
    fits = min(limits.max_context, limits.pages // request.rows * limits.page_tokens)
    if prompt + max_tokens > fits:
        of_each = "a request" if request.rows == 1 else f"each of {request.rows} continuations"
        raise RequestError(
            f"a prompt of {prompt} tokens and max_tokens {max_tokens} are more than the "
            f"{fits} tokens of {of_each}; {_what_fits(prompt, max_tokens, fits)}"
        )


def _what_fits(prompt: int, max_tokens: int, fits: int) -> str:
    if fits < 2:
        return "ask for fewer continuations"
    ways = []
    if prompt < fits:
        ways.append(f"max_tokens {fits - prompt} with this prompt")
    if max_tokens < fits:
        ways.append(f"a prompt of {fits - max_tokens} tokens with this max_tokens")
    return f"what fits: {' or '.join(ways or [f'a prompt of {fits - 1} tokens with max_tokens 1'])}"


# What each may be; top_p 0 would leave no token.
_WHOLES = {
    "max_tokens": (1, 2**31),
    "min_tokens": (0, 2**31),
    "top_k": (0, 2**31),
    "seed": (0, 2**64),
}
_REALS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    for name, (low, high) in _WHOLES.items():
        value = getattr(sampling, name)
        if type(value) is not int or not low <= value < high:
            raise RequestError(_must_be(name, "a whole number", low, high, value))
    for name, (least, most) in _REALS.items():
        value = getattr(sampling, name)
        if not isinstance(value, int | float) or not least <= value <= most:  # NaN too
            raise RequestError(_must_be(name, "a number", least, most, value))
    if sampling.top_p == 0.0:
        raise RequestError("top_p must be more than 0; take temperature 0 for the likeliest token")
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens {sampling.min_tokens} is more than max_tokens {sampling.max_tokens}"
        )
    wanted = sampling.logprobs
    if wanted is not None and (type(wanted) is not int or not 0 <= wanted <= MAX_LOGPROBS):
        raise RequestError(_must_be("logprobs", "a whole number", 0, MAX_LOGPROBS, wanted))
    for token in sampling.stop_token_ids:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop token id {token!r} is not in the vocabulary, 0 to {limits.vocab_size - 1}"
            )
    _check_bias(sampling, limits.vocab_size)


def _check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    for token, bias in sampling.logit_bias:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias: token id {token!r} is not in the vocabulary, 0 to {vocab_size - 1}"
            )
        if not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:  # NaN too
            raise RequestError(
                _must_be(f"logit_bias of token {token}", "a number", -MAX_BIAS, MAX_BIAS, bias)
            )


def _must_be(name: str, kind: str, low: float, high: float, found: object) -> str:
    upper = "or more" if high >= 2**31 else f"to {high:g}"
    return f"{name} must be {kind}, {low:g} {upper}, found {found!r}"

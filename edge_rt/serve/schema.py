"""What clients send and get: OpenAI's completions, as types.

Fields that OpenAI's API does not have are marked as ours. A body that does not fit them is refused
with the field's place; what fits but can never be served is the scheduler's to refuse.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from edge_rt.errors import RequestError

MAX_PROMPTS = 64
MAX_STOP = 4
BIAS_KEY = "0|[1-9][0-9]{0,9}"  # a token id; no two keys are one
MAX_TOKEN_IDS = 4096  # of a bias, or that stop

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=128)]
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Of a stream."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # accepted; nothing is obfuscated


class CompletionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[Any],
        Meta(description="Text, token ids, or a list of either: each is a request of its own."),
    ]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = 16
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    n: Count | None = 1
    best_of: Count | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = False
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    suffix: str | None = None
    user: str | None = None
    # Ours, as vLLM calls them.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = False
    # Ours.
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    priority: Literal["interactive", "batch"] | None = None


class Logprobs(Struct):
    """Of the tokens of a choice, in OpenAI's form for completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One continuation, or in a stream a piece of one."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


class Usage(Struct):
    """Tokens of a request, all of its prompts and continuations together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Struct):
    """The answer, or in a stream one event."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET


class Model(Struct):
    """The bundle that is served."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "edge_rt"


class Models(Struct):
    """GET /v1/models."""

    data: list[Model]
    object: str = "list"


class Health(Struct):
    """What the server is doing."""

    status: Literal["loading", "ready", "draining", "failed"]


class Version(Struct):
    """GET /version."""

    version: str


def decode(body: bytes) -> CompletionRequest:
    """The request in a body; msgspec's ValidationError or DecodeError for what is none."""
    return msgspec.json.decode(body, type=CompletionRequest)


def prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts, texts or token ids; RequestError for a mixture or for none."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if given and all(type(item) is int for item in given):
        return [given]
    if not given:
        raise RequestError("prompt is an empty list; give text or token ids")
    if len(given) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(given)} entries, at most {MAX_PROMPTS} are taken")
    if all(isinstance(item, str) for item in given):
        return given
    if all(isinstance(item, list) and all(type(i) is int for i in item) for item in given):
        return given
    raise RequestError(
        "prompt must be text, a list of texts, a list of token ids, or a list of such lists"
    )

"""Answers kept for the same request again: only those that would be the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace

from edge_rt.serve.completions import Call
from edge_rt.serve.schema import Completion


class ResponseCache:
    """The last `most` answers, the one used longest ago leaves first; `most` 0 keeps none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Completion] = OrderedDict()

    def get(self, call: Call) -> Completion | None:
        """The answer to the same call, if it is kept."""
        key = _key(call) if self._kept else None
        if key is None or key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, call: Call, answer: Completion) -> None:
        """Keep an answer that would be the same again."""
        key = _key(call) if self._most else None
        if key is None or not _is_whole(answer):
            return
        self._kept[key] = answer
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


def _key(call: Call) -> Hashable | None:
    """All that an answer depends on; None where another one would be drawn."""
    body = call.body
    if body.stream or (body.seed is None and body.temperature != 0):
        return None
    prompts = tuple(request.prompt for request in call.requests)
    sampling = call.requests[0].sampling
    if body.seed is None:  # then it decides nothing
        sampling = replace(sampling, seed=0)
    return (
        prompts,
        sampling,
        call.requests[0].rows,
        call.shown,
        call.stop,
        bool(body.echo),
        body.logprobs,
    )


def _is_whole(answer: Completion) -> bool:
    return all(choice.finish_reason in {"stop", "length"} for choice in answer.choices)

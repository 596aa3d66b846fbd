"""Requests whose answers are the same every time, and those answers, each got alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from soak_wire import Wire, request

from edge_rt.errors import EngineError

TEXTS = ("def main(", "import os\n", "class Reader:\n    def ", "The ", "for i in range(", "x")
LONG = 8  # the first ones: for clients that read slowly
STOPS = ("e", "\n", " self", "in", "):", "the")


@dataclass(frozen=True, slots=True)
class Known:
    """A body without `stream`, and the choices and usage that it gets alone."""

    body: dict[str, Any]
    choices: list[dict[str, Any]]
    usage: dict[str, int]

    def streamed(self) -> Known:
        """What of it the pieces of a stream make."""
        names = ("text", "finish_reason")
        return replace(self, choices=[{name: one[name] for name in names} for one in self.choices])

    def fault(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> str | None:
        """What is wrong with an answer to it."""
        if choices != self.choices:
            return f"{self.body} gave {choices}, alone {self.choices}"
        if usage != self.usage:
            return f"{self.body} took {usage}, alone {self.usage}"
        return None

    def fault_cut_short(self, choices: list[dict[str, Any]]) -> str | None:
        """The same where `timeout_s` may have ended it; the end may be half a character."""
        if len(choices) != len(self.choices):
            return f"{self.body} gave {choices}, alone {self.choices}"
        for found, alone in zip(choices, self.choices, strict=True):
            if found["finish_reason"] != "timeout":
                if _brief(found) != _brief(alone):
                    return f"{self.body} gave {found}, alone {alone}"
            elif not alone["text"].startswith(found["text"].rstrip("\ufffd")):
                return f"{self.body} began {found}, alone {alone}"
        return None


def _brief(choice: dict[str, Any]) -> tuple[str, str]:
    return choice["text"], choice["finish_reason"]


def bodies(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Of many lengths; with n, best_of, stop strings, priorities, echo and logprobs among them."""
    long = {"prompt": [5], "max_tokens": 300, "n": 2, "ignore_eos": True, "temperature": 0.8}
    return [long | {"seed": index} if index < LONG else _body(draw) for index in range(count)]


def _body(draw: random.Random) -> dict[str, Any]:
    def tokens() -> list[int]:
        return [draw.randrange(1, 3000) for _ in range(int(draw.paretovariate(0.7)) % 300 + 1)]

    prompts: list[Any] = [draw.choice(TEXTS), tokens(), [draw.choice(TEXTS), "y"], [tokens(), [7]]]
    body: dict[str, Any] = {
        "prompt": draw.choices(prompts, (4, 4, 1, 1))[0],
        "max_tokens": draw.choice((1, 2, 8, 16, 32, 64, 120)),
        "temperature": draw.choice((0, 0.8)),
        "seed": draw.randrange(2**32),
        "ignore_eos": draw.random() < 0.5,
        "priority": draw.choice(("interactive", "batch")),
    }
    rare = {
        "n": draw.randint(2, 4),
        "best_of": 4,
        "stop": draw.sample(STOPS, draw.randint(1, 3)),
        "echo": True,
        "logprobs": 2,
    }
    body |= {name: value for name, value in rare.items() if draw.random() < 0.15}
    if "logprobs" in body:
        body.pop("echo", None)  # refused together
    return body


async def known(port: int, count: int, seed: int) -> list[Known]:
    """Ask for each answer, one after the other."""
    wire, found = await Wire.open(port), []
    try:
        for body in bodies(count, random.Random(seed)):  # noqa: S311
            await wire.send(b"".join(request(body)))
            head, content = await wire.all()
            if head.status != 200:
                raise EngineError(f"{body} got {head.status}: {content.decode()}")
            answer = json.loads(content)
            found.append(Known(body, answer["choices"], answer["usage"]))
    finally:
        wire.close()
    return found

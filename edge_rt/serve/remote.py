"""What an operator may ask a daemon for over MQTT; docs/telemetry.md describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edge_rt import config
from edge_rt.bench import conditions, report
from edge_rt.bench.live import LiveBench
from edge_rt.bench.workloads import held_out_prompts
from edge_rt.errors import ConfigError, EngineError, RequestError
from edge_rt.serve.state import State
from edge_rt.telemetry.metered import Metered

MAX_SAMPLES, PROMPTS = 1000, 64


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The payload of cmd/bench."""

    scenario: Literal["single-stream", "offline"] = "single-stream"
    samples: int = 16
    prompt_tokens: int = 64
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ConfigError(f"samples must be 1 to {MAX_SAMPLES}, found {self.samples}")
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ConfigError("prompt_tokens and max_tokens must be 1 or more")


class Remote:
    """Answers the commands that the settings allow, in the one thread that calls it.

    `stop` is called for a drain, `publish` with each measurement.
    """

    def __init__(
        self, state: State, stop: Callable[[], None], publish: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._state, self._stop, self._publish = state, stop, publish

    def __call__(self, verb: str, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a command gives; ConfigError, RequestError or EngineError if it cannot be done."""
        return {"drain": self._drain, "bench": self._bench, "power-cap": self._power_cap}[verb](
            payload
        )

    def _drain(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        if payload:
            raise ConfigError(f"cmd/drain takes no settings, found {', '.join(sorted(payload))}")
        self._stop()
        return {"drain_s": self._state.settings.server.drain_s}

    def _power_cap(self, _payload: Mapping[str, Any]) -> Mapping[str, Any]:
        raise EngineError("this version has no power governor, so there is no cap to set")

    def _bench(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        options = config.from_table(BenchOptions, payload, "cmd/bench")
        state, front = self._state, self._state.front
        if front is None or state.status != "ready":
            raise RequestError(f"the daemon is {state.status}; only a ready one can be measured")
        most, found = front.engine[0].max_context, options.prompt_tokens + options.max_tokens
        if found > most:  # before prompts are made, which for huge ones takes seconds
            raise RequestError(
                f"prompt_tokens and max_tokens must be {most} or less together, found {found}"
            )
        prompts = held_out_prompts(
            front.tokenizer, min(options.samples, PROMPTS), options.prompt_tokens
        )
        warnings = conditions.warnings()
        others, metered = state.metrics.latency_s.count, _metered(state)
        live = LiveBench(front.loop, prompts, options.max_tokens)
        measure = live.single_stream if options.scenario == "single-stream" else live.offline
        result = report.summarize(measure(options.samples))
        others = state.metrics.latency_s.count - others
        if others:
            warnings.append(f"{others} other requests ended during the run")
        fields = {
            "scenario": options.scenario,
            "model": state.model,
            "prompt_tokens": options.prompt_tokens,
            "max_tokens": options.max_tokens,
            **result,
            **_energy(metered, _metered(state), result),
            "warnings": result["warnings"] + warnings,
        }
        self._publish(fields)
        return fields


def _metered(state: State) -> Metered | None:
    board = state.board()
    return Metered.of(None if board is None else board[1])


def _energy(
    before: Metered | None, after: Metered | None, result: Mapping[str, Any]
) -> dict[str, float]:
    """The energy of a token, where there is a meter."""
    if before is None or after is None:
        return {}
    j_per_tok = after.since(before).j_per_tok(result["duration_s"], result["tokens"])
    return {} if j_per_tok is None else {"energy_j_per_tok": j_per_tok}

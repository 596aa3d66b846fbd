"""From what the engines' turns have found to the table of `tools/peers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peer_engines import Row, Tokens

OURS, ORACLE = "edge_rt", "transformers"
DOUBTFUL = 0.5  # of the first tokens: with less, an engine may not run the same model
QUIET_LOAD = 0.7


def merged(turns: Sequence[Sequence[Row]]) -> list[Row]:
    """An engine's turns in one list: each setting with the calls of all turns, and its rates."""
    found = [dict(row) for row in turns[0]]
    for others in turns[1:]:
        for row, other in zip(found, others, strict=True):
            assert (row["setting"], row["batch"]) == (other["setting"], other["batch"])
            row["wall_s"] = row["wall_s"] + other["wall_s"]
            row["prefill_s"] = row["prefill_s"] + other["prefill_s"]
    for row in found:
        least = min(row["wall_s"])
        row["tokens_per_s"] = row["tokens"] / least
        row["step_ms"] = 1e3 * (least - min(row["prefill_s"])) / row["steps"]
    return found


def winners(rows: Sequence[Row]) -> dict[str, Row]:
    """The fastest setting at each batch size, by b1 and b8."""
    best: dict[str, Row] = {}
    for row in rows:
        key = f"b{row['batch']}"
        if key not in best or row["tokens_per_s"] > best[key]["tokens_per_s"]:
            best[key] = row
    return best


def agreement(found: Tokens, oracle: Tokens) -> float:
    """Share of equal tokens, position by position."""
    equal = [a == b for x, y in zip(found, oracle, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(equal) / len(equal)


def table(tried: Mapping[str, Sequence[Row]], first: Mapping[str, Mapping[str, Tokens]]) -> Row:
    """What was found: the keys of `tools/peers --json` that are no conditions."""
    best = {engine: winners(rows) for engine, rows in tried.items()}
    rates, steps, settings = (
        {engine: {key: row[what] for key, row in of.items()} for engine, of in best.items()}
        for what in ("tokens_per_s", "step_ms", "setting")
    )
    ours = rates[OURS]
    agree = {
        engine: {key: agreement(tokens, first[ORACLE]["b1"]) for key, tokens in of.items()}
        for engine, of in first.items()
        if ORACLE in first
    }
    doubts = [
        f"only {100 * share:.0f} % of {engine}'s first tokens at {key} are those of {ORACLE}"
        for engine, of in agree.items()
        for key, share in of.items()
        if share < DOUBTFUL
    ]
    return {
        "tokens_per_s": rates,
        "ratios": {
            engine: {key: ours[key] / rate for key, rate in of.items()}
            for engine, of in rates.items()
            if engine != OURS
        },
        "step_ms": steps,
        "agreement": agree,
        "warnings": doubts,
        "best": settings,
        "tried": {engine: list(rows) for engine, rows in tried.items()},
    }


def busy(load: float) -> list[str]:
    """A warning if the machine had other work before the run."""
    if load < QUIET_LOAD:
        return []
    warning = (
        f"the load average was {load:.1f} before the run: with other work on the machine the "
        f"numbers are too low, and fewer threads look better than they are"
    )
    return [warning]


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The table for people."""
    machine = found["machine"]
    yield (
        f"{found['checkpoint']}: {found['prompt_tokens']} tokens of prompt, "
        f"{found['new_tokens']} new ones, greedy, the fastest call of {found['repeats']} turns"
    )
    yield (
        f"{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['flags'])}); "
        f"load average before: {found['load_average_before']:.1f}"
    )
    columns = ("tokens/s", "edge_rt is", "ms a step", "first 8 equal")
    yield f"{'':12}" + "".join(f"{name:>20}" for name in columns)
    yield f"{'':12}" + f"{'b1':>10}{'b8':>10}" * len(columns)
    for engine, rates in found["tokens_per_s"].items():
        cells = [f"{rates[key]:10.0f}" for key in rates]
        ratios, agree = found["ratios"].get(engine, {}), found["agreement"].get(engine, {})
        cells += [f"{ratios[key]:9.2f}x" if ratios else f"{'':10}" for key in rates]
        cells += [f"{found['step_ms'][engine][key]:10.2f}" for key in rates]
        cells += [f"{100 * agree[key]:8.0f} %" if agree else f"{'':10}" for key in rates]
        yield f"{engine:12}" + "".join(cells)
    for engine, best in found["best"].items():
        for key, setting in best.items():
            yield f"{engine} {key}: " + ", ".join(f"{k} {v}" for k, v in setting.items())
    yield from (f"{engine} is left out: {why}" for engine, why in found["left_out"].items())
    yield from found["warnings"]

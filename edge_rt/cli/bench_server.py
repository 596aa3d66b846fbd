"""`edge-rt bench server`: load that arrives at random at a running daemon."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_rt.cli.cache import loadgen_logs
from edge_rt.errors import ConfigError

if TYPE_CHECKING:
    from edge_rt.bench.client import Address
    from edge_rt.bench.extent import Extent
    from edge_rt.bench.server import Load, Outcome

NAME = "server"
SEED = 0  # of the arrivals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only this scenario has."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--rate",
        type=_rate,
        metavar="R",
        help="requests a second (default: 70 %% of what the daemon does when it is full)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="the daemon's API key (default: the environment's OPENAI_API_KEY)",
    )


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")


def is_url(target: str) -> bool:
    """Whether it names a running daemon and not a directory."""
    return "://" in target or target.startswith("unix:")


def _needs_a_scheme(target: str) -> bool:
    return re.fullmatch(r"[\w.-]+:\d+/?", target) is not None and not Path(target).exists()


def check(options: argparse.Namespace) -> None:
    """ConfigError for what goes with this scenario only, or with others only."""
    if options.scenario == NAME:
        if _needs_a_scheme(options.target):
            raise ConfigError(
                f"'{options.target}' is no URL; did you mean http://{options.target}?"
            )
        import_module("edge_rt.bench.client")  # what it needs is missed before all else
        if options.plot is not None:
            raise ConfigError("--plot draws single-stream and offline, not server")
    elif options.rate is not None or options.api_key_file is not None:
        raise ConfigError("--rate and --api-key-file are for server")
    elif is_url(options.target):
        raise ConfigError(f"{options.scenario} takes a BUNDLE; only server takes a URL")


def api_key(file: Path | None) -> str | None:
    """The key in a file, or in the environment; ConfigError if the file holds none."""
    if file is None:
        return os.environ.get("OPENAI_API_KEY") or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: '{file}' cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"--api-key-file: '{file}' does not hold one API key")
    return key


def measure(
    target: str,
    *,
    prompts: int,
    extent: Extent,
    prompt_tokens: int,
    max_tokens: int,
    timer: str,
    rate_per_s: float | None,
    key: str | None,
    logs: Path | None,
) -> dict[str, Any]:
    """Offer the load and report.

    ConfigError for a target or a key that cannot work, EngineError if a request fails.
    """
    from edge_rt.bench import conditions, report, server
    from edge_rt.bench.client import Client

    warned, throttled = conditions.warnings(), conditions.throttle_counts()
    with _daemon(target) as (address, about):

        async def prepare() -> Load:
            async with Client(address, key) as client:
                return await server.prepare(
                    client,
                    prompts,
                    prompt_tokens,
                    max_tokens,
                    rate_per_s=rate_per_s,
                    concurrency=about.get("max_batch", server.CONCURRENCY),
                )

        load = server.interruptible(prepare)
        outcome, said, found = _time(load, address, key, extent=extent, timer=timer, logs=logs)
    table = report.summarize(outcome.run)
    throttles = conditions.throttled(throttled, conditions.throttle_counts())
    overload = server.overload(outcome, load.rate_per_s)
    table["warnings"] = [*warned, *table["warnings"], *throttles, *overload, *found]
    capacity = {} if load.capacity_per_s is None else {"capacity_per_s": load.capacity_per_s}
    return {
        "scenario": NAME,
        **about,
        "url": str(address),
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_mean": outcome.prompt_tokens / len(outcome.run.timings),
        "max_tokens": max_tokens,
        "timer": timer,
        "rate_per_s": load.rate_per_s,
        **capacity,
        "refused": outcome.refused,
        **table,
        **said,
    }


@contextlib.contextmanager
def _daemon(target: str) -> Iterator[tuple[Address, dict[str, Any]]]:
    """Where the daemon is, and what is known of the bundle that it was started on."""
    from edge_rt.bench import daemon
    from edge_rt.bench.client import Address
    from edge_rt.bundle import Bundle

    if is_url(target):
        yield Address.parse(target), {}
        return
    recipe = Bundle.load(Path(target)).manifest.recipe
    about = {"engine": recipe.engine, "bundle": target, "max_batch": recipe.max_batch}
    with daemon.started(Path(target)) as one:
        yield one.address, about


def _time(
    load: Load,
    address: Address,
    key: str | None,
    *,
    extent: Extent,
    timer: str,
    logs: Path | None,
) -> tuple[Outcome, dict[str, Any], list[str]]:
    """The outcome, what LoadGen says, and what is to be warned of."""
    from tqdm import tqdm

    from edge_rt.bench import arrivals, loadgen_server, server, verdict
    from edge_rt.bench.client import Client

    with tqdm(desc=NAME, unit=" request", leave=False, disable=None) as progress:
        if timer == "own":
            count = len(extent.offline(load.prompts, load.rate_per_s))
            due_ns = arrivals.poisson_ns(count, load.rate_per_s, SEED)

            async def arrive() -> Outcome:
                async with Client(address, key) as client:
                    return await server.arrive(client, load, due_ns, progress.update)

            return server.interruptible(arrive), {}, []
        directory = loadgen_logs(NAME) if logs is None else logs
        job = loadgen_server.Job(
            str(address),
            key,
            load.prompts,
            load.max_tokens,
            load.rate_per_s,
            extent.samples,
            extent.duration_s,
            str(directory),
        )
        outcome = loadgen_server.measure(job, progress.update)
    said = verdict.read(directory)
    table = said.table(directory)
    warned = [*said.warnings(), *verdict.disagreements(said, outcome.run)]
    return outcome, {"loadgen": table}, warned


def heading(result: dict[str, Any]) -> str:
    """What was measured, for people."""
    offered = f"{result['rate_per_s']:g} a second"
    if "capacity_per_s" in result:
        capacity = result["capacity_per_s"]
        share = 100 * result["rate_per_s"] / capacity
        offered += f" ({share:.0f} % of the {capacity:.3g} that it does when it is full)"
    return (
        f"server, {result['url']}: {result['samples']} requests of "
        f"{result['prompt_tokens_mean']:.0f} + {result['max_tokens']} tokens at {offered} in "
        f"{result['duration_s']:.1f} s, {result['refused']} more were refused"
    )

"""`edge-rt bench`: latency and throughput of a bundle, or of a daemon that serves one."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_rt.cli import bench_server, publish
from edge_rt.cli.cache import loadgen_logs
from edge_rt.cli.output import Commands, add_command, can_write, finish, positive, say
from edge_rt.errors import ConfigError, MissingLibraryError

if TYPE_CHECKING:
    from edge_rt.bench.scenario import Name, Scenario
    from edge_rt.bench.sweep import Steps
    from edge_rt.bench.timer import Run
    from edge_rt.bundle import Bundle
    from edge_rt.loop import Loop

DEFAULT_PROMPT_TOKENS = 64
DEFAULT_MAX_TOKENS = 32
PROMPTS = 64  # that take turns, unless --samples says how many there are
SCENARIOS: tuple[Name, ...] = ("single-stream", "offline")
TIMERS = ("auto", "loadgen", "own")


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(commands, "bench", "Measure a bundle's latency or throughput.", run)
    parser.add_argument("scenario", choices=(*SCENARIOS, bench_server.NAME))
    parser.add_argument(
        "target",
        metavar="BUNDLE",
        help="server takes a running daemon's URL too (http://127.0.0.1:8000, unix:/path/to.sock); "
        "given a BUNDLE it starts a daemon for as long as it measures",
    )
    for option, default, what in (
        ("--samples", None, "requests (default 64, or what 10 s take if that is more)"),
        ("--prompt-tokens", DEFAULT_PROMPT_TOKENS, "tokens of each prompt (default %(default)s)"),
        ("--max-tokens", DEFAULT_MAX_TOKENS, "new tokens of each request (default %(default)s)"),
    ):
        parser.add_argument(option, type=positive, default=default, metavar="N", help=what)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the result, over batch size too"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="where LoadGen's files go (default: a new directory in the cache)",
    )
    parser.add_argument(
        "--timer",
        choices=TIMERS,
        default="auto",
        help="MLPerf's LoadGen, or edge_rt's own timer; auto takes LoadGen if it is installed",
    )
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="FILE",
        help="publish the result over MQTT too, at the broker of a daemon's settings FILE",
    )
    bench_server.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and report."""
    check(options)
    timer, note = choose_timer(options.timer)
    if note is not None:
        say(options, note)
    if options.scenario == bench_server.NAME:
        result = _measure_server(options, timer)
    else:
        result = measure(
            options.scenario,
            Path(options.target),
            samples=options.samples,
            prompt_tokens=options.prompt_tokens,
            max_tokens=options.max_tokens,
            timer=timer,
            logs=options.logs,
            plot=options.plot,
        )
    for line in lines(result):
        say(options, line)
    finish(options, result | ({} if note is None else {"timer_note": note}))
    if options.publish is not None:
        say(options, f"  published   {publish.result(options.publish, result)}")
    return 0


def _measure_server(options: argparse.Namespace, timer: str) -> dict[str, Any]:
    from edge_rt.bench import extent

    return bench_server.measure(
        options.target,
        prompts=options.samples or PROMPTS,
        extent=extent.DEFAULT if options.samples is None else extent.Extent(options.samples),
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
        timer=timer,
        rate_per_s=options.rate,
        key=bench_server.api_key(options.api_key_file),
        logs=options.logs,
    )


def check(options: argparse.Namespace) -> None:
    """What would fail after the work fails before it."""
    bench_server.check(options)
    if options.publish is not None:
        publish.check(options.publish)
    if options.logs is not None:
        if options.timer == "own":
            raise ConfigError("--logs is for LoadGen's files; --timer own writes none")
        logs: Path = options.logs
        if logs.exists() and not (logs.is_dir() and os.access(logs, os.W_OK)):
            raise ConfigError(f"--logs: '{logs}' is no directory that can be written to")
    if options.plot is not None:
        from edge_rt.bench import plot

        plot.require()
        file: Path = options.plot
        if file.suffix.lower() != ".png":
            raise ConfigError(f"--plot: '{file}' does not end in .png")
        if not can_write(file):
            raise ConfigError(f"--plot: '{file}' cannot be written")


def choose_timer(wanted: str) -> tuple[str, str | None]:
    """'loadgen' or 'own', and what is to be said about a choice that the user did not make."""
    if wanted == "own":
        return "own", None
    from edge_rt.bench import loadgen

    try:
        loadgen.library()
    except MissingLibraryError as error:
        if wanted == "loadgen":
            raise
        return "own", f"edge_rt's own timer measures instead of MLPerf's LoadGen: {error}"
    return "loadgen", None


def measure(
    scenario: Name,
    path: Path,
    *,
    samples: int | None = None,
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    timer: str = "own",
    logs: Path | None = None,
    plot: Path | None = None,
    warnings: list[str] | None = None,
) -> dict[str, Any]:
    """Run one scenario over a bundle, after a few requests to warm up.

    `samples` None goes on for 64 requests and 10 s; `warnings` are those of the machine, looked up
    if they are None. EngineError if a request fails.
    """
    from edge_rt.bench import conditions, extent, report, sweep, workloads
    from edge_rt.bench.scenario import Scenario
    from edge_rt.bundle import Bundle
    from edge_rt.loop import Loop
    from edge_rt.runtime.engines import open_engine
    from edge_rt.tokenizer import Tokenizer

    bundle = Bundle.load(path)
    recipe = bundle.manifest.recipe
    prompts = workloads.held_out_prompts(Tokenizer.load(path), samples or PROMPTS, prompt_tokens)
    goal = extent.DEFAULT if samples is None else extent.Extent(samples)
    job = Scenario(scenario, prompts, max_tokens, goal, recipe.max_batch)
    result: dict[str, Any] = {
        "scenario": scenario,
        "engine": recipe.engine,
        "bundle": str(path),
        "max_batch": recipe.max_batch,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "timer": timer,
    }
    warned = conditions.warnings() if warnings is None else warnings
    throttled = conditions.throttle_counts()
    steps = sweep.Steps()
    loop = Loop(open_engine(bundle), after_step=steps)
    try:
        timed, said, found = _time(job, loop, timer, logs)
        table = report.summarize(timed)
        throttles = conditions.throttled(throttled, conditions.throttle_counts())
        table["warnings"] = [*warned, *table["warnings"], *throttles, *found]
        result |= table | said
        if plot is not None:
            result |= _over_batches(job, loop, steps, bundle)
            _draw(result, timed, plot)
    finally:
        loop.close()
    return result


def _time(
    job: Scenario, loop: Loop, timer: str, logs: Path | None
) -> tuple[Run, dict[str, Any], list[str]]:
    """The timings, what LoadGen says, and what is to be warned of."""
    from tqdm import tqdm

    from edge_rt.bench import verdict

    with tqdm(desc=job.name, unit=" request", leave=False, disable=None) as progress:
        if timer == "own":
            timed = job.by_own_timer(loop, progress.update)
            return timed, {}, job.shortfall(timed)
        directory = loadgen_logs(job.name) if logs is None else logs
        timed = job.by_loadgen(loop, directory, progress.update)
    said = verdict.read(directory)
    table = {"loadgen": said.table(directory)}
    return timed, table, [*said.warnings(), *verdict.disagreements(said, timed)]


def _over_batches(job: Scenario, loop: Loop, steps: Steps, bundle: Bundle) -> dict[str, Any]:
    """Throughput and decode time over batch size, and what memory allows."""
    from tqdm import tqdm

    from edge_rt.bench import bandwidth, sweep

    total = sweep.requests(job.max_batch)
    with tqdm(total=total, desc="batches", unit=" request", leave=False, disable=None) as progress:
        points = sweep.measure(
            loop,
            steps,
            job.prompts,
            job.max_tokens,
            max_batch=job.max_batch,
            on_end=progress.update,
        )
    size_bytes, gb_s = bandwidth.weights_bytes(bundle), bandwidth.memory_gb_s()
    return {
        "batches": [asdict(point) for point in points],
        "weights_bytes": size_bytes,
        "memory_gb_s": gb_s,
        "weights_reading_ms": size_bytes / gb_s * 1e-6,
    }


def _draw(result: dict[str, Any], timed: Run, file: Path) -> None:
    from edge_rt.bench import plot, report
    from edge_rt.bench.sweep import Point

    now = datetime.now(timezone.utc)
    size = f"{result['prompt_tokens']} + {result['max_tokens']} tokens"
    facts = (
        f"{now:%Y-%m-%d %H:%M} UTC",
        f"{result['samples']} requests of {size}",
        f"{result['throughput_tok_s']:.0f} tokens/s, {result['samples_per_s']:.2f} samples/s",
        f"timer: {_timer(result)}",
    )
    plot.save(
        plot.Picture(
            title=f"edge-rt bench {result['scenario']}: {Path(result['bundle']).name}, "
            f"engine {result['engine']}",
            subtitle="   |   ".join(facts),
            latency_ms=report.latency_ms(timed),
            ttft_ms=report.ttft_ms(timed),
            points=[Point(**point) for point in result["batches"]],
            weights_bytes=result["weights_bytes"],
            memory_gb_s=result["memory_gb_s"],
            warnings=result["warnings"],
        ),
        file,
    )
    result["plot"] = str(file)


def _timer(result: dict[str, Any]) -> str:
    if result["timer"] == "own":
        return "edge_rt's own"
    said = result["loadgen"]
    return f"LoadGen {said['version']}, {'VALID' if said['valid'] else 'INVALID'}"


def _heading(result: dict[str, Any]) -> str:
    return (
        f"{result['scenario']}, engine {result['engine']}: {result['samples']} requests of "
        f"{result['prompt_tokens']} + {result['max_tokens']} tokens in "
        f"{result['duration_s']:.1f} s"
    )


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    heading = bench_server.heading if result["scenario"] == bench_server.NAME else _heading
    text = [
        heading(result),
        (
            f"  latency     p50 {result['latency_ms_p50']:.1f} ms   "
            f"p90 {result['latency_ms_p90']:.1f} ms   p99 {result['latency_ms_p99']:.1f} ms"
        ),
        f"  first token p50 {result['ttft_ms_p50']:.1f} ms   p99 {result['ttft_ms_p99']:.1f} ms",
    ]
    if "tpot_ms_p50" in result:
        text.append(f"  next token  p50 {result['tpot_ms_p50']:.2f} ms")
    text += [
        (
            f"  throughput  {result['throughput_tok_s']:.0f} tokens/s   "
            f"{result['samples_per_s']:.2f} samples/s"
        ),
        f"  timer       {_timer(result)}",
    ]
    if "loadgen" in result:
        text.append(f"  its files   {result['loadgen']['logs']}")
    if "plot" in result:
        text.append(f"  picture     {result['plot']}")
    return text + [f"  warning: {warning}" for warning in result["warnings"]]

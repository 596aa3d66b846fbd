"""A measurement as a picture: latency, throughput over batch size, and the memory bound."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_rt.bench.sweep import Point
from edge_rt.errors import MissingLibraryError
from edge_rt.telemetry.percentile import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
_STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}
_NOTE_COLUMNS = 180


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn; `points` by batch size, `weights_bytes` 0 for an engine that has none."""

    title: str
    subtitle: str
    latency_ms: Sequence[float]
    ttft_ms: Sequence[float]
    points: Sequence[Point]
    weights_bytes: int
    memory_gb_s: float
    warnings: Sequence[str] = ()

    @property
    def reading_ms(self) -> float:
        """How long the memory takes to deliver the weights once."""
        return self.weights_bytes / (self.memory_gb_s * 1e9) * 1e3


def require() -> None:
    """MissingLibraryError without matplotlib: before the work, not after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError("matplotlib", "plot") from error


def save(picture: Picture, file: Path) -> None:
    """Write the figure to `file` as PNG."""
    figure(picture).savefig(file, format="png", dpi=150)


def figure(picture: Picture) -> Figure:
    """Three panels side by side; what speaks against the result stands below."""
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        made = Figure(figsize=(15, 5.6))
        panels = made.subplots(1, 3)
        _draw_latency(panels[0], picture)
        _draw_throughput(panels[1], picture)
        _draw_decode(panels[2], picture)
        made.text(0.012, 0.965, picture.title, va="top", fontsize=15, weight="bold")
        made.text(0.012, 0.89, picture.subtitle, va="top", fontsize=10.5, color=_GREY)
        notes = [
            line
            for warning in picture.warnings
            for line in textwrap.wrap(f"Warning: {warning}", _NOTE_COLUMNS)
        ]
        made.text(0.012, 0.015, "\n".join(notes), va="bottom", fontsize=9, color=_RED)
        made.tight_layout(rect=(0.004, 0.015 + 0.034 * len(notes), 1, 0.855), w_pad=2.5)
    return made


def _draw_latency(axes: Axes, picture: Picture) -> None:
    axes.set_title("Latency")
    for values, colour, name in (
        (picture.ttft_ms, _ORANGE, "first token"),
        (picture.latency_ms, _BLUE, "whole request"),
    ):
        axes.ecdf(list(values), color=colour, linewidth=2, label=name)
    for q, marker in ((50, "o"), (90, "s"), (99, "D")):
        value = percentile(picture.latency_ms, q)
        axes.plot([value], [q / 100], marker, color=_BLUE, markersize=7, clip_on=False)
        axes.annotate(
            f"p{q}  {_number(value)} ms",
            (value, q / 100),
            xytext=(-9, 3),
            textcoords="offset points",
            ha="right",
            color=_BLUE,
            weight="bold",
            path_effects=_halo(),
        )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.07)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of requests that took no longer")
    # Above the panel: within it there is no place that the curves never reach.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _draw_throughput(axes: Axes, picture: Picture) -> None:
    axes.set_title("Throughput over batch size")
    sizes = [point.batch for point in picture.points]
    rates = [point.throughput_tok_s for point in picture.points]
    axes.plot(sizes, rates, "o-", color=_GREEN, linewidth=2, markersize=7)
    for size, rate in zip(sizes, rates, strict=True):
        _label(axes, size, rate, _number(rate), _GREEN)
    axes.set_ylim(0, 1.15 * max(rates))
    axes.set_ylabel("new tokens per second, prompts included")
    _batch_axis(axes, sizes)


def _draw_decode(axes: Axes, picture: Picture) -> None:
    axes.set_title("Decode step and the memory bound")
    points = [point for point in picture.points if point.decode_step_ms is not None]
    sizes = [point.batch for point in points]
    times = [point.decode_step_ms or 0.0 for point in points]
    name = "measured, median" if points else "no step decoded a whole batch"
    axes.plot(sizes, times, "o-", color=_BLUE, linewidth=2, markersize=7, label=name)
    for size, time in zip(sizes, times, strict=True):
        _label(axes, size, time, _number(time), _BLUE)
    reading = picture.reading_ms
    if picture.weights_bytes:
        axes.axhline(
            reading,
            color=_RED,
            linestyle="--",
            linewidth=2,
            label=f"reading {_megabytes(picture.weights_bytes)} of weights once: "
            f"{_number(reading)} ms\nat {picture.memory_gb_s:.1f} GB/s, measured by copying",
        )
    else:
        axes.plot([], [], " ", label="this engine has no weights to read")
    axes.set_ylim(0, 1.45 * max([reading, *times, 1e-3]))
    axes.set_ylabel("milliseconds per step")
    axes.legend(loc="upper left")
    _batch_axis(axes, [point.batch for point in picture.points])


def _batch_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.8 * min(sizes), 1.25 * max(sizes))
    axes.set_xlabel("requests in the batch")


def _label(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(-6, 9),
        textcoords="offset points",
        ha="center",
        color=colour,
        weight="bold",
        path_effects=_halo(),
    )


def _halo() -> list[Any]:
    """White around a text, so that no line runs into it."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground="white")]


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"

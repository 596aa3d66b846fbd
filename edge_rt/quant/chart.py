"""The quality page's charts as inline SVG, its style sheet and how it writes numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

MINUS, TIMES, SPACE, DASH = "\u2212", "\u00d7", "\u00a0", "\u2013"

_PANEL_WIDTH = 520
_MAP_WIDTH = 1060
_MAX_LABELS = 10  # on an axis
_ROLES = {
    "attn_qkv": "query, key and value projections",
    "mlp_fc_in": "into the MLP",
    "attn_out": "attention's output projection",
    "mlp_fc_out": "out of the MLP",
}

STYLE = """
:root { color-scheme: light; --page: #fff; --ink: #1b1f24; --soft: #5b636c; --rule: #e1e4e8;
  --track: #f1f3f5; --blue: #0a62ad; --pale: #b5d3ee; --grey: #878f98; --orange: #c9510c; }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --page: #15181c; --ink: #e4e7eb; --soft: #9ca5ae; --rule: #30363d;
    --track: #20252b; --blue: #63b0f4; --pale: #27486a; --grey: #8d969f; --orange: #f2924f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 56px 32px 72px; }
h1 { font-size: 34px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 8px; }
h2 { font-size: 22px; line-height: 1.3; letter-spacing: -.01em; margin: 0 0 8px; }
p, ul, .wide figcaption { max-width: 76ch; margin: 0 0 12px; }
ul { padding-left: 20px; }
code, pre { font: .9em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
pre { background: var(--track); padding: 14px 18px; border-radius: 6px; overflow-x: auto; }
.lede { font-size: 18px; color: var(--soft); margin-bottom: 32px; }
.lede b { color: var(--ink); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 32px;
  border-block: 1px solid var(--rule); padding: 24px 0; margin-bottom: 28px; }
.tiles p { margin: 0; line-height: 1.4; }
.tiles strong { display: block; font-size: 44px; line-height: 1.15; letter-spacing: -.02em;
  font-weight: 650; color: var(--blue); margin-bottom: 6px; }
.note { border-left: 3px solid var(--blue); padding-left: 16px; margin: 28px 0; }
dl { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px 40px;
  margin: 0 0 28px; }
dt { font-size: 13px; color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
dl div:last-child { grid-column: 1 / -1; }
section { margin-top: 56px; }
.key { display: inline-flex; align-items: center; gap: 8px; margin-right: 24px; font-size: 14px; }
.key i { width: 12px; height: 12px; }
i.before, i.after { border-radius: 50%; border: 2px solid var(--grey); }
i.after { background: var(--blue); border-color: var(--blue); }
i.kept { background: var(--blue); } i.gone { background: var(--pale); }
i.worse { background: var(--orange); }
.panels { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 28px 48px;
  margin: 20px 0 24px; }
figure { margin: 0; break-inside: avoid; }
figure.wide { margin-top: 36px; }
figcaption { font-size: 14px; color: var(--soft); margin-bottom: 10px; }
figcaption code, figcaption b { color: var(--ink); font-weight: 600; }
svg { display: block; width: 100%; height: auto; }
text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
text.label { font-size: 13px; fill: var(--ink); }
text.value { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--rule); } .tick { stroke: var(--soft); }
.mean { stroke: var(--ink); stroke-dasharray: 3 3; }
path.line { fill: none; stroke-width: 1.5; }
path.before { stroke: var(--grey); } path.after { stroke: var(--blue); }
circle.before { fill: var(--page); stroke: var(--grey); stroke-width: 1.5; }
circle.after { fill: var(--blue); }
rect.kept { fill: var(--blue); } rect.gone { fill: var(--pale); }
rect.worse { fill: var(--orange); } rect.track { fill: var(--track); }
.ticks { stroke: var(--blue); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 13px; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; font-weight: 400; vertical-align: baseline; }
thead th { vertical-align: bottom; color: var(--soft); }
thead th[colspan] { text-align: center; border-bottom: 1px solid var(--rule); }
tbody th { font: 12px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; text-align: left; }
th:first-child[rowspan], th.name { text-align: left; }
tbody th[rowspan] { font: inherit; font-weight: 600; }
tbody { border-top: 1px solid var(--rule); break-inside: avoid; }
@media screen and (max-width: 760px) { main { padding: 32px 18px; }
  dl, .panels { grid-template-columns: minmax(0, 1fr); } }
@media print { @page { margin: 14mm; } body { font-size: 11pt; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  main { padding: 0; max-width: none; } table { font-size: 8pt; }
  h2, section > p { break-after: avoid; }
  .tiles { grid-template-columns: repeat(3, 1fr); gap: 24px; } .panels { gap: 20px 28px; }
  section { margin-top: 36px; } p, dl div, li { break-inside: avoid; }
  th, td { padding: 2px 5px; } .tiles strong { font-size: 30pt; } .scroll { overflow: visible; } }
"""


def number(x: float, digits: int = 3) -> str:
    """`x` with so many significant digits, small ones with an exponent."""
    if not math.isfinite(x):
        return "n/a"
    if x == 0:
        return "0"
    if abs(x) < 1e-4:
        return f"{x:.{digits - 1}e}"
    return f"{x:#.{digits}g}".removesuffix(".") if abs(x) < 10**digits else f"{x:.0f}"


def percent(x: float, digits: int = 3) -> str:
    """A fraction, in per cent."""
    text = number(100 * x, digits)
    return text if text == "n/a" else f"{text}{SPACE}%"


def decimals(values: Iterable[float]) -> int:
    """Decimals that show three digits of the smallest value; at most six."""
    shown = [x for x in values if 0 < x < math.inf]
    return min(6, max(1, 2 - math.floor(math.log10(min(shown))))) if shown else 1


def fixed(x: float, places: int) -> str:
    """`x` with so many decimals, or a dash for what is no number."""
    return f"{x:.{places}f}" if math.isfinite(x) else DASH


def count_text(n: int) -> str:
    """As in 6.05 billion."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if n >= size:
            return f"{number(n / size)} {word}"
    return str(n)


def bytes_text(n: int) -> str:
    """As in 3.45 GB."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n >= size:
            return f"{number(n / size)}{SPACE}{unit}"
    return f"{n}{SPACE}B"


@dataclass(frozen=True, slots=True)
class LogAxis:
    """From `low` to `high`, with labels at `ticks`."""

    low: float
    high: float
    ticks: list[float]

    @classmethod
    def around(cls, values: Iterable[float]) -> LogAxis:
        """The smallest axis with round ends that holds all values which have a logarithm."""
        shown = [x for x in values if 0 < x < math.inf]
        low, high = (min(shown), max(shown)) if shown else (1e-3, 1e-2)
        first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
        steps = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
        marks = [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]
        below = max(mark for mark in marks if mark <= low)
        above = min(mark for mark in marks if mark > high)
        ticks = [mark for mark in marks if below <= mark <= above]
        return cls(below, above, ticks[:: -(-len(ticks) // _MAX_LABELS)])

    def share(self, value: float) -> float:
        """Where `value` lies, from 0 at the low end to 1."""
        return math.log(value / self.low) / math.log(self.high / self.low)


def error_panel(
    name: str, axis: LogAxis, before: Sequence[float | None], after: Sequence[float | None] | None
) -> str:
    """Errors over the layers (None: not measured); `after` is None where there was one step."""
    left, right, top, bottom, height = 58, 14, 10, 38, 236
    inner = _PANEL_WIDTH - left - right
    pitch = inner / len(before)

    def x(layer: int) -> float:
        return left + pitch * (layer + 0.5)

    def y(value: float) -> float:
        return height - bottom - (height - bottom - top) * axis.share(value)

    parts = []
    for tick in axis.ticks:
        at = _n(y(tick))
        parts.append(f'<path class="grid" d="M{left} {at}H{_PANEL_WIDTH - right}"/>')
        parts.append(_text(left - 8, y(tick) + 4, f"{100 * tick:g}{SPACE}%", "end"))
    parts += [
        _text(x(layer), height - bottom + 17, str(layer), "middle")
        for layer in range(0, len(before), _every(len(before)))
    ]
    parts.append(_text(_PANEL_WIDTH - right, height - 4, "layer", "end"))
    for series, kind in ((before, "before"), (after, "after")):
        points = [
            (layer, value)
            for layer, value in enumerate(series or ())
            if value is not None and 0 < value < math.inf
        ]
        drawn, last = "", -2
        for layer, value in points:
            drawn += f"{'L' if layer == last + 1 else 'M'}{_n(x(layer))} {_n(y(value))}"
            last = layer
        if drawn:
            parts.append(f'<path class="line {kind}" d="{drawn}"/>')
        parts += [
            f'<circle class="{kind}" cx="{_n(x(layer))}" cy="{_n(y(value))}" r="3.5">'
            f"<title>layer {layer}: {percent(value)}</title></circle>"
            for layer, value in points
        ]
    return _figure(name, _svg(_PANEL_WIDTH, height, f"Output error of {name} by layer", parts))


def step_bars(name: str, steps: Sequence[tuple[str, float]]) -> str:
    """How much of the first step's error each step leaves: its label, and 1 for all of it."""
    left, right, row, top = 188, 132, 32, 24
    most = max([1.0, *(share for _, share in steps)])
    unit = (_PANEL_WIDTH - left - right) / most
    height = top + row * len(steps) + 2
    parts = [
        _text(_PANEL_WIDTH - 62, 12, "left", "end"),
        _text(_PANEL_WIDTH, 12, "change", "end"),
    ]
    previous = None
    for index, (label, share) in enumerate(steps):
        y = top + row * index
        kept = share if previous is None else min(share, previous)
        parts.append(_text(0, y + 18, label, "start", "label"))
        parts.append(_bar("kept", left, y + 4, kept * unit))
        if previous is not None and share < previous:
            parts.append(_bar("gone", left + kept * unit, y + 4, (previous - share) * unit))
        elif previous is not None:
            parts.append(_bar("worse", left + kept * unit, y + 4, (share - previous) * unit))
        left_text = f"{100 * share:.1f}{SPACE}%"
        parts.append(_text(_PANEL_WIDTH - 62, y + 18, left_text, "end", "value"))
        if previous is not None:
            parts.append(_text(_PANEL_WIDTH, y + 18, _points(share - previous), "end"))
        previous = share
    return _figure(name, _svg(_PANEL_WIDTH, height, f"Error left in {name} after each step", parts))


def _figure(name: str, chart: str) -> str:
    caption = f"<code>{escape(name)}</code> {_ROLES.get(name, '')}".rstrip()
    return f"<figure>\n<figcaption>{caption}</figcaption>\n{chart}</figure>\n"


def _bar(kind: str, x: float, y: float, width: float) -> str:
    if width < 0.05:
        return ""
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="20"/>'


def _points(change: float) -> str:
    """A change of a share, in percentage points."""
    text = f"{abs(100 * change):.1f}"
    return f"{'+' if change > 0 else MINUS if text != '0.0' else ''}{text}{SPACE}pt"


@dataclass(frozen=True, slots=True)
class ChannelRow:
    """One layer of a channel map."""

    layer: int
    channels: list[int]
    ratio: float


def channel_map(name: str, rows: Sequence[ChannelRow], width: int, unit: int) -> str:
    """Where each layer's `channels` lie among `width`, and their ratio; labels at k * `unit`."""
    left, strip, bars, top = 40, 770, 836, 26
    bar_width = _MAP_WIDTH - bars - 52
    pitch = 18 if len(rows) <= 12 else 14
    thick = pitch - 3
    bottom = top + pitch * len(rows)
    most = max([1.0, *(row.ratio for row in rows if math.isfinite(row.ratio))])
    parts = [
        _text(0, 12, "layer", "start"),
        _text(left, 12, "channels in FP16", "start"),
        _text(bars, 12, f"their activations, {TIMES} mean", "start"),
    ]
    labelled = range(0, len(rows), 1 if len(rows) <= 48 else 4)
    scale = strip / width
    stroke = max(1.0, 1.3 / scale)  # in channels
    for index, row in enumerate(rows):
        y = top + pitch * index
        if index in labelled:
            parts.append(_text(left - 10, y + thick - 2, str(row.layer), "end"))
        parts.append(f'<rect class="track" x="{left}" y="{y}" width="{strip}" height="{thick}"/>')
        parts.append(
            f'<path class="ticks" stroke-width="{stroke:.2f}" d="{_ticks(row.channels)}" '
            f'transform="translate({left + scale / 2:.3f} {y}) scale({scale:.6f} {thick})"/>'
        )
        if math.isfinite(row.ratio):
            long = _n(bar_width * row.ratio / most)
            parts.append(f'<rect class="gone" x="{bars}" y="{y}" width="{long}" height="{thick}"/>')
        ratio = f"{row.ratio:.1f}{TIMES}" if math.isfinite(row.ratio) else "n/a"
        parts.append(_text(_MAP_WIDTH, y + thick - 2, ratio, "end", "value"))
    mean = _n(bars + bar_width / most)
    parts.append(f'<path class="mean" d="M{mean} {top - 4}V{bottom}"/>')
    parts.append(_text(float(mean), bottom + 12, f"1{TIMES}", "middle"))
    step = unit * max(1, 2 ** math.ceil(math.log2(max(1.0, width / unit / _MAX_LABELS))))
    for channel in range(0, width, step):
        at = left + scale * channel
        parts.append(f'<path class="tick" d="M{_n(at)} {bottom - 3}v4"/>')
        parts.append(_text(at, bottom + 13, str(channel), "middle"))
    return _svg(_MAP_WIDTH, bottom + 18, f"FP16 channels of {name} in each layer", parts)


def _ticks(channels: Sequence[int]) -> str:
    """A stroke of height 1 at each channel; relative moves keep it short."""
    drawn, last = "", 0
    for index, channel in enumerate(channels):
        drawn += f"m{channel - last}-1v1" if index else f"M{channel} 0v1"
        last = channel
    return drawn


def _every(count: int) -> int:
    """The step of labels that shows at most about ten of `count`."""
    return next(step for step in (1, 2, 3, 5, 10, 20, 50, count) if count / step <= _MAX_LABELS)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_n(x)}" y="{_n(y)}"{placed}{named}>{escape(text)}</text>'


def _svg(width: int, height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg viewBox="0 0 {width} {_n(height)}" role="img" aria-label="{escape(label)}">\n'
        f"{body}\n</svg>\n"
    )


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")

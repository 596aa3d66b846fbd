"""quality.html: what quantizing did to a checkpoint, as one page for a person to read.

It needs no network and no script; the same info gives the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from edge_rt.golden import GOLDEN_FILE
from edge_rt.model.gptj import LINEARS, in_features, layer_tensors, outer_tensors
from edge_rt.quant.chart import (
    DASH,
    STYLE,
    TIMES,
    ChannelRow,
    LogAxis,
    bytes_text,
    channel_map,
    count_text,
    decimals,
    error_panel,
    fixed,
    percent,
    step_bars,
)
from edge_rt.quant.report import LinearReport
from edge_rt.quant.store import IMPORTED, QuantInfo

PAGE_FILE = "quality.html"

_ACTIVATIONS = {"ln_1": "Layer norm", "attention": "Attention", "gelu": "GELU"}
_STREAM = (
    "Its channels are those of the residual stream, the same in every layer: a line from top to "
    "bottom is a channel that stands out all the way."
)
_OWN = (
    "The channels are each layer's own: one has nothing to do with that of the same number in "
    "another layer."
)
_UNSAID = """<section>
<h2>What this page does not say</h2>
<p>How well the model still writes. Measure its perplexity, against the original's, on a text that
the calibration has not seen:</p>
<pre>edge-rt eval QUANTIZED --text TEXT --against ORIGINAL</pre>
</section>
"""
_CHOSEN = {
    "activation": "those with the largest mean activation on the calibration text",
    "weight": "those with the largest weights",
    "random": "drawn at random, to compare with",
}
_STEPS = {
    "rtn": ("Round to nearest", "rounds each weight to the nearest of its group's 16 levels"),
    "salient": ("+ salient channels in FP16", "keeps some input channels as they are"),
    "awq": ("+ AWQ scaling", "scales channels by their activations, clips ranges where it helps"),
    "gptq": ("+ GPTQ", "rounds in order, and lets later channels make up for the error so far"),
}


class _Linear(NamedTuple):
    """One linear's report, its layer and its steps in the order in which they were taken."""

    layer: int
    report: LinearReport
    steps: list[str]

    @property
    def before(self) -> float:
        return self.report.output_error[self.steps[0]]

    @property
    def after(self) -> float:
        return self.report.output_error[self.steps[-1]]

    def share(self, step: str) -> float | None:
        """Of the first step's error, what is left after `step`; None where that means nothing."""
        error = self.report.output_error.get(step, math.nan)
        return error / self.before if 0 < self.before < math.inf and error < math.inf else None

    @property
    def left(self) -> float | None:
        return self.share(self.steps[-1])

    @property
    def where(self) -> str:
        return f"layer {self.layer}, <code>{escape(self.report.name)}</code>"


def render(info: QuantInfo) -> str:
    """The page, as text for a UTF-8 file."""
    linears = [
        _Linear(layer, report, sorted(report.output_error, key=_rank))
        for layer, reports in enumerate(info.layers)
        for report in reports
        if report.output_error
    ]
    title = f"Quantization quality {DASH} {escape(info.quantization.recipe)}"
    parts = [
        f"<h1>Quantization quality</h1>\n<p class=lede>{_lede(info)}</p>\n",
        _headline(info, linears) if linears else _unmeasured(info),
        _facts(info),
    ]
    if linears:
        parts += [_meaning(info, linears), _layers(info, linears), _recovered(linears)]
        parts += [_channels(info), _table(info, linears)]
    body = "\n".join([*parts, _UNSAID])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body}</main>\n</body>\n</html>\n"
    )


def _rank(step: str) -> tuple[bool, bool, bool, str]:
    return step.endswith("gptq"), step.startswith("awq"), step != "rtn", step


def _kind(step: str) -> str:
    if step.endswith("gptq"):
        return "gptq"
    return "awq" if step.startswith("awq") else "salient" if step.endswith("salient") else "rtn"


def _unit(info: QuantInfo) -> str:
    """What errors are fractions of: without a bias correction, an output's mean counts too."""
    return "variance" if info.recipe.method == "gptq" else "mean square"


def _lede(info: QuantInfo) -> str:
    model, summary = info.model, info.quantization
    recipe = f"<b>{escape(summary.recipe)}</b>"
    what = f"A GPT-J of {model.n_layer} layers, {model.n_embd} channels wide"
    if summary.recipe == IMPORTED and not any(info.layers):
        return f"{what}, imported as {escape(summary.method.upper())} had quantized it."
    if summary.bits == 16:
        return f"{what}, kept in floating point by the recipe {recipe}."
    return f"{what}, quantized to INT{summary.bits} by the recipe {recipe}."


def _facts(info: QuantInfo) -> str:
    model, summary, recipe = info.model, info.quantization, info.recipe
    measured = any(info.layers)
    shapes = [*outer_tensors(model).values(), *layer_tensors(model).values()]
    sizes = [math.prod(shape) for shape in shapes]
    outer = len(outer_tensors(model))
    parameters = sum(sizes[:outer]) + model.n_layer * sum(sizes[outer:])
    if model.tie_word_embeddings:
        parameters -= model.vocab_size * model.n_embd
    method = f"<code>{escape(summary.method)}</code>"
    fp16 = f"{percent(summary.fp16_fraction)} of the linears' weights"
    if measured:
        method += ", with AWQ" if recipe.awq else ", without AWQ"
        if recipe.outlier_fraction > 0:
            fp16 += f": input channels, {_CHOSEN[recipe.salient]}"
    group = summary.group_size
    sizes_text = f"{model.n_embd} channels ({model.n_inner} in the MLP), {model.n_head} heads"
    facts = [
        ("Model", f"{count_text(parameters)} parameters; {model.n_layer} layers, {sizes_text}"),
        ("Recipe", f"{escape(summary.recipe)}; method {method}"),
        ("Bits", f"{summary.bits}" + (f", in groups of {group} input channels" if group else "")),
        ("FP16 share", fp16),
    ]
    # What an engine reads; not the tokenizer, the golden logits or this page.
    stored = [
        entry.size_bytes
        for name, entry in info.files.items()
        if name.endswith(".safetensors") and name != GOLDEN_FILE
    ]
    if stored:
        halves = f"{bytes_text(2 * parameters)} as FP16"
        facts.append(("Stored size", f"{bytes_text(sum(stored))}; {halves} throughout"))
    text = recipe.calibration
    if measured:
        shown = f"{text.sequences} sequences of {min(text.tokens, model.n_positions)} tokens"
        facts.append(("Calibration", f"{shown} from {escape(text.text)}, seed {text.seed}"))
    digest = summary.calibration_sha256
    unused = "none: no text was used" if summary.bits == 16 else "unknown: quantized elsewhere"
    hashed = f"<code>{escape(digest)}</code>" if digest else unused
    facts.append(("Written by", f"edge_rt {escape(info.edge_rt_version)}"))
    facts.append(("SHA-256 of the calibration text", hashed))
    rows = "\n".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts)
    return f"<dl>\n{rows}\n</dl>\n"


def _headline(info: QuantInfo, linears: Sequence[_Linear]) -> str:
    unit = _unit(info)
    median = statistics.median(one.after for one in linears)
    worst = max(linears, key=lambda one: one.after)
    size = (
        percent(median, 2),
        f"of the outputs' {unit} is the error that rounding leaves in the median linear",
    )
    largest = (percent(worst.after, 2), f"is the largest error left: {worst.where}")
    shares = [(one.left, one) for one in linears if one.left is not None]
    if all(len(one.steps) == 1 for one in linears):
        return _tiles(size, largest) + (
            "<p>The recipe rounds to nearest and takes no further step, so there is nothing to "
            "compare these errors with.</p>\n"
        )
    if not shares:
        return _tiles(size, largest)
    most, where = max(shares, key=lambda pair: pair[0])
    middle = statistics.median(share for share, _ in shares)
    return _tiles(
        (percent(middle, 2), "of round-to-nearest's error is left in the median linear"),
        (percent(most, 2), f"of it is left in the worst linear: {where.where}"),
        (size[0], f"{size[1]}; at most {largest[0]} ({worst.where})"),
    )


def _tiles(*tiles: tuple[str, str]) -> str:
    shown = "\n".join(f"<p><strong>{value}</strong> {text}</p>" for value, text in tiles)
    return f"<div class=tiles>\n{shown}\n</div>\n"


def _unmeasured(info: QuantInfo) -> str:
    if info.recipe.method == "float" and info.quantization.bits == 16:
        why = "the recipe keeps every weight as it is, so there is no rounding error."
    elif info.quantization.recipe == IMPORTED:
        why = (
            "the checkpoint was quantized elsewhere. edge_rt took over its integers and scales as "
            "they are, and has no original weights to compare them with."
        )
    else:
        why = "the checkpoint holds no reports of its linears."
    return f"<p class=note><b>Nothing was measured:</b> {why}</p>\n"


def _meaning(info: QuantInfo, linears: Sequence[_Linear]) -> str:
    unit = _unit(info)
    text = (
        "<b>What is measured.</b> The output error is what rounding adds to a linear's outputs on "
        f"the calibration text: its mean square, as a fraction of the outputs' {unit}."
    )
    if any(one.steps[-1].endswith("gptq") for one in linears):
        text += (
            " GPTQ's target is not quite the original weight: it also makes up for the errors of "
            "earlier layers, and the last step's error is the distance from that target."
        )
    return f"<p class=note>{text}</p>\n"


def _layers(info: QuantInfo, linears: Sequence[_Linear]) -> str:
    compares = any(len(one.steps) > 1 for one in linears)
    axis = LogAxis.around([x for one in linears for x in (one.before, one.after)])
    panels = ""
    for name in _names(linears):
        before: list[float | None] = [None] * len(info.layers)
        after = list(before)
        for one in linears:
            if one.report.name == name:
                before[one.layer], after[one.layer] = one.before, one.after
        panels += error_panel(name, axis, before, after if compares else None)
    last = _label(max((one.steps[-1] for one in linears), key=_rank)).removeprefix("+ ")
    key = "<span class=key><i class=before></i>round to nearest</span>"
    if compares:
        key += f" <span class=key><i class=after></i>after the last step ({last})</span>"
    return (
        "<section>\n<h2>Error by layer</h2>\n"
        f"<p>Output error as a share of the outputs' {_unit(info)}, on one logarithmic scale for "
        f"all four linears; lower is better.</p>\n<p>{key}</p>\n"
        f"<div class=panels>\n{panels}</div>\n</section>\n"
    )


def _recovered(linears: Sequence[_Linear]) -> str:
    present = {step for one in linears for step in one.steps}
    steps = sorted(present, key=_rank)
    if len(steps) == 1:
        return ""
    panels = ""
    for name in _names(linears):
        of_name = [one for one in linears if one.report.name == name]
        bars = []
        for step in steps:
            shares = [share for one in of_name if (share := one.share(step)) is not None]
            if shares:
                bars.append((_label(step), statistics.fmean(shares)))
        panels += step_bars(name, bars)
    added = " <span class=key><i class=worse></i>added by the step</span>"
    added = added if 'class="worse"' in panels else ""
    terms = "\n".join(
        f"<li><b>{_label(step)}</b> (<code>{escape(step)}</code>) {_STEPS[_kind(step)][1]}.</li>"
        for step in steps
    )
    return (
        "<section>\n<h2>What each step recovers</h2>\n"
        "<p>The error left after each step as a share of round-to-nearest's, mean over the layers; "
        "the change is in percentage points.</p>\n"
        "<p><span class=key><i class=kept></i>left</span> "
        "<span class=key><i class=gone></i>recovered by the step</span>"
        f"{added}</p>\n"
        f"<div class=panels>\n{panels}</div>\n<ul>\n{terms}\n</ul>\n</section>\n"
    )


def _channels(info: QuantInfo) -> str:
    head = "<section>\n<h2>Which channels stay in FP16</h2>\n"
    if not any(report.salient for reports in info.layers for report in reports):
        return f"{head}<p>None: the recipe's <code>outlier_fraction</code> is 0.</p>\n</section>\n"
    maps = ""
    for reads in dict.fromkeys(spec.reads for spec in LINEARS):
        specs = {spec.name: spec for spec in LINEARS if spec.reads == reads}
        rows = []
        for layer, reports in enumerate(info.layers):
            one = next((report for report in reports if report.name in specs), None)
            if one is not None:
                rows.append(ChannelRow(layer, one.salient, one.magnitude_ratio))
        width = in_features(next(iter(specs.values())), info.model)
        about = _STREAM + _repeated(rows) if reads == "ln_1" else _OWN
        unit = 64
        if reads == "attention":
            unit = info.model.head_size
            about += f" A head has {unit} of them."
        readers = " and ".join(f"<code>{name}</code>" for name in specs)
        maps += (
            f"<figure class=wide>\n<figcaption><b>{_ACTIVATIONS[reads]}</b>, read by {readers}; "
            f"{width} channels<br>{about}</figcaption>\n"
            f"{channel_map(reads, rows, width, unit)}</figure>\n"
        )
    return (
        f"{head}<p>Each mark is an input channel that is not rounded: "
        f"{_CHOSEN[info.recipe.salient]}. The bars say how large its channels' activations are: "
        f"mean |activation| of those in FP16, over that of all channels.</p>\n{maps}</section>\n"
    )


def _repeated(rows: Sequence[ChannelRow]) -> str:
    """Says which channels are marked in half of the layers or more."""
    if len(rows) < 4:
        return ""
    counts = Counter(channel for row in rows for channel in row.channels)
    often = [(c, n) for c, n in counts.items() if 2 * n >= len(rows)]
    if not often:
        return " No channel is marked in half of the layers."
    often.sort(key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{channel} ({count})" for channel, count in often[:8])
    more = f" and {len(often) - 8} more" if len(often) > 8 else ""
    return f" Marked in at least half of the layers (in how many): {shown}{more}."


def _table(info: QuantInfo, linears: Sequence[_Linear]) -> str:
    steps = sorted({step for one in linears for step in one.steps}, key=_rank)
    errors = [100 * x for one in linears for x in one.report.output_error.values()]
    places = decimals(errors)
    moved = " GPTQ moves weights on purpose: more change here can be less error in the outputs."
    moved = moved if steps[-1].endswith("gptq") else ""
    heads = "".join(f"<th>{_label(s)}<br><code>{escape(s)}</code></th>" for s in steps)
    body = ""
    for layer in sorted({one.layer for one in linears}):
        of_layer = [one for one in linears if one.layer == layer]
        body += "<tbody>\n"
        for index, one in enumerate(of_layer):
            report = one.report
            first = f"<th rowspan={len(of_layer)}>{layer}</th>" if index == 0 else ""
            values = [fixed(100 * report.output_error.get(s, math.nan), places) for s in steps]
            left = math.nan if one.left is None else 100 * one.left
            alpha = DASH if report.awq_alpha is None else f"{report.awq_alpha:.2f}"
            kept = len(report.salient)
            ratio = fixed(report.magnitude_ratio, 1) if kept else DASH
            values += [fixed(left, 1), fixed(100 * report.weight_error, 1), alpha]
            cells = "".join(f"<td>{value}</td>" for value in (*values, str(kept), ratio))
            body += f"<tr>{first}<th>{escape(report.name)}</th>{cells}</tr>\n"
        body += "</tbody>\n"
    return (
        "<section>\n<h2>All numbers</h2>\n"
        "<ul>\n<li><b>Output error</b> after each step, in % of the outputs' "
        f"{_unit(info)}, measured on at most 1024 outputs.</li>\n"
        "<li><b>Left</b>: the last step's error, in % of round-to-nearest's.</li>\n"
        "<li><b>Weight change</b>: the Frobenius norm of what changed in the weights, in % of "
        f"theirs.{moved}</li>\n"
        "<li><b>AWQ alpha</b>: channels are scaled by their mean activation to this power; 0 "
        "leaves them as they are.</li>\n"
        f"<li><b>FP16 channels</b>, and their mean |activation| as a multiple ({TIMES}) of all "
        "channels'.</li>\n</ul>\n"
        "<div class=scroll><table>\n<thead>\n"
        f"<tr><th rowspan=2>Layer</th><th rowspan=2 class=name>Linear</th><th colspan={len(steps)}>"
        "Output error, %</th><th rowspan=2>Left, %</th><th rowspan=2>Weight change, %</th>"
        "<th rowspan=2>AWQ alpha</th><th rowspan=2>FP16 channels</th>"
        f"<th rowspan=2>{TIMES} mean</th></tr>\n<tr>{heads}</tr>\n</thead>\n{body}"
        "</table></div>\n</section>\n"
    )


def _names(linears: Sequence[_Linear]) -> list[str]:
    """The linears' names, the model's own order first."""
    present = dict.fromkeys(one.report.name for one in linears)
    known = [spec.name for spec in LINEARS if spec.name in present]
    return known + [name for name in present if name not in known]


def _label(step: str) -> str:
    return _STEPS[_kind(step)][0]

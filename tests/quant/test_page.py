"""The quality page: well-formed, complete, escaped, and right for every kind of recipe."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from edge_rt.bundle import QuantizationSummary
from edge_rt.model.gptj import LINEARS, ModelConfig, in_features
from edge_rt.quant.chart import LogAxis, channel_map, error_panel, number, percent, step_bars
from edge_rt.quant.page import render
from edge_rt.quant.report import LinearReport
from edge_rt.quant.salient import salient_count
from edge_rt.quant.store import QuantInfo
from edge_rt.recipes import CalibrationText, QuantRecipe
from edge_rt.storage import FileEntry

ALL_STEPS = ("rtn", "rtn_salient", "awq_salient", "awq_salient_gptq")
SMALL = ModelConfig(
    n_embd=384,
    n_layer=4,
    n_head=6,
    n_inner=1536,
    rotary_dim=32,
    vocab_size=3072,
    n_positions=512,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=False,
    eos_token_id=0,
)
GPTJ_6B = replace(
    SMALL, n_embd=4096, n_layer=28, n_head=16, n_inner=16384, vocab_size=50400, n_positions=2048
)
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers the table's rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def made(
    config: ModelConfig = SMALL,
    recipe: QuantRecipe | None = None,
    steps: tuple[str, ...] = ALL_STEPS,
    name: str = "own",
) -> QuantInfo:
    recipe = recipe or QuantRecipe()
    rng = np.random.default_rng(0)
    layers = []
    for _ in range(config.n_layer):
        reports = []
        for spec in LINEARS:
            width = in_features(spec, config)
            count = salient_count(width, recipe.outlier_fraction)
            errors = sorted(rng.uniform(0.001, 0.03, len(steps)).tolist(), reverse=True)
            reports.append(
                LinearReport(
                    name=spec.name,
                    output_error=dict(zip(steps, errors, strict=True)),
                    weight_error=float(rng.uniform(0.1, 0.3)),
                    awq_alpha=float(rng.integers(20)) / 20 if recipe.awq else None,
                    salient=sorted(rng.choice(width, count, replace=False).tolist()),
                    magnitude_ratio=float(rng.uniform(1.5, 12)) if count else 0.0,
                )
            )
        layers.append(reports)
    summary = QuantizationSummary(name, recipe.method, 4, recipe.group_size, 0.0104, "5a" * 32)
    files = {
        "outer.safetensors": FileEntry("0", 7_000_000),
        "golden.safetensors": FileEntry("1", 9),
    }
    return QuantInfo(config, recipe, summary, "0.1.0", layers, files)


def unmeasured(summary: QuantizationSummary, recipe: QuantRecipe) -> QuantInfo:
    return replace(made(recipe=recipe), layers=[[]] * SMALL.n_layer, quantization=summary)


FLOAT = unmeasured(
    QuantizationSummary("float", "float", 16, None, 1.0, None), QuantRecipe(method="float")
)
IMPORTED = unmeasured(QuantizationSummary("imported", "awq", 4, 64, 0.0, None), QuantRecipe())
INFOS = {
    "full": made(),
    "one layer": made(replace(SMALL, n_layer=1)),
    "many layers": made(replace(SMALL, n_layer=70)),
    "rtn": made(recipe=QuantRecipe("rtn", awq=False, outlier_fraction=0.0), steps=("rtn",)),
    "rtn salient": made(recipe=QuantRecipe("rtn", awq=False), steps=("rtn", "rtn_salient")),
    "no awq": made(recipe=QuantRecipe(awq=False), steps=("rtn", "rtn_salient", "rtn_salient_gptq")),
    "no salient": made(recipe=QuantRecipe(outlier_fraction=0.0), steps=("rtn", "awq", "awq_gptq")),
    "random": made(recipe=QuantRecipe(salient="random")),
    "float": FLOAT,
    "imported": IMPORTED,
}


def words(page: str) -> str:
    body = page[page.index("<body>") :]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


@pytest.mark.parametrize("info", INFOS.values(), ids=INFOS.keys())
def test_every_recipe_gives_a_well_formed_page_of_its_own(info: QuantInfo) -> None:
    page = render(info)
    assert Page(page).tags.isdisjoint({"script", "img", "link", "iframe", "object"})
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        for node in ET.fromstring(chart).iter():  # noqa: S314
            assert "nan" not in " ".join(node.attrib.values()).lower()
    assert page.count("<svg") == page.count("</svg>")
    for reference in ("http", "src=", "href=", "url(", "@import"):
        assert reference not in page
    assert "edge-rt eval QUANTIZED --text TEXT --against ORIGINAL" in page


def test_the_same_info_gives_the_same_bytes_as_read_back_from_json() -> None:
    info = made()
    by_name = [
        [replace(r, output_error=dict(sorted(r.output_error.items()))) for r in layer]
        for layer in info.layers
    ]
    assert render(info) == render(made()) == render(replace(info, layers=by_name))


@pytest.mark.parametrize("kind", ["full", "rtn", "no awq", "no salient"])
def test_the_table_has_every_layer_and_linear_with_its_numbers(kind: str) -> None:
    info = INFOS[kind]
    rows = Page(render(info)).rows[2:]
    layer = -1
    found = []
    for row in rows:
        if re.fullmatch(r"\d+", row[0]):
            layer = int(row.pop(0))
        found.append((layer, *row))
    expected = []
    for index, reports in enumerate(info.layers):
        for report in reports:
            errors = list(report.output_error.values())
            least = min(min(r.output_error.values()) for rs in info.layers for r in rs)
            places = 2 - int(np.floor(np.log10(100 * least)))
            expected.append(
                (
                    index,
                    report.name,
                    *(f"{100 * error:.{places}f}" for error in errors),
                    f"{100 * errors[-1] / errors[0]:.1f}",
                    f"{100 * report.weight_error:.1f}",
                    "\u2013" if report.awq_alpha is None else f"{report.awq_alpha:.2f}",
                    str(len(report.salient)),
                    f"{report.magnitude_ratio:.1f}" if report.salient else "\u2013",
                )
            )
    assert found == expected


def test_the_headline_compares_with_round_to_nearest() -> None:
    info = made()
    reports = [(i, r) for i, layer in enumerate(info.layers) for r in layer]
    left = [r.output_error["awq_salient_gptq"] / r.output_error["rtn"] for _, r in reports]
    layer, worst = reports[int(np.argmax(left))]
    text = words(render(info)).replace("\u00a0", " ")
    assert f"{100 * np.median(left):.2g} % of round-to-nearest's error is left" in text
    assert (
        f"{100 * max(left):.2g} % of it is left in the worst linear: layer {layer}, {worst.name}"
    ) in text


def test_the_summary_says_what_was_done() -> None:
    text = words(render(made())).replace("\u00a0", " ")
    # Linears 4 * 4 * 384^2 + 4 * 2 * 384 * 1536, embedding and head 2 * 3072 * 384, and vectors.
    assert "9.45 million parameters; 4 layers, 384 channels (1536 in the MLP), 6 heads" in text
    assert "4, in groups of 128 input channels" in text
    assert "1.04 % of the linears' weights" in text
    assert "128 sequences of 512 tokens from calibration.txt, seed 0" in text
    assert "5a" * 32 in text
    assert "7.00 MB; 18.9 MB as FP16 throughout" in text
    tied = replace(SMALL, tie_word_embeddings=True)
    assert "8.27 million parameters" in words(render(made(tied)))


def test_steps_recover_what_the_means_say() -> None:
    info = made()
    shares = {
        step: np.mean([layer[0].output_error[step] / layer[0].output_error["rtn"] for layer in
                       info.layers])
        for step in ALL_STEPS
    }  # fmt: skip
    page = render(info)
    panel = page[page.index("What each step recovers") :].split("</figure>")[0]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", panel)
    assert [t for t in texts if re.fullmatch(r"[\d.]+\u00a0%", t)] == [
        f"{100 * share:.1f}\u00a0%" for share in shares.values()
    ]


def test_a_step_that_adds_error_is_shown_as_such() -> None:
    assert 'class="worse"' not in render(made())
    bars = step_bars("attn_out", [("first", 1.0), ("second", 1.25), ("third", 0.5)])
    assert bars.count('class="worse"') == bars.count('class="gone"') == 1
    assert "+25.0\u00a0pt" in bars
    assert "\u221275.0\u00a0pt" in bars


def test_marks_lie_at_the_salient_channels() -> None:
    info = made()
    page = render(info)
    paths = re.findall(r'class="ticks"[^>]* d="([^"]*)"', page)
    assert len(paths) == 3 * SMALL.n_layer
    drawn = []
    for path in paths:
        moves = [int(x) for x in re.findall(r"[Mm](-?\d+)", path)]
        drawn.append(np.cumsum(moves).tolist())
    by_activation = [[layer[i].salient for layer in info.layers] for i in (0, 2, 3)]
    assert drawn == [salient for layers in by_activation for salient in layers]


def test_names_from_outside_are_escaped() -> None:
    evil = '<script>alert("1")</script>&'
    info = made(name=evil, recipe=QuantRecipe(calibration=CalibrationText(text=evil)))
    layers = [[replace(r, name=r.name + evil) for r in layer] for layer in info.layers]
    steps = {"rtn": 0.2, evil: 0.1}
    layers[0] = [replace(layers[0][0], output_error=steps)]
    summary = replace(info.quantization, method=evil, calibration_sha256=evil)
    for one in (
        info,
        replace(info, layers=layers, quantization=summary, edge_rt_version=evil),
        replace(IMPORTED, quantization=replace(IMPORTED.quantization, method=evil)),
        replace(FLOAT, quantization=replace(FLOAT.quantization, recipe=evil)),
    ):
        page = render(one)
        assert "script" not in Page(page).tags
        assert "<script" not in page.lower()
        for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            ET.fromstring(chart)  # noqa: S314
    assert "&lt;script&gt;" in render(info)


def test_gptj_6b_fits_in_200_kb() -> None:
    page = render(made(GPTJ_6B))
    assert len(page.encode()) < 200_000
    assert "6.05 billion parameters" in page


def test_what_was_not_measured_is_said_and_why() -> None:
    assert "Nothing was measured: the recipe keeps every weight" in words(render(FLOAT))
    assert "Nothing was measured: the checkpoint was quantized elsewhere" in words(render(IMPORTED))
    for info in (FLOAT, IMPORTED):
        assert "<table" not in render(info)
        assert "<svg" not in render(info)
    assert "takes no further step" in words(render(INFOS["rtn"]))
    assert "outlier_fraction is 0" in words(render(INFOS["no salient"]))
    assert "the outputs' mean square" in words(render(INFOS["rtn"]))
    assert "the outputs' variance" in words(render(INFOS["full"]))


@pytest.mark.parametrize("error", [0.0, float("nan"), float("inf")])
def test_errors_without_a_logarithm_do_no_harm(error: float) -> None:
    info = made()
    broken = replace(info.layers[1][0], output_error=dict.fromkeys(ALL_STEPS, error))
    layers = [info.layers[0], [broken, *info.layers[1][1:]], *info.layers[2:]]
    for one in (replace(info, layers=layers), replace(info, layers=[[broken]])):
        page = render(one)
        Page(page)
        for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            assert 'x="nan"' not in chart
            ET.fromstring(chart)  # noqa: S314


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.003, 0.02], 0.002, 0.05),
        ([0.01], 0.01, 0.02),
        ([1e-7, 0.5], 1e-7, 1.0),
        ([], 1e-3, 2e-2),
    ],
)
def test_axes_end_at_round_numbers(values: list[float], low: float, high: float) -> None:
    axis = LogAxis.around(values)
    assert (axis.low, axis.high) == (low, high)
    assert len(axis.ticks) <= 10
    assert all(0 <= axis.share(value) <= 1 for value in values)


def test_gaps_interrupt_the_line() -> None:
    panel = error_panel("x", LogAxis.around([0.01, 0.02]), [0.01, None, 0.02, 0.01], None)
    (line,) = re.findall(r'class="line before" d="([^"]*)"', panel)
    assert re.sub(r"[\d. ]", "", line) == "MML"
    assert panel.count("<circle") == 3


def test_a_map_of_no_channels() -> None:
    chart = channel_map("x", [], 64, 64)
    ET.fromstring(chart)  # noqa: S314


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00001234, "1.23e-05"), (0.1, "0.100"), (99.96, "100"), (123.4, "123"),
     (1234.0, "1234"), (float("nan"), "n/a")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
    assert percent(0.0123) == "1.23\u00a0%"

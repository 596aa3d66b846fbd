"""The picture of a measurement, and what its memory bound is made of."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from edge_rt.bench import bandwidth, plot
from edge_rt.bench.plot import Picture
from edge_rt.bench.sweep import Point
from edge_rt.bundle import Bundle
from edge_rt.errors import MissingLibraryError

PICTURE = Picture(
    title="edge-rt bench offline: some.bundle, engine ort",
    subtitle="2026-01-01 00:00 UTC",
    latency_ms=[float(value) for value in range(1, 101)],
    ttft_ms=[float(value) / 4 for value in range(1, 101)],
    points=[Point(1, 100.0, 4.0), Point(2, 180.0, 5.0), Point(4, 300.0, 7.5)],
    weights_bytes=20_000_000,
    memory_gb_s=10.0,
    warnings=["the load average was 3.0 on 2 cores before the run: something else is running"],
)


def test_three_panels_show_what_was_measured() -> None:
    figure = plot.figure(PICTURE)
    latency, throughput, decode = figure.axes
    texts = {text.get_text() for text in latency.texts}
    assert texts == {"p50  51.0 ms", "p90  91.0 ms", "p99  100 ms"}
    (rates,) = throughput.lines
    assert np.array_equal(rates.get_xydata(), [[1, 100], [2, 180], [4, 300]])
    measured, bound = decode.lines
    assert np.array_equal(measured.get_xydata(), [[1, 4.0], [2, 5.0], [4, 7.5]])
    assert set(bound.get_ydata()) == {2.0}  # 20 MB at 10 GB/s
    assert "20.0 MB of weights once: 2.00 ms\nat 10.0 GB/s" in bound.get_label()
    written = [text.get_text() for text in figure.texts]
    assert written[:2] == [PICTURE.title, PICTURE.subtitle]
    assert written[2] == f"Warning: {PICTURE.warnings[0]}"


def test_an_engine_without_weights_or_decode_steps_is_drawn_too() -> None:
    bare = dataclasses.replace(PICTURE, weights_bytes=0, points=[Point(1, 100.0, None)])
    decode = plot.figure(bare).axes[2]
    labels = [text.get_text() for text in decode.get_legend().get_texts()]
    assert labels == ["no step decoded a whole batch", "this engine has no weights to read"]


def test_the_file_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    plot.save(PICTURE, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as image:
        assert image.format == "PNG"
        assert image.size[0] >= 2000
        pixels = np.asarray(image.convert("L"))
    for panel in np.array_split(pixels, 3, axis=1):
        assert (panel < 128).mean() > 0.005  # none of them is blank


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingLibraryError, match=r"pip install matplotlib .*extra 'plot'"):
        plot.figure(PICTURE)


def test_a_step_reads_all_weights_but_the_embedding(demo_bundle: Callable[[str], Path]) -> None:
    path = demo_bundle("demo.cpu")
    model = onnx.load(str(path / "model.onnx"), load_external_data=False)
    stored = {
        tensor.name: int(entry.value)
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    }
    read = sum(size for name, size in stored.items() if name != "wte.weight")
    # The files hold small tensors, names and padding to pages besides.
    assert read <= bandwidth.weights_bytes(Bundle.load(path)) < 1.02 * read + 4096 * len(stored)
    assert bandwidth.weights_bytes(Bundle.load(demo_bundle("demo.null"))) == 0


def test_the_memory_delivers_something() -> None:
    assert 0.01 < bandwidth.memory_gb_s(8 << 20) < 100_000

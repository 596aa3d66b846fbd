"""tools/quality: its tables against plain formulations, and a run of the whole at small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_rt.bench import quality
from edge_rt.bench.quality import VARIANTS, Study, Task, main, score, table, tasks
from edge_rt.errors import ConfigError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.store import QuantizedCheckpoint
from edge_rt.recipes import data_dir


def test_a_table_against_plain_arithmetic() -> None:
    rng = np.random.default_rng(1)
    fp16 = rng.normal(2.0, 0.3, 400)
    rtn = fp16 + rng.normal(0.02, 0.01, 400)
    better = [fp16 + rng.normal(0.005, 0.01, 400) for _ in range(3)]
    found = table(fp16, {"rtn": [rtn], "better": better})
    base, lost = np.exp(fp16.mean()), np.exp(rtn.mean()) - np.exp(fp16.mean())
    mean = np.mean([np.exp(one.mean()) for one in better])
    assert found["perplexity"]["fp16"] == pytest.approx(base)
    assert found["perplexity"]["better"] == pytest.approx(mean)
    assert found["loss"]["rtn"] == pytest.approx(lost)
    assert found["recovered"]["better"] == pytest.approx(1 - (mean - base) / lost)
    assert found["recovered"]["rtn"] == 0.0
    low, high = found["loss"]["rtn_ci95"]
    assert low < lost < high
    # Paired: what all variants share does not widen the interval of a difference. By the delta
    # method its half width is 1.96 standard errors of base * (rtn - fp16).
    expected = 2 * 1.96 * base * (rtn - fp16).std() / np.sqrt(400)
    assert high - low == pytest.approx(expected, rel=0.2)
    low, high = found["perplexity"]["rtn_ci95"]
    assert high - low == pytest.approx(2 * 1.96 * base * rtn.std() / np.sqrt(400), rel=0.2)


def test_every_variant_has_its_seeds_and_what_has_none_is_made_once(tmp_path: Path) -> None:
    study = Study(tmp_path, tmp_path, tmp_path, seeds=5)
    todo = tasks(study, 4)
    count = {name: sum(task.name == name for task in todo) for name in VARIANTS}
    assert count.pop("rtn") == count.pop("rtn_salient_by_weight") == 1
    assert set(count.values()) == {5}


def test_no_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 seed or more, found 0"):
        Study(tmp_path, tmp_path, tmp_path, seeds=0)


def test_the_whole_at_small_size(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("rtn", "rtn_salient_random", "awq_salient_gptq")
    monkeypatch.setattr(quality, "VARIANTS", {name: VARIANTS[name] for name in parts})
    file = tmp_path / "quality.json"
    arguments = ["--tokens", "1100", "--seeds", "1", "--sequences", "2", "--bits", "3"]
    assert main([*arguments, "--workers", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["bits"] == 3
    assert found["predicted_tokens"] == 2 * 511
    assert set(found["perplexity"]) == {
        name + part for name in ("fp16", *parts) for part in ("", "_ci95")
    }
    # 4 of 384 and 16 of 1,536 channels
    assert found["fp16_fraction"] == pytest.approx(4 / 384)
    perplexity = found["perplexity"]
    assert perplexity["fp16"] < perplexity["awq_salient_gptq"] < perplexity["rtn"]
    assert "rtn_salient_random" in capsys.readouterr().out


def test_a_fault_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--checkpoint", str(tmp_path / "nowhere"), "--workers", "1"]) == 1
    assert capsys.readouterr().err.startswith("tools/quality: ")


def test_a_variant_is_what_edge_rt_quantize_writes(
    demo_checkpoint: Path, demo_quantized: Path, small_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that the study scores, made in memory, is the one that is stored."""
    monkeypatch.setattr(quality, "WINDOW", 128)
    texts = [data_dir("calib") / f"{name}.txt" for name in ("calibration", "heldout")]
    study = Study(demo_checkpoint, *texts, seeds=1, sequences=8, tokens=1024)
    in_memory = score(study, Task("awq_salient_gptq", 4, 0))
    stored = QuantizedCheckpoint.open(demo_quantized)
    config = Checkpoint.open(demo_checkpoint).config
    heldout = quality.text_tokens(texts[1], demo_checkpoint, config)[:1024]
    cut = quality.windows(heldout, 512)
    device = quality.Device.open()
    found = quality.score_model(quality_model(stored), cut, device)
    np.testing.assert_allclose(found.nll / 511, in_memory, rtol=1e-6)


def quality_model(stored: QuantizedCheckpoint) -> quality.FloatModel:
    return quality.FloatModel(stored.info.model, stored.embedding, stored.layer, stored.head)

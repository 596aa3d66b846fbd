from pathlib import Path

import pytest

from edge_rt import recipes
from edge_rt.errors import ConfigError
from edge_rt.recipes import CalibrationText, EngineRecipe, NullOptions, OrtOptions, QuantRecipe


@pytest.mark.parametrize("name", recipes.names("engines"))
def test_shipped_engine_recipe_loads(name: str) -> None:
    assert isinstance(recipes.engine(name), EngineRecipe)


@pytest.mark.parametrize("name", recipes.names("calib"))
def test_shipped_quantization_recipe_loads(name: str) -> None:
    recipe, text = recipes.quantization(name)
    assert isinstance(recipe, QuantRecipe)
    assert text == recipes.data_dir("calib") / recipe.calibration.text


def test_the_demo_is_shipped() -> None:
    assert {"demo.cpu", "demo.cpu-exact", "demo.null"} <= set(recipes.names("engines"))
    assert {"demo", "float", "int4", "int4-salient"} <= set(recipes.names("calib"))


def test_recipe_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('engine = "null"\nmax_batch = 2\n[null]\nstep_ms = 1\n')
    recipe = recipes.engine(str(file))
    assert recipe == EngineRecipe("null", max_batch=2, null=NullOptions(step_ms=1.0))


def test_calibration_text_lies_beside_its_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[calibration]\ntext = "mine.txt"\n')
    assert recipes.quantization(str(file))[1] == tmp_path / "mine.txt"


def test_mistyped_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'demo\.cpi'; did you mean 'demo\.cpu'\?"):
        recipes.engine("demo.cpi")


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"no recipe 'zzz' \(shipped: demo, float, int4, int4-salient"
    ):
        recipes.quantization("zzz")


def test_absent_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml does not exist"):
        recipes.engine(str(tmp_path / "absent.toml"))


def test_fault_in_a_recipe_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('engine = "ort"\n[ort]\nacuracy_level = 4\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: ort: .*did you mean 'accuracy_level'"):
        recipes.engine(str(file))


def test_unknown_engine_lists_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('engine = "tpu"\n')
    with pytest.raises(ConfigError, match="engine: 'tpu' is not one of 'ort', 'null'"):
        recipes.engine(str(file))


def test_installation_without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "edge_rt" / "recipes.py"))
    with pytest.raises(ConfigError, match="no engines/ folder; reinstall"):
        recipes.names("engines")


def test_a_recipe_of_the_other_command_is_named() -> None:
    with pytest.raises(ConfigError, match="no recipe 'int4': that is a recipe of edge-rt quantize"):
        recipes.engine("int4")
    with pytest.raises(ConfigError, match=r"'demo\.cpu': that is a recipe of edge-rt build"):
        recipes.quantization("demo.cpu")


@pytest.mark.parametrize("batch", [0, -1, recipes.MAX_BATCH + 1])
def test_max_batch_out_of_range(batch: int) -> None:
    with pytest.raises(ConfigError, match=f"max_batch must be 1 to 16 requests, found {batch}"):
        EngineRecipe("null", max_batch=batch)


@pytest.mark.parametrize("rows", [0, 7, recipes.MAX_ROWS + 1])
def test_max_rows_out_of_range(rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_rows must be max_batch \(8\) to 64, found {rows}"):
        EngineRecipe("null", max_rows=rows)


def test_rows_are_as_many_as_requests_unless_said_otherwise() -> None:
    assert EngineRecipe("null", max_batch=3).rows == 3
    assert EngineRecipe("null", max_batch=3, max_rows=5).rows == 5


def test_max_context_out_of_range() -> None:
    with pytest.raises(ConfigError, match="max_context must be 2 tokens or more, found 1"):
        EngineRecipe("null", max_context=1)


def test_prefill_chunk_out_of_range() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk must be 1 or more, found 0"):
        EngineRecipe(engine="null", prefill_chunk=0)


def test_a_step_must_hold_a_chunk_beside_a_full_batch() -> None:
    EngineRecipe(engine="null", max_batch=8, prefill_chunk=64, max_tokens_per_step=72)
    with pytest.raises(ConfigError, match=r"prefill_chunk \+ max_rows \(72\), found 71"):
        EngineRecipe(engine="null", max_batch=8, prefill_chunk=64, max_tokens_per_step=71)


def test_engine_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="threads must be 0"):
        OrtOptions(threads=-1)
    with pytest.raises(ConfigError, match="must not be negative"):
        NullOptions(step_ms=-1.0)
    with pytest.raises(ConfigError, match="must not be negative"):
        NullOptions(row_ms=-1.0)


@pytest.mark.parametrize("fraction", [-0.01, 0.51])
def test_outlier_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ConfigError, match=f"outlier_fraction must be 0 to 0.5, found {fraction}"):
        QuantRecipe(outlier_fraction=fraction)


@pytest.mark.parametrize(("sequences", "tokens"), [(0, 256), (64, 1)])
def test_calibration_out_of_range(sequences: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"found {sequences} of {tokens}"):
        CalibrationText(sequences=sequences, tokens=tokens)

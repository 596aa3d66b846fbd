"""The ONNX Runtime engine: a request is answered the same alone and in any company."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fakes.checks import GREEDY, Collected
from fakes.strict import StrictRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edge_rt.bundle import Bundle
from edge_rt.core import DecodeRow, PageCopy, PrefillChunk, Request, SamplingParams
from edge_rt.errors import EngineError, MissingLibraryError
from edge_rt.loop import Loop
from edge_rt.recipes import OrtOptions
from edge_rt.runtime.base import Runner
from edge_rt.runtime.engines import open_engine
from edge_rt.runtime.ort import OrtRunner, _Step

BundleFactory = Callable[[str], Path]


@pytest.fixture(scope="module", params=["demo.cpu", "demo.null"])
def any_engine(request: pytest.FixtureRequest, demo_bundle: BundleFactory) -> Iterator[Runner]:
    engine = open_engine(Bundle.load(demo_bundle(request.param)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(demo_bundle: BundleFactory) -> Iterator[Runner]:
    engine = open_engine(Bundle.load(demo_bundle("demo.cpu")))
    yield engine
    engine.close()


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    at_step: int
    cancelled_after: int | None  # steps


arrivals = st.builds(
    Arrival,
    prompt=st.builds(
        lambda seed, length: tuple(np.random.default_rng(seed).integers(1, 3072, length).tolist()),
        st.integers(0, 2**32 - 1),
        st.integers(1, 150),
    ),
    max_tokens=st.integers(1, 24),
    at_step=st.integers(0, 12),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
)


def serve(engine: Runner, plan: list[Arrival]) -> list[Collected]:
    """Play the arrivals through the real loop; each request must end exactly once."""
    loop = Loop(StrictRunner(engine))
    answers = [Collected() for _ in plan]
    last = max(a.at_step + (a.cancelled_after or 0) for a in plan)
    for step in range(last + 1):
        for index, arrival in enumerate(plan):
            if arrival.at_step == step:
                sampling = SamplingParams(arrival.max_tokens)
                loop.submit(Request(f"r{index}", arrival.prompt, sampling), answers[index])
            after = arrival.cancelled_after
            if after is not None and arrival.at_step + after == step:
                loop.cancel(f"r{index}")
        loop.step()
    loop.run_until_idle()
    assert all(len(answer.finish) == 1 for answer in answers)
    return answers


@given(plan=st.lists(arrivals, min_size=1, max_size=14))
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_tokens_are_the_same_alone_and_in_any_batch(
    any_engine: Runner, plan: list[Arrival]
) -> None:
    together = serve(any_engine, plan)
    for arrival, answer in zip(plan, together, strict=True):
        (alone,) = serve(any_engine, [Arrival(arrival.prompt, arrival.max_tokens, 0, None)])
        assert alone.finish == ["length"]
        if arrival.cancelled_after is None:
            assert answer.finish == ["length"]
            assert answer.tokens == alone.tokens
        else:
            assert answer.tokens == alone.tokens[: len(answer.tokens)]


@given(
    slots=st.lists(st.integers(0, 15), min_size=2, max_size=16, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
@example(slots=[15, 3], seed=0)
@settings(max_examples=15, deadline=None)
def test_logits_are_the_same_bits_alone_and_in_a_batch(
    engine: Runner, slots: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(1, 3072, rng.integers(1, 60)).tolist()) for _ in slots]

    def run(members: list[int], slots: list[int]) -> dict[int, np.ndarray]:
        """Logits of the prompt and of three decode steps for the members of a batch."""
        first = [PrefillChunk(f"{m}", (slots[m],), 0, prompts[m], (GREEDY,)) for m in members]
        steps = [engine.prefill(first, want_logits=True).logits]
        for step in range(3):
            rows = [
                DecodeRow(f"{m}", (slots[m],), len(prompts[m]) + step, 7 + step, GREEDY)
                for m in members
            ]
            steps.append(engine.decode(rows, want_logits=True).logits)
        stacked = np.stack([step for step in steps if step is not None], axis=1)
        assert stacked.shape[1] == 4
        return dict(zip(members, stacked, strict=True))

    together = run(list(range(len(slots))), slots)
    elsewhere = slots[1:] + slots[:1]
    for member in range(len(slots)):
        alone = run([member], slots)[member]
        np.testing.assert_array_equal(alone, run([member], elsewhere)[member])
        np.testing.assert_array_equal(together[member], alone)


@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("slot", [0, 7, 15])
def test_a_slot_alone_and_with_one_that_runs_along(
    demo_bundle: BundleFactory, fewest: int, slot: int
) -> None:
    """Whatever the processor: nearly the same logits, and no other slot is touched."""
    bundle = Bundle.load(demo_bundle("demo.cpu"))
    prompt = (3, 14, 15, 92, 65)
    engines = [open_engine(bundle) for _ in range(2)]
    found = []
    for engine, least in zip(engines, (fewest, 2), strict=True):
        assert isinstance(engine, OrtRunner)
        assert engine.limits.max_rows == 16
        engine._fewest = least
        for other in (slot - 1, slot, (slot + 1) % 16):
            engine.prefill([PrefillChunk(f"{other}", (other % 16,), 0, prompt, (GREEDY,))])
        rows = [DecodeRow("a", (slot,), len(prompt) + i, 7 + i, GREEDY) for i in range(3)]
        found.append([engine.decode([row], want_logits=True).logits for row in rows])
        beside = DecodeRow("b", ((slot + 1) % 16,), len(prompt), 9, GREEDY)
        found[-1].append(engine.decode([beside], want_logits=True).logits)
    np.testing.assert_allclose(found[0], found[1], atol=0.05)


@pytest.mark.parametrize(("alone", "fewest"), [(True, 1), (False, 2)])
def test_no_slot_runs_alone_where_its_bits_would_differ(
    demo_bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch, alone: bool, fewest: int
) -> None:
    run = _Step.run

    def run_otherwise(step: _Step, past: np.ndarray) -> None:
        run(step, past)
        rows = len(step.input_ids)
        step.logits[:] = 1.0 if alone or rows > 1 else 1.0000001

    monkeypatch.setattr(_Step, "run", run_otherwise)
    engine = open_engine(Bundle.load(demo_bundle("demo.cpu")))
    assert isinstance(engine, OrtRunner)
    assert engine._fewest == fewest


def test_rows_that_always_depend_on_their_company_are_reported(
    demo_bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Step.run

    def run_otherwise(step: _Step, past: np.ndarray) -> None:
        run(step, past)
        step.logits[:] = len(step.input_ids)

    monkeypatch.setattr(_Step, "run", run_otherwise)
    open_engine(Bundle.load(demo_bundle("demo.cpu"))).close()
    assert "may get other tokens in a batch than alone" in caplog.text


def test_a_request_that_fills_its_slot(engine: Runner) -> None:
    """One token more than the longest prompt, next to a neighbour that decodes on."""
    limits = engine.limits
    full = Arrival(tuple(range(1, limits.max_context - 1)), 2, 0, None)
    neighbour = Arrival((5, 6, 7), 24, 0, None)
    late = Arrival((8, 9), 24, 3, None)
    together = serve(engine, [full, neighbour, late])
    for arrival, answer in zip((full, neighbour, late), together, strict=True):
        assert serve(engine, [arrival])[0].tokens == answer.tokens


def test_continuations_of_one_prompt_are_those_of_the_prompt_alone(engine: Runner) -> None:
    """The prompt is computed once and copied; a hot temperature drives the rows apart."""
    prompt = (3, 14, 15, 92, 65)
    sampling = SamplingParams(12, temperature=1.5, seed=7)

    def run(rows: int) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {row: [] for row in range(rows)}
        loop = Loop(StrictRunner(engine))
        loop.submit(
            Request("a", prompt, sampling, rows=rows),
            lambda event: tokens[event.row].append(event.token.id if event.token else -1),
        )
        loop.run_until_idle()
        return tokens

    together = run(4)
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    assert run(4) == together
    first = together[0], run(1)[0]
    assert first[0] == first[1]


def test_a_copied_slot_goes_on_as_its_source(engine: Runner) -> None:
    engine.prefill([PrefillChunk("a", (0,), 0, (3, 4, 5, 6), (GREEDY,))])
    engine.prefill([PrefillChunk("b", (2,), 0, (9, 9, 9, 9, 9, 9), (GREEDY,))])
    engine.copy([PageCopy("a", 0, 2, 4)])
    found = [
        engine.decode([DecodeRow("a", (slot,), 4, 7, GREEDY)], want_logits=True).logits
        for slot in (0, 2)
    ]
    assert found[0] is not None
    np.testing.assert_array_equal(found[0], found[1])


def test_a_failed_step_spoils_no_other_slot(engine: Runner) -> None:
    first, second = (3, 4, 5), (6, 7)

    def run(between: Callable[[], None]) -> np.ndarray:
        engine.prefill([PrefillChunk("a", (0,), 0, first, ())])
        between()
        chunk = PrefillChunk("a", (0,), len(first), second, (GREEDY,))
        logits = engine.prefill([chunk], want_logits=True).logits
        assert logits is not None
        return logits

    def fail() -> None:
        with pytest.raises(EngineError, match="ONNX Runtime failed"):
            engine.prefill([PrefillChunk("b", (1,), 0, (1, 999_999), (GREEDY,))])

    np.testing.assert_array_equal(run(between=fail), run(between=lambda: None))


def test_a_failed_decode_spoils_no_slot_that_it_runs_along(engine: Runner) -> None:
    """Slot 1 lies between the two that fail, so it is in their session run."""
    prompts = {0: (1, 2, 3), 1: (4, 5), 2: (6,)}

    def run(between: Callable[[], None]) -> np.ndarray:
        for slot, prompt in prompts.items():
            engine.prefill([PrefillChunk(f"{slot}", (slot,), 0, prompt, (GREEDY,))])
        between()
        row = DecodeRow("1", (1,), 2, 9, GREEDY)
        logits = engine.decode([row], want_logits=True).logits
        assert logits is not None
        return logits

    def fail() -> None:
        rows = [DecodeRow("0", (0,), 3, 7, GREEDY), DecodeRow("2", (2,), 1, 999_999, GREEDY)]
        with pytest.raises(EngineError, match="ONNX Runtime failed"):
            engine.decode(rows)

    np.testing.assert_array_equal(run(between=fail), run(between=lambda: None))


@pytest.mark.parametrize("kept", [None, 0, 0.5], ids=["missing", "empty", "truncated"])
def test_weights_that_cannot_be_mapped(
    demo_bundle: BundleFactory, tmp_path: Path, kept: float | None
) -> None:
    """ONNX Runtime maps the file: a short one must be an error, not a SIGBUS in some later step."""
    bundle = Bundle.load(demo_bundle("demo.cpu"))
    shutil.copyfile(bundle.path / "model.onnx", tmp_path / "model.onnx")
    if kept is not None:
        content = (bundle.path / "weights.bin").read_bytes()
        (tmp_path / "weights.bin").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(EngineError, match=r"cannot load .*model\.onnx"):
        OrtRunner(tmp_path / "model.onnx", bundle.manifest.limits(), OrtOptions())


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_a_model_that_cannot_be_loaded(
    demo_bundle: BundleFactory, tmp_path: Path, content: bytes | None
) -> None:
    limits = Bundle.load(demo_bundle("demo.cpu")).manifest.limits()
    model = tmp_path / "model.onnx"
    if content is not None:
        model.write_bytes(content)
    with pytest.raises(EngineError, match=r"cannot load .*model\.onnx"):
        OrtRunner(model, limits, OrtOptions())


def test_close_twice(demo_bundle: BundleFactory) -> None:
    engine = open_engine(Bundle.load(demo_bundle("demo.cpu")))
    engine.close()
    engine.close()


def test_without_onnxruntime_the_error_names_the_extra(
    demo_bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(demo_bundle("demo.cpu"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingLibraryError, match="-m pip install onnxruntime"):
        OrtRunner(bundle.path / "model.onnx", bundle.manifest.limits(), OrtOptions())


def test_an_onnxruntime_that_cannot_be_loaded_is_not_called_missing(
    demo_bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libcudart.so.12: not there')")
    bundle = Bundle.load(demo_bundle("demo.cpu"))
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match=r"cannot be loaded: libcudart\.so\.12: not there"):
        OrtRunner(bundle.path / "model.onnx", bundle.manifest.limits(), OrtOptions())

"""Against transformers: its processors over random logits, and its generate()."""

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPTJConfig,
    GPTJForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edge_rt.core import Draw, SamplingParams
from edge_rt.runtime.processors import adjusted, is_adjusted, largest, remaining


def draw(
    sampling: SamplingParams, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> Draw:
    return Draw(sampling, 0, prompt, list(output))


def probabilities(logits: npt.NDArray[np.float32], one: Draw) -> npt.NDArray[np.float64]:
    """Of every token; 0 for those that were left out."""
    scores = adjusted(logits, one) if is_adjusted(one) else logits
    ids, weights = remaining(scores, one.sampling)
    assert (np.diff(ids) > 0).all()
    found = np.zeros(len(logits))
    found[ids] = weights / weights.sum()
    return found


class OpenAI(LogitsProcessor):  # type: ignore[misc]
    """Presence, frequency and bias: transformers has none of them in this form."""

    def __init__(self, one: Draw) -> None:
        self._draw = one

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        sampling = self._draw.sampling
        scores = scores.clone()
        for token, count in Counter(self._draw.output).items():
            scores[0, token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        for token, bias in sampling.logit_bias:
            scores[0, token] += bias
        return scores


def processors(one: Draw) -> LogitsProcessorList:
    """In the order of GenerationMixin._get_logits_processor."""
    sampling = one.sampling
    chain: list[Any] = []
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(
        MinNewTokensLengthLogitsProcessor(
            len(one.prompt), sampling.min_tokens, sorted(sampling.stop_token_ids)
        )
    )
    chain += [OpenAI(one), TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(chain)


def random_draw(rng: np.random.Generator, vocab: int) -> Draw:
    """Every setting is off in a third of the draws."""

    def maybe(value: Any, off: Any) -> Any:
        return off if rng.random() < 1 / 3 else value

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(vocab, size=rng.integers(1, most)).tolist())

    sampling = SamplingParams(
        stop_token_ids=frozenset(tokens(3)),
        min_tokens=maybe(int(rng.integers(10)), 0),
        temperature=maybe(float(rng.uniform(0.2, 3)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab + 5)), 0),
        top_p=maybe(float(rng.uniform(0.01, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.3)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.7, 2)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple((token, float(rng.normal())) for token in tokens(5)), ()),
    )
    return draw(sampling, tokens(12), maybe(tokens(12), ()))


@pytest.mark.parametrize("vocab", [5, 40, 300, 3000])
def test_as_transformers(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(150):
        logits = (rng.standard_normal(vocab) * rng.uniform(0.5, 5)).astype(np.float32)
        one = random_draw(rng, vocab)
        # In float64: in float32 the sums of top-p would decide some tokens by their rounding.
        scores = torch.from_numpy(logits.astype(np.float64))[None]
        expected = processors(one)(torch.tensor([[*one.prompt, *one.output]]), scores)[0]
        found = probabilities(logits, one)
        np.testing.assert_array_equal(found > 0, (expected > -math.inf).numpy(), str(one))
        np.testing.assert_allclose(found, expected.softmax(-1), atol=1e-5, err_msg=str(one))


GENERATE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # what generate() takes, and what of SamplingParams is called otherwise
    ({}, {}),
    ({"temperature": 0.3}, {}),
    ({"top_k": 7}, {}),
    ({"top_p": 0.8}, {}),
    ({"min_p": 0.05}, {}),
    ({"top_p": 0.0}, {}),
    ({"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02}, {}),
    ({"temperature": 0.5, "top_p": 0.7, "min_p": 0.2}, {}),
    ({"temperature": 2.5, "repetition_penalty": 1.8, "top_p": 0.9}, {}),
    ({"repetition_penalty": 0.6, "top_k": 20}, {}),
    ({"min_new_tokens": 1, "top_k": 5}, {"min_tokens": 1}),
    ({"min_new_tokens": 0, "top_k": 5}, {"min_tokens": 0}),
    ({"min_new_tokens": 1, "repetition_penalty": 1.3, "temperature": 1.2, "top_k": 40,
      "top_p": 0.85, "min_p": 0.01}, {"min_tokens": 1}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> GPTJForCausalLM:
    torch.manual_seed(0)
    model = GPTJForCausalLM(
        GPTJConfig(vocab_size=200, n_positions=32, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    )
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.8)
    return model.eval()


@pytest.mark.parametrize(("settings", "renamed"), GENERATE)
@pytest.mark.parametrize("prompt", [(3, 1, 4, 1, 5), (199, 0, 17)])
def test_as_generate(
    tiny: GPTJForCausalLM,
    prompt: tuple[int, ...],
    settings: dict[str, Any],
    renamed: dict[str, Any],
) -> None:
    ids = torch.tensor([prompt])
    stop = tiny(ids).logits[0, -1].topk(2).indices.tolist()  # so that it counts if they are masked
    made = tiny.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=1,
        eos_token_id=stop,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **({"top_k": 0} | settings),
    )
    ours = {k: v for k, v in settings.items() if k != "min_new_tokens"}
    sampling = SamplingParams(
        **({"temperature": 1.0} | ours | renamed), stop_token_ids=frozenset(stop)
    )
    found = probabilities(made.logits[0][0].numpy(), draw(sampling, prompt))
    expected = made.scores[0][0].double()
    np.testing.assert_array_equal(found > 0, (expected > -math.inf).numpy())
    np.testing.assert_allclose(found, expected.softmax(-1).numpy(), atol=1e-5)


SMALL = st.integers(-3, 3)  # scores that tie often


@given(st.lists(SMALL, min_size=2, max_size=30), st.data())
def test_largest_keeps_ties(scores: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores) - 1))
    least = sorted(scores)[-count]
    expected = [i for i, score in enumerate(scores) if score >= least]
    assert largest(np.array(scores, np.float32), count).tolist() == expected


@given(st.lists(SMALL, min_size=1, max_size=30), st.floats(0, 0.999))
def test_top_p_keeps_the_smallest_set_and_the_lower_token_on_a_tie(
    scores: list[int], top_p: float
) -> None:
    ids, weights = remaining(
        np.array(scores, np.float32), SamplingParams(temperature=1.0, top_p=top_p)
    )
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    mass = [math.exp(scores[i] - max(scores)) for i in order]
    before = [math.fsum(mass[:n]) / math.fsum(mass) for n in range(len(mass))]
    assert sorted(ids) == sorted(order[: len(ids)])
    assert len(ids) >= 1
    assert before[len(ids) - 1] < top_p + 1e-9 or len(ids) == 1
    assert [*before, 1.0][len(ids)] >= top_p - 1e-9
    np.testing.assert_allclose(weights, [math.exp(scores[i] - max(scores)) for i in ids])


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"top_p": 0.5}, [0, 1, 2]),
        ({"top_p": 0.51}, [0, 1, 2, 3]),
        ({"top_p": 0.0}, [0]),
        ({"top_k": 2}, [0, 1, 2, 3, 4, 5]),
        ({"min_p": 1.0}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ties_of_all_tokens(settings: dict[str, Any], left: list[int]) -> None:
    ids, _ = remaining(np.ones(6, np.float32), SamplingParams(temperature=0.7, **settings))
    assert ids.tolist() == left


def test_top_p_over_a_long_flat_tail() -> None:
    # The tail's tokens are below the bound under which top-p sorts nothing, the others just above.
    probability = np.full(50_400, 0.04 / 50_390)
    probability[[7, 5, 100, 9, 1, 50_399, 3, 4, 2, 8]] = 0.096
    logits = np.log(probability).astype(np.float32)
    for top_p, count in [(0.09, 1), (0.5, 6), (0.95, 10)]:
        ids, _ = remaining(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert len(ids) == count
    ids, _ = remaining(logits, SamplingParams(temperature=1.0, top_p=0.99))
    assert len(ids) == pytest.approx(10 + 50_390 * 0.75, rel=1e-3)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-8, 1e8, 1e300])
def test_any_temperature(temperature: float) -> None:
    logits = np.array([1.0, -np.inf, 2.0, -3e38, 3e38, 2.0], np.float32)
    logits[3:5] = logits[3:5] if temperature < 1 else -np.inf
    found = probabilities(logits, draw(SamplingParams(temperature=temperature)))
    expected = [0, 0, 0, 0, 1, 0] if temperature < 1 else [1 / 3, 0, 1 / 3, 0, 0, 1 / 3]
    np.testing.assert_allclose(found, expected, atol=1e-6)


LOGITS = np.array([2.0, -1.0, 0.5, -0.5, 0.0, 3.0], np.float32)


def test_penalties_and_bias_by_hand() -> None:
    sampling = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias=((5, -100.0), (1, 1.5), (1, 0.5)),
        min_tokens=5,
        stop_token_ids=frozenset({2}),
    )
    before = LOGITS.copy()
    # Token 0 is in the prompt, 1 and 3 in the output, twice and once, 4 in both.
    found = adjusted(LOGITS, draw(sampling, (0, 4), (1, 3, 1, 4)))
    expected = [1.0, -2 - 0.25 - 2 * 0.5 + 2, -np.inf, -1 - 0.25 - 0.5, -0.75, 3 - 100]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    np.testing.assert_array_equal(LOGITS, before)


@pytest.mark.parametrize(
    "changed",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"min_tokens": 3, "stop_token_ids": frozenset({1})},
    ],
)
def test_each_setting_adjusts(changed: dict[str, Any]) -> None:
    one = draw(SamplingParams(**changed), (1,), (1, 2))
    assert is_adjusted(one)
    assert (adjusted(LOGITS, one) != LOGITS).any()


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"temperature": 0.5, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "seed": 1, "logprobs": 3},
        {"min_tokens": 2, "stop_token_ids": frozenset({1})},
        {"min_tokens": 3},
    ],
)
def test_nothing_to_adjust(same: dict[str, Any]) -> None:
    assert not is_adjusted(draw(SamplingParams(**same), (1,), (1, 2)))


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    sampling = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((-1, 9.0), (6, 9.0)),
        min_tokens=9,
        stop_token_ids=frozenset({-1, 6, 50_256}),
    )
    found = adjusted(LOGITS, draw(sampling, (6, 50_256), (7,)))
    np.testing.assert_array_equal(found, LOGITS)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(min_tokens=1, stop_token_ids=frozenset(range(6))),
        SamplingParams(logit_bias=tuple((token, -math.inf) for token in range(6))),
        SamplingParams(logit_bias=((3, math.nan),)),
        SamplingParams(logit_bias=((3, 3e38), (3, 3e38))),
        SamplingParams(repetition_penalty=1e-320),
    ],
)
def test_settings_that_leave_no_token_are_passed_over(sampling: SamplingParams) -> None:
    assert adjusted(LOGITS, draw(sampling, (0,))) is LOGITS

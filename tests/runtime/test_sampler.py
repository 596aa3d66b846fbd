import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.core import Draw, SampledToken, SamplingParams
from edge_rt.errors import EngineError
from edge_rt.runtime.rng import uniform
from edge_rt.runtime.sampler import sample_rows

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 1.0, -np.inf, 1.5, 0.0], np.float32)
GREEDY = SamplingParams()


def draw(
    sampling: SamplingParams, row: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Draw:
    return Draw(sampling, row, tuple(prompt), list(output))


def one(logits: npt.NDArray[np.float32], **settings: Any) -> SampledToken:
    (token,) = sample_rows(logits[None], [draw(SamplingParams(**settings))])
    return token


def company(rng: np.random.Generator, rows: int, vocab: int) -> list[Draw]:
    """Draws of every kind, plain greedy among them."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 20, "logprobs": 3},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 1.0},
        {"frequency_penalty": 0.5, "logprobs": 0},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "logit_bias": ((3, 2.0),)},
    ]
    return [
        draw(
            SamplingParams(seed=int(rng.integers(2**63)), **kinds[i % len(kinds)]),
            int(rng.integers(4)),
            rng.integers(vocab, size=5).tolist(),
            rng.integers(vocab, size=rng.integers(9)).tolist(),
        )
        for i in range(rows)
    ]


# Greedy.


def test_greedy_takes_the_likeliest_and_the_lower_token_on_a_tie() -> None:
    logits = np.stack([LOGITS, -LOGITS[::-1]])
    logits[1, 2] = 0
    assert sample_rows(logits, [draw(GREEDY)] * 2) == (SampledToken(1), SampledToken(5))


def test_no_rows() -> None:
    assert sample_rows(np.zeros((0, 8), np.float32), []) == ()


@pytest.mark.parametrize(
    ("settings", "prompt", "output", "token"),
    [
        ({"repetition_penalty": 1.1}, [1], [], 3),
        ({"repetition_penalty": 1.1}, [], [1], 3),
        ({"repetition_penalty": 1.5}, [1], [3], 6),
        ({"repetition_penalty": 0.5}, [6], [], 6),
        ({"presence_penalty": 0.1}, [1], [], 1),  # the prompt does not count
        ({"presence_penalty": 0.1}, [], [1], 3),
        ({"presence_penalty": 0.4}, [], [1, 1, 1, 3], 1),  # nor does how often
        ({"frequency_penalty": 0.1}, [], [1, 1, 1, 3], 3),
        ({"frequency_penalty": 0.1}, [1], [3], 1),
        ({"logit_bias": ((2, 100.0),)}, [], [], 2),
        ({"logit_bias": ((1, -100.0),)}, [], [], 3),
        ({"min_tokens": 2, "stop_token_ids": frozenset({1, 3})}, [], [0], 6),
        ({"min_tokens": 2, "stop_token_ids": frozenset({1, 3})}, [1], [0], 6),
        ({"min_tokens": 2, "stop_token_ids": frozenset({1, 3})}, [], [0, 0], 1),
        ({"min_tokens": 2, "stop_token_ids": frozenset({1}), "logit_bias": ((1, 9.0),)}, [], [], 3),
        ({"min_tokens": 1, "stop_token_ids": frozenset(range(8))}, [], [], 1),  # there is no other
    ],
)
def test_greedy_after_penalties_bias_and_mask(
    settings: dict[str, Any], prompt: list[int], output: list[int], token: int
) -> None:
    one = draw(SamplingParams(**settings), 0, prompt, output)
    assert sample_rows(LOGITS[None], [one]) == (SampledToken(token),)


# Drawn.


@pytest.mark.parametrize(("bias", "expected"), [(100.0, {2}), (-100.0, {0, 1, 3, 4, 6, 7})])
def test_bias_forces_and_forbids(bias: float, expected: set[int]) -> None:
    settings = {"temperature": 2.0, "logit_bias": ((2, bias),)}
    assert {one(LOGITS, seed=seed, **settings).id for seed in range(300)} == expected


def test_no_stop_token_before_min_tokens() -> None:
    sampling = [
        SamplingParams(temperature=1.0, min_tokens=3, stop_token_ids=frozenset({1, 3}), seed=seed)
        for seed in range(100)
    ]
    seen = [
        {
            sample_rows(LOGITS[None], [draw(params, output=[1] * length)])[0].id
            for params in sampling
        }
        for length in range(5)
    ]
    assert [{1, 3} <= tokens for tokens in seen] == [False, False, False, True, True]
    assert not any({1, 3} & tokens for tokens in seen[:3])


SETTINGS: list[tuple[dict[str, Any], list[float]]] = [
    # Settings, and how likely they make each token in units of the likeliest.
    ({"temperature": 1.0}, [math.exp(x - 2) for x in LOGITS]),
    ({"temperature": 0.5}, [math.exp((x - 2) / 0.5) for x in LOGITS]),
    ({"temperature": 3.0}, [math.exp((x - 2) / 3) for x in LOGITS]),
    ({"temperature": 1.0, "top_k": 4}, [0, 1, 0, 1, math.exp(-1), 0, math.exp(-0.5), 0]),
    # Shares: 0.296, 0.296, 0.179, 0.109: the third reaches 0.7 of the whole, the fourth 0.8.
    ({"temperature": 1.0, "top_p": 0.7}, [0, 1, 0, 1, 0, 0, math.exp(-0.5), 0]),
    ({"temperature": 1.0, "top_p": 0.8}, [0, 1, 0, 1, math.exp(-1), 0, math.exp(-0.5), 0]),
    ({"temperature": 2.0, "min_p": 0.5},
     [0, 1, 0, 1, math.exp(-0.5), 0, math.exp(-0.25), 0]),
    ({"temperature": 0.5, "logit_bias": ((2, 3.0), (1, -0.5))},
     [math.exp(-3), math.exp(-1), 1, 1, math.exp(-2), 0, math.exp(-1), math.exp(-4)]),
]  # fmt: skip


def chi_square_limit(degrees: int) -> float:
    """The 99.9 % quantile, by Wilson and Hilferty (1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3)


def check_counts(tokens: Sequence[int], weights: Sequence[float]) -> None:
    expected = np.array(weights) / sum(weights) * len(tokens)
    counts = np.bincount(tokens, minlength=len(weights))
    assert not counts[expected == 0].any()
    drawn = expected > 0
    statistic = ((counts - expected)[drawn] ** 2 / expected[drawn]).sum()
    assert statistic < chi_square_limit(np.count_nonzero(drawn) - 1)


@pytest.mark.parametrize(("settings", "weights"), SETTINGS)
def test_distribution_over_seeds(settings: dict[str, Any], weights: list[float]) -> None:
    draws = [draw(SamplingParams(seed=seed, **settings)) for seed in range(20_000)]
    tokens = sample_rows(np.broadcast_to(LOGITS, (len(draws), len(LOGITS))), draws)
    check_counts([token.id for token in tokens], weights)


@pytest.mark.parametrize("along", ["row", "output"])
def test_distribution_of_one_seed(along: str) -> None:
    sampling = SamplingParams(temperature=1.0, seed=2**64 - 1)
    tokens = [
        sample_rows(
            LOGITS[None],
            [draw(sampling, i) if along == "row" else draw(sampling, output=range(i))],
        )[0].id
        for i in range(3000)
    ]
    check_counts(tokens, SETTINGS[0][1])


def test_inversion_in_ascending_order_of_tokens() -> None:
    weights = [math.exp(x) for x in LOGITS]
    for seed in range(200):
        number = uniform(seed, 3, 2) * sum(weights)
        token = next(i for i in range(8) if sum(weights[: i + 1]) > number)
        sampling = SamplingParams(temperature=1.0, seed=seed)
        assert sample_rows(LOGITS[None], [draw(sampling, 3, output=[0, 0])])[0].id == token


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2.0**-53, 3), (0.5, 3)])
def test_tokens_of_no_weight_are_never_drawn(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_rt.runtime.sampler.uniform", lambda *_: number)
    logits = np.full(6, -np.inf, np.float32)
    logits[[1, 3]] = 0.3
    assert one(logits, temperature=1.0).id == token


# What a token depends on.


@pytest.mark.parametrize("seed", range(10))
def test_the_same_alone_and_in_any_company(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((14, 500)) * 2).astype(np.float32)
    draws = company(rng, 14, 500)
    together = sample_rows(logits, draws)
    order = rng.permutation(14)
    shuffled = sample_rows(logits[order], [draws[i] for i in order])
    assert [shuffled[place] for place in np.argsort(order)] == list(together)
    for i in range(14):
        assert sample_rows(logits[i : i + 1], draws[i : i + 1]) == together[i : i + 1]


def test_the_same_from_any_layout_in_memory() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((14, 501)) * 2).astype(np.float32)
    draws = company(rng, 14, 501)
    expected = sample_rows(logits, draws)
    wide = np.zeros((14, 3, 1002), np.float32)
    wide[:, 2, ::2] = logits
    assert sample_rows(wide[:, 2, ::2], draws) == expected
    assert sample_rows(np.asfortranarray(logits), draws) == expected


def test_seed_row_and_length_of_the_output_decide() -> None:
    flat = np.zeros((1, 10_000), np.float32)

    def token(seed: int, row: int, output: Sequence[int], prompt: Sequence[int] = ()) -> int:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return sample_rows(flat, [draw(sampling, row, prompt, output)])[0].id

    drawn = [token(s, r, range(n)) for s in range(5) for r in range(5) for n in range(5)]
    assert len(set(drawn)) > 120
    assert token(1, 2, [3, 4]) == token(1, 2, [9, 9], prompt=[5])


def test_a_row_goes_on_after_preemption_as_if_nothing_had_happened() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, 50)).astype(np.float32)  # a model that sees one token
    sampling = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.3)

    def run(output: list[int], until: int) -> list[int]:
        while len(output) < until:
            last = output[-1] if output else 0
            output.append(sample_rows(table[last][None], [draw(sampling, 1, [0], output)])[0].id)
        return output

    whole = run([], 40)
    assert len(set(whole)) > 10
    assert run(whole[:17], 40) == whole


@pytest.mark.parametrize("seed", range(5))
def test_logits_are_only_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((14, 64)).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    sample_rows(logits, company(rng, 14, 64))
    np.testing.assert_array_equal(logits, before)


# Log-probabilities.


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_raw_logits(count: int) -> None:
    rng = np.random.default_rng(count)
    logits = (rng.standard_normal((20, 300)) * 5).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    settings = {"temperature": 2.0, "repetition_penalty": 3.0, "logit_bias": ((7, 9.0),)}
    draws = [
        draw(SamplingParams(logprobs=count, seed=i, **(settings if i % 2 else {})), 0, [3], [7, 7])
        for i in range(20)
    ]
    tokens = sample_rows(logits, draws)
    assert len({token.id for token in tokens[1::2]}) > 5  # not only the likeliest
    for token, row in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-12)
        likeliest = row.topk(count)
        assert [index for index, _ in token.top] == likeliest.indices.tolist()
        np.testing.assert_allclose(
            [logprob for _, logprob in token.top], likeliest.values, atol=1e-12
        )


def test_no_logprobs_unless_asked_for() -> None:
    assert one(LOGITS, temperature=1.0) == SampledToken(one(LOGITS, temperature=1.0).id, None, ())


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 2.0, -math.inf]), min_size=1, max_size=20),
    st.integers(1, 25),
)
def test_order_of_the_likeliest(logits: list[float], count: int) -> None:
    row = np.array([*logits, 1.0], np.float32)
    finite = [i for i in range(len(row)) if row[i] > -math.inf]
    expected = sorted(finite, key=lambda i: (-row[i], i))[:count]
    assert [index for index, _ in one(row, logprobs=count).top] == expected


def test_logprobs_of_extreme_logits() -> None:
    row = np.array([3e38, -3e38, -np.inf, 3e38], np.float32)
    found = one(row, logprobs=4)
    assert found.id == 0
    assert found.logprob == pytest.approx(-math.log(2))
    assert [index for index, _ in found.top] == [0, 3, 1]


# Logits that mean nothing.


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 2},
        {"logprobs": 1},
        {"logit_bias": ((3, -math.inf),)},
        {"min_tokens": 1, "stop_token_ids": frozenset({0, 3, 7})},
    ],
)
def test_logits_that_are_not_finite(value: float, place: int, settings: dict[str, Any]) -> None:
    logits = np.stack([LOGITS, LOGITS, LOGITS])
    logits[1, place] = value
    draws = [draw(GREEDY), draw(SamplingParams(**settings)), draw(GREEDY)]
    with pytest.raises(EngineError, match=r"not finite.*check it with edge-rt verify"):
        sample_rows(logits, draws)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nothing_but_minus_infinity(temperature: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        one(np.full(8, -np.inf, np.float32), temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_one_finite_logit_is_enough(temperature: float) -> None:
    row = np.full(8, -np.inf, np.float32)
    row[5] = -3e38
    assert one(row, temperature=temperature, top_k=3, top_p=0.9, logprobs=2) == SampledToken(
        5, 0.0, ((5, 0.0),)
    )


def test_a_draw_for_each_row() -> None:
    with pytest.raises(AssertionError, match="2 rows of logits for 1 draws"):
        sample_rows(np.zeros((2, 8), np.float32), [draw(GREEDY)])

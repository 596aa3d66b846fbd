import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_rt.errors import RequestError
from edge_rt.recipes import data_dir
from edge_rt.text import TextStream
from edge_rt.tokenizer import IncrementalDetokenizer, Tokenizer

TOKENIZER = Tokenizer.load(data_dir("engines") / "demo")
IDS_OF_BYTES = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
LONGEST_TOKEN = max(map(len, IDS_OF_BYTES))

# Words that run into each other, and characters of two, three and four bytes with common starts.
TEXT = st.lists(
    st.sampled_from(
        ["the", " the", "there", "he", "a", "an", "nan", "\n", "éè", "日本", "😀😁", "\ufffd"]
    )
).map("".join)
STOP = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", "he", "th", "there the", "ana", "anan", "\n\n", "è", "日", "😀", "😁"]
        ),
        TEXT.filter(bool),
        st.text(min_size=1, max_size=3),
    ),
    max_size=4,
)
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=20)


def tokenize(content: bytes, seed: int) -> list[int]:
    """Tokens whose bytes are `content`: for seed 0 single bytes, for 1 the longest, else any."""
    rng = np.random.default_rng(seed)
    ids = []
    while content:
        longest = min(LONGEST_TOKEN, len(content))
        sizes = [n for n in range(1, longest + 1) if content[:n] in IDS_OF_BYTES]
        size = sizes[{0: 0, 1: -1}.get(seed, rng.integers(len(sizes)))]
        ids.append(IDS_OF_BYTES[content[:size]])
        content = content[size:]
    return ids


def before_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string."""
    for end in range(1, len(text) + 1):
        if found := [string for string in stop if text[:end].endswith(string)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(text: str, stop: list[str]) -> int:
    """Length of the longest end of `text` that is a proper prefix of a stop string."""
    prefixes = {string[:n] for string in stop for n in range(1, len(string))}
    return max((n for n in range(1, len(text) + 1) if text[-n:] in prefixes), default=0)


def check(ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, stop)
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    certain, given_out = "", ""
    for token in ids:
        certain += detokenizer.push(token)
        given_out += stream.push(token)
        text, string = before_stop(certain, stop)
        if string is None:
            text = text[: len(text) - held_back(text, stop)]
        assert (given_out, stream.stop_string) == (text, string)
        assert stream.stopped == (string is not None)
    given_out += stream.finish()
    assert (given_out, stream.stop_string) == before_stop(TOKENIZER.decode(ids), stop)
    assert stream.finish() == ""


@given(TEXT, st.integers(0, 20), STOP)
@example("anana", 0, ["anan", "ana"])
@example("the there", 0, ["there the", "he"])
@example("the there", 1, [" there", "he t", "er"])
def test_text_up_to_the_first_stop_string(text: str, seed: int, stop: list[str]) -> None:
    check(tokenize(text.encode(), seed), stop)


@given(st.text(), st.integers(0, 20), st.data())
def test_stop_strings_from_the_text(text: str, seed: int, data: st.DataObject) -> None:
    cuts = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))
    pieces = [text[start:end] for start, end in data.draw(st.lists(cuts, max_size=4))]
    check(tokenize(text.encode(), seed), [piece for piece in pieces if piece])


@given(IDS, STOP)
def test_any_tokens(ids: list[int], stop: list[str]) -> None:
    check(ids, stop)


@given(IDS)
def test_without_stop_strings_it_is_the_detokenizer(ids: list[int]) -> None:
    stream, detokenizer = TextStream(TOKENIZER), IncrementalDetokenizer(TOKENIZER)
    assert [stream.push(i) for i in ids] == [detokenizer.push(i) for i in ids]
    assert stream.finish() == detokenizer.finish()
    assert not stream.stopped


def pieces(text: str, *stop: str) -> tuple[list[str], str, str | None]:
    """What each byte of `text`, as a token, brings out."""
    stream = TextStream(TOKENIZER, stop)
    pushed = [stream.push(token) for token in tokenize(text.encode(), 0)]
    return pushed, stream.finish(), stream.stop_string


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert pieces("abac", "abab") == (["", "", "", "abac"], "", None)
    assert pieces("aba", "abab") == (["", "", ""], "aba", None)
    assert pieces("aabab!", "abab") == (["", "a", "", "", "", ""], "", "abab")


def test_the_stop_string_that_is_complete_first() -> None:
    assert pieces("xabcd", "abcd", "bc") == (["x", "", "", "a", ""], "", "bc")
    assert pieces("xabc", "c", "abc", "bc") == (["x", "", "", ""], "", "abc")


def test_within_one_token() -> None:
    (token,) = tokenize(b" there", 1)
    stream = TextStream(TOKENIZER, ["re", "there", "he"])
    assert stream.push(token) == " t"
    assert (stream.stopped, stream.stop_string) == (True, "he")
    assert stream.push(token) == stream.finish() == ""
    assert stream.stop_string == "he"


def test_never_half_a_character() -> None:
    assert pieces("é😀", "😁") == (["", "é", "", "", "", "😀"], "", None)


def test_half_a_character_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ["a!"])
    assert [stream.push(token) for token in tokenize("a😀".encode()[:3], 0)] == ["", "", ""]
    assert stream.finish() == "a\ufffd"


def test_half_a_character_can_complete_a_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["a\ufffd"])
    assert [stream.push(token) for token in tokenize("ba😀".encode()[:4], 0)] == ["b", "", "", ""]
    assert stream.finish() == ""
    assert stream.stop_string == "a\ufffd"


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="a stop string is empty; leave it out"):
        TextStream(TOKENIZER, stop)

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from edge_rt.errors import CheckpointError, RequestError
from edge_rt.tokenizer import IncrementalDetokenizer, Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Die Straße führt über den Fluß, naïve café.",
    "日本語のテキスト 😀 👩\u200d👩\u200d👧 🇩🇪 e\u0301",
]
END = "<|endoftext|>"


def train(*added: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(LINES, trainer)
    inner.add_tokens(list(added))
    return inner


TOKENIZER = Tokenizer(train("日本"))
# An added token whose letters all stand for bytes: the library decodes it as those bytes.
AMBIGUOUS = Tokenizer(train("日本", "é"))
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 10))


def pieces(ids: list[int], tokenizer: Tokenizer = TOKENIZER) -> tuple[list[str], str]:
    stream = IncrementalDetokenizer(tokenizer)
    return [stream.push(token) for token in ids], stream.finish()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    train("日本").save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@given(st.one_of(st.text(), st.text(alphabet="é́ 日本語😀👩\u200d👧🇩🇪\ufffd\n")))
def test_text_comes_back_whole_and_in_pieces(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    pushed, rest = pieces(ids)
    assert "".join(pushed) == text
    assert rest == ""


@pytest.mark.parametrize("tokenizer", [TOKENIZER, AMBIGUOUS])
@given(ids=IDS)
def test_pieces_of_any_ids_are_the_decoded_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    pushed, rest = pieces(ids, tokenizer)
    assert "".join(pushed) + rest == tokenizer.decode(ids)


@given(IDS, IDS)
def test_what_was_pushed_never_changes(ids: list[int], more: list[int]) -> None:
    pushed, _ = pieces(ids)
    assert TOKENIZER.decode(ids + more).startswith("".join(pushed))


def ids_of_bytes(content: bytes) -> list[int]:
    by_bytes = {TOKENIZER.token_bytes(token): token for token in range(TOKENIZER.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in content]


def test_half_a_character_is_held_back() -> None:
    pushed, rest = pieces(ids_of_bytes("a😀".encode()))
    assert pushed == ["a", "", "", "", "😀"]
    assert rest == ""


def test_unfinished_character_comes_out_at_the_end() -> None:
    assert pieces(ids_of_bytes("😀".encode()[:3])) == (["", "", ""], "\ufffd")


def test_invalid_bytes_come_out_at_once() -> None:
    assert pieces(ids_of_bytes(b"\xff\xffa")) == (["\ufffd", "\ufffd", "a"], "")


def test_every_byte_has_a_token() -> None:
    assert len(ids_of_bytes(bytes(range(256)))) == 256


def test_special_and_padding_tokens_are_no_text() -> None:
    (end,) = TOKENIZER.encode(END)
    ids = [*TOKENIZER.encode("fox"), end, TOKENIZER.vocab_size + 5]
    assert TOKENIZER.decode(ids) == "fox"
    assert "".join(pieces(ids)[0]) == "fox"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate pair at character 1"):
        TOKENIZER.encode("a\ud83d")


def test_load(directory: Path) -> None:
    loaded = Tokenizer.load(directory)
    assert loaded.vocab_size == TOKENIZER.vocab_size
    assert loaded.encode(LINES[2]) == TOKENIZER.encode(LINES[2])


def test_load_drops_truncation_and_padding(directory: Path) -> None:
    inner = train("日本")
    inner.enable_truncation(3)
    inner.enable_padding(length=200)
    inner.save(str(directory / "tokenizer.json"))
    assert Tokenizer.load(directory).encode(LINES[0]) == TOKENIZER.encode(LINES[0])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; save one.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff"])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)


def test_truncated_file(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(("decoder", "name"), [(None, "NoneType"), ({"type": "Fuse"}, "Fuse")])
def test_other_kind_of_tokenizer(directory: Path, decoder: object, name: str) -> None:
    edit(directory, decoder=decoder)
    with pytest.raises(CheckpointError, match=f"decoder {name}, GPT-J has ByteLevel"):
        Tokenizer.load(directory)

"""Text to tokens and back, whole or token by token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from edge_rt.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints, else one from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_LETTER = _byte_alphabet()


class Tokenizer:
    """The byte-level BPE of a checkpoint or bundle. Special tokens are no text: they decode to ''.

    Ids above those of the tokenizer, with which GPT-J's vocabulary is padded, decode to '' too.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        added: dict[int, Any] = inner.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}  # of the tokens that have come
        self._special = frozenset(index for index, token in added.items() if token.special)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read the directory's tokenizer.json; CheckpointError says what is wrong with it."""
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no {TOKENIZER_FILE}; save one there with transformers: "
                f"AutoTokenizer.from_pretrained(…).save_pretrained('{directory}')"
            )
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{path} is damaged ({error}); download it again") from error
        if not isinstance(inner.decoder, decoders.ByteLevel):
            raise CheckpointError(
                f"{path} has the decoder {type(inner.decoder).__name__}, GPT-J has ByteLevel; "
                f"give GPT-J's own tokenizer"
            )
        # A tokenizer saved during training may cut or pad every prompt.
        inner.no_truncation()
        inner.no_padding()
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        size: int = self._inner.get_vocab_size()
        return size

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`; RequestError if it is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a surrogate pair at character {error.start}; send valid Unicode"
            ) from error
        # Of one text the library's `encode` would hold up all other threads of the interpreter.
        ids: list[int] = self._inner.encode_batch([text])[0].ids
        return ids

    @cached_property
    def longest_token_bytes(self) -> int:
        """No text has fewer tokens than its bytes divided by this."""
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._inner.decode(list(ids))
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; a character may span several tokens."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token: str | None = self._inner.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        try:
            return bytes([_BYTE_OF_LETTER[letter] for letter in token])
        except KeyError:  # an added token stands for itself
            return token.encode()

    def token_text(self, token_id: int) -> str:
        """A token as log-probabilities name it: its text, or `bytes:…` for part of a character."""
        content = self.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class IncrementalDetokenizer:
    """Text of a token stream as it becomes certain; all pieces together are `decode` of all ids.

    The library's DecodeStream is not used: it cannot be finished, and while a stream does not
    end in a whole character it decodes all that it holds again with every token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False  # a character

    def push(self, token_id: int) -> str:
        """Text that this token completes; '' while a character is incomplete."""
        content = self._tokenizer.token_bytes(token_id)
        if content.isascii() and not self._is_within:  # a third of the decoder's time
            return content.decode()
        text = self._decoder.decode(content)
        self._is_within = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """U+FFFD if the stream ended within a character, else ''."""
        return self._decoder.decode(b"", final=True)


def encode_for(directory: Path, vocab_size: int, text: str) -> list[int]:
    """`text` by the directory's tokenizer; CheckpointError if an id is beyond the vocabulary."""
    ids = Tokenizer.load(directory).encode(text)
    if ids and max(ids) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer in {directory} yields token {max(ids)}, but the model's vocabulary "
            f"has {vocab_size}; they do not belong together"
        )
    return ids

"""API keys: a file of their hashes, and what each may do.

    [[key]]
    name = "dashboard"
    sha256 = "…"                 # of the key: printf %s "$KEY" | sha256sum, its first word
    priority = "batch"           # of all its requests
    max_requests = 4             # at once

A key is to be random (`openssl rand -hex 32`), so that a plain SHA-256 is as good as a slow hash.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edge_rt import config
from edge_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key: whose it is, and what it may do."""

    name: str = field(metadata={"doc": "Whose key it is; the log and refusals name it."})
    sha256: str = field(
        metadata={"doc": "SHA-256 of the key, as 64 hexadecimal digits in lower case."}
    )
    priority: Literal["interactive", "batch"] = field(
        default="interactive",
        metadata={"doc": "With `batch` its requests are batch, whatever they say themselves."},
    )
    max_requests: int | None = field(
        default=None,
        metadata={
            "doc": "Prompts that it may have waiting or being served at once; a request on top of "
            "them gets 429, one that has more by itself 400. Not set: as many as the queue takes."
        },
    )

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(
                f"sha256 of key '{self.name}' is not 64 hexadecimal digits, but "
                f"{len(self.sha256)} characters; sha256sum prints a name behind them"
            )
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"max_requests of key '{self.name}' must be 1 or more")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What such a file holds."""

    key: list[ApiKey]


class Keys:
    """The keys of a file, by what their hash is."""

    def __init__(self, keys: list[ApiKey]) -> None:
        """ConfigError if two have one name or one hash."""
        self._by_hash = {key.sha256: key for key in keys}
        if len(self._by_hash) < len(keys) or len({key.name for key in keys}) < len(keys):
            raise ConfigError("two keys have the same name or the same sha256")

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a file; ConfigError names the fault, and a file that others may read."""
        found = config.load(KeyFile, path)
        if path.stat().st_mode & 0o007:
            raise ConfigError(f"{path} can be read by everybody; chmod o-rwx {path}")
        try:
            return cls(found.key)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def all(self) -> list[ApiKey]:
        """Each of them."""
        return list(self._by_hash.values())

    def find(self, authorization: str | None) -> ApiKey | None:
        """Whose key an Authorization header carries; None if it carries none of ours.

        Looked up by hash: how long that takes says nothing about the key. The header comes as
        Latin-1, which gives back the bytes that were sent.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            return None
        return self._by_hash.get(hashlib.sha256(key.strip().encode("latin-1")).hexdigest())


def key_changes(old: Keys | None, new: Keys | None) -> list[str]:
    """Names of the keys that came, went, or may do something else now."""
    before, after = (set(keys.all if keys else ()) for keys in (old, new))
    return sorted({key.name for key in before ^ after})

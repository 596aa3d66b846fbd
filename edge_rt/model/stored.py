"""Where the tensors lie in a safetensors file, for those who map or read them in place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's type in safetensors' names, its shape, and its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length_bytes: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a well-formed safetensors file by name.

    The format is an 8-byte header length, a JSON header, then the data.
    """
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.tell()
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path.name,
            entry["dtype"],
            tuple(entry["shape"]),
            data + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }

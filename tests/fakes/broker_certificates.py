"""A certificate authority and what it signs, by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory, self._name = directory, name
        self.certificate, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        self._run(
            "req", "-x509", *_KEY, "-keyout", self._key, "-out", self.certificate,
            "-subj", f"/CN={name}", "-days", "2",
        )  # fmt: skip

    def sign(self, name: str, alternative: str = "", days: int = 2) -> tuple[Path, Path]:
        """The files of a certificate and of its key; with -1 days it has expired."""
        request, extension = (self._directory / f"{name}.{end}" for end in ("csr", "ext"))
        certificate, key = (self._directory / f"{name}.{end}" for end in ("pem", "key"))
        extension.write_text(f"subjectAltName={alternative}\n" if alternative else "")
        self._run("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        self._run(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key,
            "-CAcreateserial", "-days", str(days), "-extfile", extension, "-out", certificate,
        )  # fmt: skip
        return certificate, key

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

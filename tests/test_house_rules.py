"""Rules of the house that no linter knows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400


def tracked(*patterns: str) -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def test_no_source_file_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked("edge_rt/*.py", "edge_rt/*.cu", "tools/*")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in tracked("*.md")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_top_level_is_what_the_design_says() -> None:
    allowed = {
        ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile.l4t", "LICENSE",
        "README.md", "SECURITY.md", "calib", "docs", "edge_rt", "engines", "pyproject.toml",
        "systemd", "tests", "tools",
    }  # fmt: skip
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= allowed


def test_texts_are_those_of_their_sums() -> None:
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=ROOT / "calib", check=True
    )

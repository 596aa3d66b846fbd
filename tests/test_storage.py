import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rt.errors import BundleError, ConfigError
from edge_rt.storage import atomic_directory, read_json, sha256_file, write_json

MARKER = "manifest.json"


def marker(content: str) -> str:
    return json.dumps({"content": content, "files": {"sub/weights": {}}})


def content_of(path: Path) -> str:
    content: str = json.loads((path / MARKER).read_text())["content"]
    return content


def write(path: Path, content: str) -> None:
    with atomic_directory(path, MARKER) as partial:
        (partial / MARKER).write_text(marker(content))
        (partial / "sub").mkdir()
        (partial / "sub" / "weights").write_text(content)


def only_holds(path: Path, content: str) -> None:
    """`path` is whole, and nothing else lies beside it."""
    assert content_of(path) == (path / "sub" / "weights").read_text() == content
    assert [sibling.name for sibling in path.parent.iterdir()] == [path.name]


def test_writes_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "home" / "bundle"
    write(target, "old")
    only_holds(target, "old")
    write(target, "new")
    only_holds(target, "new")


@pytest.mark.parametrize("name", ["thesis.tex", "sub/thesis.tex", "own/thesis.tex"])
def test_a_file_that_is_not_ours_keeps_the_directory(tmp_path: Path, name: str) -> None:
    target = tmp_path / "bundle"
    write(target, "old")
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"holds {name}, which manifest\.json does not list"):
        write(target, "new")
    assert (target / name).read_text() == "mine"
    assert content_of(target) == "old"


@pytest.mark.parametrize("content", ['{"name": "my web app"}', "{", "[]"])
def test_a_foreign_manifest_is_no_licence(tmp_path: Path, content: str) -> None:
    target = tmp_path / "site"
    target.mkdir()
    (target / MARKER).write_text(content)
    (target / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError):
        write(target, "new")
    assert (target / "thesis.tex").read_text() == "mine"


def test_is_as_readable_as_any_new_directory(tmp_path: Path) -> None:
    write(tmp_path / "bundle", "new")
    (tmp_path / "plain").mkdir()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("bundle", "plain")}
    assert len(modes) == 1


def test_empty_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write(tmp_path / "bundle", "new")
    only_holds(tmp_path / "bundle", "new")


def test_foreign_directory_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis holds files but no manifest.json.*choose"):
        write(target, "new")
    assert [p.name for p in tmp_path.rglob("*")] == ["thesis", "thesis.tex"]


def test_file_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.write_text("mine")
    with pytest.raises(ConfigError, match="is a file, expected a directory"):
        write(target, "new")
    assert target.read_text() == "mine"


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "file" / "bundle", "new")


def test_through_a_link_the_directory_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "real", "old")
    (tmp_path / "current").symlink_to("real")
    write(tmp_path / "current", "new")
    assert (tmp_path / "current").is_symlink()
    assert content_of(tmp_path / "real") == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_the_old_content(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "bundle"
    write(target, "old")

    def write_and_fail() -> None:
        with atomic_directory(target, MARKER) as partial:
            (partial / MARKER).write_text("new")
            raise error

    with pytest.raises(error):
        write_and_fail()
    only_holds(target, "old")


def test_block_that_forgets_the_marker_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write(target, "old")
    with pytest.raises(AssertionError, match=MARKER), atomic_directory(target, MARKER):
        pass
    only_holds(target, "old")


@pytest.mark.parametrize("failing", ["bundle", ".bundle.partial"])
def test_failed_rename_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "bundle"
    write(target, "old")
    rename = Path.rename

    def fail(self: Path, new: Path) -> Path:
        if self.name.startswith(failing):
            raise OSError(28, "No space left on device")
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConfigError, match="No space"):
        write(target, "new")
    only_holds(target, "old")


WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from edge_rt.storage import atomic_directory

{setup}
with atomic_directory(Path(sys.argv[1]), "manifest.json") as partial:
    (partial / "manifest.json").write_text("half")
    {inside}
"""

IN_THE_BLOCK = {"setup": "", "inside": "print('ready', flush=True); time.sleep(60)"}
BETWEEN_THE_RENAMES = {
    "setup": """
rename = Path.rename
def wait_after_first(self, new):
    rename(self, new)
    print('ready', flush=True)
    time.sleep(60)
Path.rename = wait_after_first
""",
    "inside": "pass",
}


def start(target: Path, where: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_WAIT.format(**where), str(target)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


def test_killed_run_leaves_the_old_content_and_the_next_run_tidies(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write(target, "old")
    kill(start(target, IN_THE_BLOCK))
    assert content_of(target) == "old"
    assert len(list(tmp_path.iterdir())) == 2
    write(target, "new")
    only_holds(target, "new")


def test_run_killed_between_the_renames_is_undone_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write(target, "old")
    kill(start(target, BETWEEN_THE_RENAMES))
    with pytest.raises(ValueError, match="next"), atomic_directory(target, MARKER):
        raise ValueError("next run fails too")
    only_holds(target, "old")


def test_run_that_is_alive_keeps_its_directory(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    process = start(target, IN_THE_BLOCK)
    write(target, "new")
    (partial,) = tmp_path.glob(".bundle.partial-*")
    assert (partial / MARKER).read_text() == "half"
    kill(process)


WRITE_MANY = """
import sys
from pathlib import Path
from edge_rt.storage import atomic_directory

for _ in range(40):
    with atomic_directory(Path(sys.argv[1]), "manifest.json") as partial:
        (partial / "manifest.json").write_text('{"files": {}}')
"""


def test_runs_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    runs = [
        subprocess.Popen([sys.executable, "-c", WRITE_MANY, str(target)], stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for run in runs:
        with run:
            assert run.stderr is not None
            assert run.stderr.read() == b""
        assert run.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_neighbours_are_left_alone(tmp_path: Path) -> None:
    neighbours = {
        ".bundle2.partial-00000000",
        "bundle.partial-00000000",
        ".bundle.partial-mine",
        ".bundle.old-mine",
    }
    for name in neighbours:
        (tmp_path / name).mkdir()
    (tmp_path / ".bundle.old-00000000").write_text("a file")
    write(tmp_path / "bundle", "new")
    left = {p.name for p in tmp_path.iterdir()}
    assert left == neighbours | {"bundle", ".bundle.old-00000000"}


def test_sha256_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"a" * 1_000_000)  # FIPS 180-2, appendix B.3
    expected = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    assert sha256_file(file) == expected


def test_write_json_sorts_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"b": 1.5, "a": "ü"})
    assert file.read_text(encoding="utf-8") == '{\n  "a": "ü",\n  "b": 1.5\n}\n'
    assert read_json(file, BundleError) == json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_write_json_refuses_what_is_not_json(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": value})
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"null"])
def test_read_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(BundleError, match=r"a\.json"):
        read_json(file, BundleError)


def test_read_json_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read: No such file"):
        read_json(tmp_path / "absent.json", ConfigError)

"""Runs that go on from what an earlier run of the same job finished."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_rt.errors import ConfigError
from edge_rt.storage import (
    _locked,
    atomic_directory,
    list_files,
    read_json,
    write_atomic,
    write_json,
)

MARKER = "manifest.json"
FULL = OSError(errno.ENOSPC, "full")
LAYERS = ("sub/0", "sub/1", "sub/2")


def nothing(name: str) -> None:
    """What happens after each step of a run without trouble."""


def write(path: Path, key: str | None, after: Callable[[str], None] = nothing) -> list[str]:
    """Write the layers that are not there yet, as `quantize` does; the names of those found."""
    with atomic_directory(path, MARKER, key) as partial:
        found = sorted(p.relative_to(partial).as_posix() for p in partial.rglob("*") if p.is_file())
        (partial / "sub").mkdir(exist_ok=True)
        after("sub")
        for name in LAYERS:
            if name not in found:
                write_atomic(partial / name, name.encode())
                after(name)
        write_json(partial / MARKER, {"files": dict.fromkeys(list_files(partial))})
        after(MARKER)
    return found


def fail_after(
    path: Path, key: str | None, name: str, error: BaseException, match: str | None = None
) -> None:
    def fail(written: str) -> None:
        if written == name:
            raise error

    with pytest.raises(ConfigError if isinstance(error, OSError) else type(error), match=match):
        write(path, key, fail)


def only_holds_layers(path: Path) -> None:
    """`path` is whole, and nothing else lies in it or beside it."""
    assert {name: (path / name).read_text() for name in LAYERS} == {name: name for name in LAYERS}
    assert {p.relative_to(path).as_posix() for p in path.rglob("*")} == {*LAYERS, "sub", MARKER}
    assert set(read_json(path / MARKER, ConfigError)["files"]) == set(LAYERS)
    assert [sibling.name for sibling in path.parent.iterdir()] == [path.name]


def partials(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{path.name}.unfinished-*"))


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(), FULL])
def test_goes_on_after_a_failure(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "model"
    write(target, None)
    fail_after(target, "job", "sub/1", error)
    assert read_json(target / MARKER, ConfigError)  # as it was
    assert write(target, "job") == ["sub/0", "sub/1"]
    only_holds_layers(target)
    assert write(target, "job") == []


def test_says_that_what_was_finished_is_kept(tmp_path: Path) -> None:
    kept = r"model was not written: .*full; .* kept, and the same command goes on from there$"
    fail_after(tmp_path / "model", "job", "sub/0", FULL, kept)


@pytest.mark.parametrize(("key", "step"), [(None, "sub/0"), ("job", "sub")])
def test_does_not_say_so_of_nothing(tmp_path: Path, key: str | None, step: str) -> None:
    fail_after(tmp_path / "model", key, step, FULL, r"full$")
    assert list(tmp_path.iterdir()) == []


def test_without_a_key_nothing_is_kept(tmp_path: Path) -> None:
    fail_after(tmp_path / "model", None, "sub/1", ValueError())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [None, "other", ""])
def test_another_job_starts_from_nothing_and_leaves_the_first_alone(
    tmp_path: Path, other: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "model"
    fail_after(target, "job", "sub/1", ValueError())
    (left,) = partials(target)
    assert f"is kept in {left}" in caplog.text
    assert write(target, other) == []
    assert f"{left} is what a run with other inputs" in caplog.text
    assert partials(target) == [left]
    caplog.clear()
    assert write(target, "job") == ["sub/0", "sub/1"]
    assert not caplog.text
    only_holds_layers(target)


def test_any_text_is_a_key(tmp_path: Path) -> None:
    write(tmp_path / "model", "caf\udce9\0" * 1000)  # as of a path that is not UTF-8
    only_holds_layers(tmp_path / "model")


def test_a_marker_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    target = tmp_path / "model"
    fail_after(target, "job", MARKER, ValueError())
    with (
        pytest.raises(AssertionError, match=MARKER),
        atomic_directory(target, MARKER, "job") as partial,
    ):
        assert not (partial / MARKER).exists()
    assert write(target, "job") == list(LAYERS)
    only_holds_layers(target)


def test_a_target_that_is_not_ours_is_kept_and_so_is_the_work(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def move_in(written: str) -> None:
        target.mkdir(exist_ok=True)
        (target / "thesis.tex").write_text("mine")

    for _ in range(2):  # found at the end, then at the start
        with pytest.raises(ConfigError, match=r"holds files but no manifest\.json"):
            write(target, "job", move_in)
        assert [p.name for p in target.iterdir()] == ["thesis.tex"]
    shutil.rmtree(target)
    assert write(target, "job") == list(LAYERS)


def test_two_living_runs_of_one_job(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with contextlib.suppress(KeyboardInterrupt), atomic_directory(target, MARKER, "job") as first:
        write_atomic(first / "mine", b"first")
        assert write(target, "job") == []
        fail_after(target, "job", "sub/1", ValueError())
        assert partials(target) == [first]
        raise KeyboardInterrupt
    with atomic_directory(target, MARKER, "job") as second:
        assert second == first
        assert [p.name for p in second.iterdir()] == ["mine"]
        write_json(second / MARKER, {"files": {"mine": {}}})
    assert sorted(p.name for p in target.iterdir()) == [MARKER, "mine"]


def test_a_late_interruption_spares_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the directory was renamed its name is free, and the next run may take it."""
    target = tmp_path / "model"
    write(target, None)
    fail_after(target, "job", "sub/0", ValueError())
    (partial,) = partials(target)
    with contextlib.ExitStack() as next_run:

        def take_the_name(*args: object, **options: object) -> None:
            monkeypatch.undo()
            partial.mkdir()
            next_run.enter_context(_locked(partial))
            raise KeyboardInterrupt

        monkeypatch.setattr(shutil, "rmtree", take_the_name)
        with pytest.raises(KeyboardInterrupt):
            write(target, "job")
        assert partial.is_dir()


def test_what_bears_the_name_but_is_no_directory_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    fail_after(target, "job", "sub/1", ValueError())
    (partial,) = partials(target)
    partial.rename(tmp_path / "mine")
    partial.symlink_to("mine")
    assert write(target, "job") == write(target, None) == []
    assert partial.is_symlink()
    partial.unlink()
    partial.write_text("a file")
    assert write(target, "job") == []
    assert partial.read_text() == "a file"
    assert (tmp_path / "mine" / "sub" / "1").is_file()


WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from edge_rt.storage import atomic_directory, write_atomic

def wait(*args):
    print("ready", flush=True)
    time.sleep(60)

with atomic_directory(Path(sys.argv[1]), "manifest.json", "job") as partial:
    (partial / "sub").mkdir()
    write_atomic(partial / "sub" / "0", b"sub/0")
    {then}
    write_atomic(partial / "sub" / "1", b"sub/1")
"""


@contextlib.contextmanager
def other_run(target: Path, then: str) -> Iterator[None]:
    """A run of the job in another process, killed at the end."""
    command = [sys.executable, "-c", WRITE_AND_WAIT.format(then=then), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("then", ["wait()", "import os; os.fsync = wait", "Path.replace = wait"])
def test_goes_on_after_a_kill(tmp_path: Path, then: str) -> None:
    target = tmp_path / "model"
    with other_run(target, then):
        pass
    (partial,) = partials(target)
    assert (partial / "sub" / ".1.tmp").exists() == (then != "wait()")
    assert write(target, "job") == ["sub/0"]
    only_holds_layers(target)


def test_a_run_that_is_alive_elsewhere_keeps_its_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with other_run(target, "wait()"):
        assert write(target, "job") == write(target, "other") == write(target, None) == []
        assert len(partials(target)) == 1
    assert write(target, "job") == ["sub/0"]
    only_holds_layers(target)


KILLED_AT_EVERY_STEP = """
import itertools, os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from test_storage_resume import write

os.fsync = lambda descriptor: None  # of no use against a kill, and slow

def kill_at(step):
    steps = itertools.count()
    def hook(event, args):
        if event.startswith(("open", "os.", "fcntl.", "shutil.")) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for step in itertools.count():
    target = Path(sys.argv[1], str(step), "model")
    write(target, None)
    child = os.fork()
    if child == 0:
        kill_at(step)
        write(target, "job")
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_goes_on_from_a_kill_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", nothing)
    script = [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path), str(Path(__file__).parent)]
    subprocess.run(script, check=True)
    targets = [tmp_path / str(step) / "model" for step in range(len(list(tmp_path.iterdir())))]
    found = []
    for target in targets:
        assert not target.exists() or {p.name for p in target.iterdir()} == {"sub", MARKER}
        found.append(write(target, "job"))
        only_holds_layers(target)
    # More and more of it, and nothing once it stands at the target.
    grown = [list(LAYERS[:count]) for count in range(4)]
    assert [run for run, _ in itertools.groupby(found)] == [*grown, []]


def test_write_atomic_replaces_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a"
    write_atomic(file, b"old")
    write_atomic(file, b"new")

    def full(descriptor: int) -> None:
        raise FULL

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_atomic(file, b"newer")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]

"""Directories that appear whole or not at all, and the small files in them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edge_rt.errors import ConfigError, EdgeRTError

_CHUNK_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_directory(path: Path, marker: str, resume_key: str | None = None) -> Iterator[Path]:
    """Yield a directory that takes the place of `path` once the block has succeeded.

    The block must write the file `marker` into it: a JSON object whose `files` list what is in the
    directory. What stands at `path` is replaced only if it is empty or holds `marker` and nothing
    that `marker` does not list, so that nobody's own files are ever deleted: ConfigError otherwise,
    and for a directory that cannot be written. If the block fails, `path` stays as it was. What a
    killed run left beside `path` is put right by the next one.

    The directory is empty, unless `resume_key` names the job: then it holds what the last run of
    this job had written when it failed or was killed, less `marker`. The block decides which of
    these files are whole; those of `write_atomic` are. A run starts from nothing while another run
    of its job is alive. What runs of other jobs left stays, and the log names it.
    """
    with contextlib.ExitStack() as held:
        try:
            path = path.resolve()  # through a link, the directory is replaced and the link stays
            job = None if resume_key is None else _beside(path, "unfinished", _key8(resume_key))
            path.parent.mkdir(parents=True, exist_ok=True)
            # One run at a time looks at and renames what lies beside `path`.
            with _locked(path.parent, wait=True):
                _recover(path)
                _name_unfinished(path, but=job)
                _check_replaceable(path, marker)
                if job is not None and _resume(job, marker, held):
                    partial = job
                else:
                    partial = _beside(path, "partial", secrets.token_hex(4))
                    partial.mkdir()
                    held.enter_context(_locked(partial))
        except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
            raise ConfigError(
                f"{path} cannot be written ({error}); choose another directory"
            ) from error
        try:
            yield partial
            assert (partial / marker).is_file(), f"the block did not write {marker}"
            _flush(partial)
            with _locked(path.parent, wait=True):
                _check_replaceable(path, marker)
                _swap(partial, path)
        except BaseException as error:
            kept = _abandon(partial, held, keep=partial == job)
            if not isinstance(error, OSError):
                if kept:
                    _logger.warning(
                        "what was finished is kept in %s, and the same command goes on from there; "
                        "remove it if you do not want that",
                        partial,
                    )
                raise
            # Of the block's reading as well as its writing: the error itself names the file.
            message = f"{path} was not written: {error}"
            if kept:
                message += "; what was finished is kept, and the same command goes on from there"
            raise ConfigError(message) from error


def _beside(path: Path, kind: str, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{suffix}")


def _key8(resume_key: str) -> str:
    # A path that is not UTF-8 may stand in it.
    return hashlib.sha256(resume_key.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _resume(job: Path, marker: str, held: contextlib.ExitStack) -> bool:
    """Lock the job's directory and tidy it; False if another run has it or it is not ours."""
    try:
        job.mkdir(exist_ok=True)
        held.enter_context(_locked(job))
    except BlockingIOError:
        _logger.warning(
            "another run of the same job is at work in %s; this one starts from nothing", job
        )
        return False
    except (FileExistsError, NotADirectoryError):
        return False
    # The marker says that all is whole: only the run that finishes may say so.
    for leftover in [job / marker, *job.rglob(_temporary("*"))]:
        leftover.unlink(missing_ok=True)
    _sync(job.parent)  # or a power loss could take the directory with all that was finished in it
    return True


def _abandon(partial: Path, held: contextlib.ExitStack, *, keep: bool) -> bool:
    """Remove a failed run's directory; True if it was kept, as it holds files to go on from."""
    if not keep:
        shutil.rmtree(partial, ignore_errors=True)
        return False
    with contextlib.suppress(OSError), _locked(partial.parent, wait=True):
        held.close()
        # Taken anew: if `_swap` got past its renames, the next run of this job may have the name.
        with _locked(partial):
            if any(files for _, _, files in os.walk(partial)):
                return True
            shutil.rmtree(partial, ignore_errors=True)
    return False


def _check_replaceable(path: Path, marker: str) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"{path} is a file, expected a directory; choose another name")
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
    if not present:
        return
    if marker not in present:
        raise ConfigError(
            f"{path} holds files but no {marker}, so edge_rt did not write it and will not "
            f"replace it; choose another directory or empty this one"
        )
    files = read_json(path / marker, ConfigError).get("files")
    strangers = present - {marker} - set(files if isinstance(files, dict) else ())
    if strangers:
        raise ConfigError(
            f"{path} holds {min(strangers)}, which {marker} does not list, so edge_rt did not "
            f"write it and will not delete it; move it away or choose another directory"
        )


def _swap(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`; what was there is deleted last."""
    old = path.parent / f".{path.name}.old-{secrets.token_hex(4)}"
    try:
        with contextlib.suppress(FileNotFoundError):
            path.rename(old)
        partial.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _name_unfinished(path: Path, but: Path | None) -> None:
    """Hours of work may lie in what a run with other settings left: only its owner removes it."""
    kind = re.compile(rf"\.{re.escape(path.name)}\.unfinished-[0-9a-f]{{8}}")
    for sibling in path.parent.iterdir():
        if kind.fullmatch(sibling.name) and sibling != but:
            _logger.warning(
                "%s is what a run with other inputs, settings or versions left unfinished; the "
                "same command as then goes on from there; remove it if you do not want that",
                sibling,
            )


def _recover(path: Path) -> None:
    """Undo what a killed run left: one killed between the two renames of `_swap` had no target."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(old|partial)-[0-9a-f]{{8}}")
    for sibling in list(path.parent.iterdir()):
        match = ours.fullmatch(sibling.name)
        if match is None or not sibling.is_dir():
            continue
        if match[1] == "partial":
            # One that is still locked belongs to a run that is alive; a link is not ours.
            with contextlib.suppress(BlockingIOError, NotADirectoryError), _locked(sibling):
                shutil.rmtree(sibling, ignore_errors=True)
        elif path.exists():
            shutil.rmtree(sibling, ignore_errors=True)
        else:
            sibling.rename(path)


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the directory's lock, which the kernel drops when the process dies."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _flush(directory: Path) -> None:
    """Bring the tree to disk, files before the directories that name them."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Write the file so that a kill or a power loss at any moment leaves all of it or none.

    Until it is whole, a file that stood there stays. What a killed write leaves beside it,
    `atomic_directory` removes when it resumes.
    """
    temporary = path.with_name(_temporary(path.name))
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def _temporary(name: str) -> str:
    return f".{name}.tmp"


def sha256_file(path: Path) -> str:
    """The file's SHA-256 in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a directory's own list says about one of its files."""

    sha256: str
    size_bytes: int


def list_files(directory: Path) -> dict[str, FileEntry]:
    """Every file of a finished directory, by its path within."""
    return {
        path.relative_to(directory).as_posix(): FileEntry(sha256_file(path), path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def check_names(files: Mapping[str, FileEntry]) -> None:
    """ConfigError for a name that would lead out of the directory."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"files: '{name}' lies outside the directory")


def check_files(
    directory: Path,
    files: Mapping[str, FileEntry],
    error: type[EdgeRTError],
    remedy: str,
    *,
    hashes: bool = True,
) -> None:
    """Compare every file with the list; `error` names the first that differs, and the remedy."""
    for name, entry in files.items():
        file = directory / name
        if not file.is_file():
            raise error(f"{file} is missing; {remedy}")
        size = file.stat().st_size
        if size != entry.size_bytes:
            raise error(f"{file} has {size} bytes, expected {entry.size_bytes}; {remedy}")
        if hashes and sha256_file(file) != entry.sha256:
            raise error(f"{file} was altered: its SHA-256 differs; {remedy}")


def read_text(path: Path, what: str) -> str:
    """The text of a file, its line ends as they are; ConfigError, which calls it `what`."""
    # A pipe would give its text only once, and a device without end.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{what} {path} is no regular file; save it as one")
    try:
        content = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} is not UTF-8 text ({error}); convert it") from error
    except ValueError as error:  # a zero byte in its name
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error
    if "\0" in content:
        raise ConfigError(
            f"{what} {path} is a binary file: it has a zero byte at character "
            f"{content.index(chr(0))}; give plain text"
        )
    return content


def write_json(path: Path, table: object) -> None:
    """Write indented JSON with sorted keys; ValueError for NaN and infinities."""
    text = json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A path that is not UTF-8 may stand in it.
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def read_json(path: Path, error: type[EdgeRTError]) -> dict[str, Any]:
    """Read a JSON object; any fault is raised as `error` and names the file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:  # not UTF-8, not JSON, or nested without end
        raise error(f"{path} is not valid JSON: {cause}") from cause
    if not isinstance(table, dict):
        raise error(f"{path} holds a JSON {type(table).__name__}, expected an object")
    return table

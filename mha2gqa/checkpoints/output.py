"""The output folder: checked before the work, written beside its place, published by one rename."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, UsageError, quoted
from .atomic import FileLock, sync_folder, write_json
from .batch_log import remove_left
from .manifest import MANIFEST

logger = logging.getLogger(__name__)

PARTIAL, REPLACED = ".partial-", ".replaced-"  # and the id of the process
WORK = (".convert", ".uptrain")  # ends of the names of folders that unfinished runs go on with
PUBLISHED = "published"  # file in such a folder: which folder its result is
_SUFFIX = len(PARTIAL) + 24  # bytes that a name needs beyond OUT's own while it is being made
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


# --- before the work -----------------------------------------------------------------------------------


def check_output(source: Path | None, out: Path, force: bool) -> None:
    """Refuse an output folder that would lose or shadow something, or cannot be made, before any work.

    Raises:
        UsageError: OUT is a link or a file, not empty (and not ours under `--force`), lies inside SOURCE or
            around it, has an impossible name, or its folder cannot be written to.
    """
    check_name(out)
    where = out.resolve()
    if source is not None:
        root = source.resolve()
        if where == root or root in where.parents:
            raise UsageError("lies inside SOURCE", where=out, fix="choose another output folder")
        if where in root.parents:
            raise UsageError("contains SOURCE", where=out, fix="choose another output folder")
    if out.is_symlink():
        raise UsageError("is a symbolic link", where=out, fix="give the folder it leads to, or another")
    if out.exists() and not out.is_dir():
        raise UsageError("is a file", where=out, fix="choose another output folder")
    _check_parent(out)
    restore(out)
    remove_finished_work(out)
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise UsageError(
                "is not empty", where=out, fix="choose another folder, or --force to replace our own output"
            )
        if not (out / MANIFEST).is_file():
            raise UsageError(
                f"holds no {MANIFEST}, so it is not ours to replace",
                where=out,
                fix="remove it yourself or choose another folder",
            )
        if os.path.ismount(out):
            raise UsageError("is a mount point", where=out, fix="choose a folder in it")


def check_name(out: Path) -> None:
    """Refuse a name that no file or folder can have.

    Args:
        out: Where something is to be written, or was.

    Raises:
        UsageError: It is too long, or holds what a name cannot.
    """
    try:
        whole = os.fsencode(out.absolute())
        whole.decode("utf-8")  # safetensors writes no other
    except UnicodeError:
        whole = b"\0"
    if b"\0" in whole or out.name in ("", ".", ".."):
        raise UsageError("is not a valid name", where=quoted(str(out)), fix="choose another")
    parts = [os.fsencode(part) for part in out.absolute().parts]
    if (
        max(len(part) for part in (*parts[:-1], parts[-1] + b"." * _SUFFIX)) > 255
        or len(whole) + _SUFFIX > 4000
    ):
        raise UsageError("its name is too long", where=quoted(str(out)), fix="choose a shorter one")


def _check_parent(out: Path) -> None:
    """Refuse a place where no folder can be made.

    Raises:
        UsageError: A file is in the way, or the folder may not be written to.
    """
    parent = next(p for p in out.absolute().parents if p.exists() or p.is_symlink())
    if not parent.is_dir():
        raise UsageError(
            f"{quoted(str(parent))} is not a folder", where=out, fix="choose another output folder"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"nothing can be written in {quoted(str(parent))}", where=out, fix="choose another output folder"
        )


def check_space(out: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        CheckpointError: Fewer than `needed` bytes are free beside `out`.
    """
    parent = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
            where=parent,
            fix="free some space or choose another disk",
        )


# --- folders that are being made -----------------------------------------------------------------------


def restore(out: Path) -> None:
    """Bring back an OUT that a killed run had set aside to replace it, on file systems without exchange."""
    if out.exists() or not out.parent.is_dir():
        return
    for old in sorted(out.parent.glob(f"{_literal(out.name)}{REPLACED}*")):
        if old.is_dir() and (old / MANIFEST).is_file() and not _alive(old):
            old.rename(out)
            logger.warning("%s is back: a run that was to replace it was killed", out)
            return


def remove_leftovers(out: Path) -> list[str]:
    """Remove what killed runs have left beside `out`, and say what it was.

    A folder is dead if nobody holds its lock and no process has the id in its name.

    Returns:
        Names of what is gone.
    """
    gone = []
    for kind in (PARTIAL, REPLACED):
        for folder in sorted(out.parent.glob(f"{_literal(out.name)}{kind}*")):
            if not folder.is_dir() or folder.is_symlink() or _alive(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder.name)
    if gone:
        logger.warning("removed what a killed run had left: %s", ", ".join(gone))
    return gone


def targets_file(out: Path) -> Path:
    """The file of the targets that the original wrote for OUT, until that is published."""
    return out.with_name(f"{out.name}.targets.batches")


def remove_finished_work(out: Path) -> None:
    """Remove what a run goes on with whose result was published just before it was killed, and say so."""
    for kind in WORK:
        work = out.with_name(out.name + kind)
        try:
            made = json.loads((work / PUBLISHED).read_text(encoding="utf-8"))
            finished = made == _identity(out) and FileLock(work / "lock").acquire()
        except (OSError, ValueError, RecursionError):
            continue
        if finished:
            remove_left(targets_file(out))
            shutil.rmtree(work, ignore_errors=True)
            logger.warning("removed %s: its result is %s", work.name, out)


def _identity(folder: Path) -> list[int]:
    """What a folder keeps when it gets another name."""
    status = folder.stat()
    return [status.st_dev, status.st_ino]


def _literal(name: str) -> str:
    """`name` as a pattern that matches it alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(folder: Path) -> bool:
    """Whether somebody may be at work in a partial folder."""
    owner = folder.name.rpartition("-")[2]
    if owner.isdecimal() and int(owner) != os.getpid():
        with suppress(ProcessLookupError, OverflowError):
            try:
                os.kill(int(owner), 0)
            except PermissionError:
                return True
            return True
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here: the process is gone, and that must do
        return False
    finally:
        os.close(handle)
    return False


@contextmanager
def partial_folder(out: Path, kind: str = "") -> Iterator[Path]:
    """A folder beside `out`, locked while the block lasts, and gone after it unless it was moved away.

    Args:
        out: What it is made for.
        kind: A word for its name.

    Raises:
        CheckpointError: It cannot be made.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _locked_folder(out, kind)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(out: Path, kind: str) -> tuple[Path, int]:
    """A new partial folder, and the descriptor that holds its lock."""
    for attempt in range(100):
        words = [w for w in (kind, str(attempt) if attempt else "", str(os.getpid())) if w]
        folder = out.parent / f"{out.name}{PARTIAL}{'-'.join(words)}"
        try:
            folder.mkdir()
        except FileExistsError:  # of another thread, or of a process with our id on another machine
            continue
        lock = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever looks whether it is dead has it for a moment
        with suppress(FileNotFoundError):
            if folder.stat().st_ino == os.fstat(lock).st_ino:
                return folder, lock
        os.close(lock)
    raise FileExistsError(errno.EEXIST, "too many partial folders", str(out))


@contextmanager
def publish(out: Path, force: bool = False, work: Path | None = None) -> Iterator[Path]:
    """A folder beside `out` to fill; it becomes `out` in one step if the block ends well, else it goes.

    A killed process leaves at most a folder called `OUT.partial-…`, which the next run removes, never a
    half-written `out`. Where `force` replaces an older result, both change places in one step, too.

    Args:
        out: The folder to make.
        force: Replace what is there.
        work: Folder of the run that makes it, to be removed once `out` is there, by the next run if need be.

    Raises:
        CheckpointError: The disk does not take it; nothing is published.
    """
    remove_leftovers(out)
    with partial_folder(out) as partial:
        try:
            yield partial
            sync_folder(partial)
            if work is not None and work.is_dir():
                write_json(work / PUBLISHED, _identity(partial))
            _appear(partial, out, force)
        except OSError as error:
            raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOTEMPTY:
        return CheckpointError(
            "has appeared meanwhile, of another process",
            where=out,
            fix="nothing was published; choose another folder",
        )
    return CheckpointError(
        f"cannot be written ({error.strerror or error})",
        where=out,
        fix="nothing was published; free space or fix permissions and run again",
    )


def _appear(partial: Path, out: Path, force: bool) -> None:
    """Let `partial` be `out`; what `out` was is `partial` then, or gone."""
    if not (force and out.is_dir() and any(out.iterdir())):
        partial.rename(out)  # takes the place of an empty folder, too
    elif not _exchange(partial, out):
        aside = out.parent / f"{out.name}{REPLACED}{os.getpid()}"
        out.rename(aside)
        partial.rename(out)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(out.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Let two folders change places in one step; False where the system cannot do that."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(b))

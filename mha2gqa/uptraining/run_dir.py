"""The folder of a run while it lasts, `<out>.uptrain`: recipe, token blocks, resumable checkpoints."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..checkpoints.atomic import FileLock, holds_only, write_json, writing_to
from ..checkpoints.fingerprints import file_fingerprint
from ..checkpoints.json_files import read_json
from ..config.option import declared
from ..config.pair_options import PairConfig
from ..data.reading import local_files
from ..data.recordings import recordings
from ..errors import CheckpointError, UsageError, quoted, reason
from .budget import UptrainConfig

logger = logging.getLogger(__name__)

# Options that change how a run is carried out but not what it computes; a resumed run may differ in them.
NOT_IDENTIFYING = {
    "out",
    "teacher_cache",
    "device",
    "torch_compile",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "eval_steps",
    "keep_checkpoints",
    "force",
    "trust_remote_code",
}
NOT_IDENTIFYING_ARGS = (
    "per_device_",
    "dataloader_",
    "report_to",
    "run_name",
    "project",
    "trackio",
    "log",
    "disable_tqdm",
    "fsdp",
    "deepspeed",
    "ddp_",
    "accelerator_config",
    "gradient_checkpointing",
    "activation_checkpointing",
    "push_to_hub",
    "hub_",
    "save_",
    "eval_",
)
LOCK = "lock"  # held while a process works here; the system lets go of it however the process ends
TEACHER = "teacher"  # folder of precomputed teacher outputs
SOURCES = "sources.json"
COMPLETE = "complete.json"  # written last into a checkpoint, names every file and its size


def recipe_keys(
    config: UptrainConfig, stamp: str, teacher: str | None = None, pairs: bool = False
) -> dict[str, Any]:
    """What identifies a run: every option that changes its result, the starting checkpoint and the teacher.

    Args:
        config: The run.
        stamp: From `checkpoint_fingerprint`.
        teacher: The teacher's, wherever it lies; None without one.
        pairs: Whether it is on pairs, and the options that say how they are read count.
    """
    left_out = NOT_IDENTIFYING | {"training_args"} | (set() if pairs else set(declared(PairConfig)))
    keys = {k: v for k, v in asdict(config).items() if k not in left_out}
    args = {k: v for k, v in config.training_args.items() if not k.startswith(NOT_IDENTIFYING_ARGS)}
    plain = keys | args | {"model contents": stamp, "teacher": teacher}
    return json.loads(json.dumps(plain, default=str))


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every key that differs, sorted."""
    return [
        f"{key}: {quoted(before.get(key), 40)} -> {quoted(now.get(key), 40)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


class RunDirectory:
    """The run's folder.

    Args:
        out: Where the result will be; the folder lies beside it.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = out.with_name(out.name + ".uptrain")
        self.recipe = self.root / "run.json"
        self.lock: FileLock | None = None

    @classmethod
    def at(cls, root: Path) -> RunDirectory:
        """A folder given by its own name, for runs without an output."""
        run_dir = cls(root)
        run_dir.root, run_dir.recipe = root, root / "run.json"
        return run_dir

    def open(self, keys: Mapping[str, Any], *, restart: bool = False) -> bool:
        """Create the folder, or accept it as the same run's.

        Args:
            keys: From `recipe_keys`.
            restart: Delete a run with another recipe instead of refusing.

        Returns:
            Whether the run was begun before.

        Raises:
            UsageError: Another process works here, or the folder belongs to a run with another recipe; the
                changed keys are named.
        """
        if self.recipe.exists():
            self.hold()
            changed = changed_keys(read_json(self.recipe, fix=f"delete {self.root} to start over"), keys)
            if changed and not restart and not self.is_empty():
                raise UsageError(
                    f"holds an unfinished run with another recipe ({'; '.join(changed)})",
                    where=self.root,
                    fix="repeat the old values to resume it, choose another OUT, or force to start over",
                )
            if not changed:
                return True
            self.remove()
        if self.root.exists() and not holds_only(self.root, LOCK, self.recipe.name):
            raise UsageError(
                "is in the way and is not an uptraining run", where=self.root, fix="choose another OUT"
            )
        with writing_to(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.hold()
        write_json(self.recipe, keys)
        return False

    def hold(self) -> None:
        """Keep other processes out until `close`: two writers would spoil each other's checkpoints.

        Raises:
            UsageError: Another process uses the folder, perhaps a worker whose launcher was killed.
        """
        lock = FileLock(self.root / LOCK)
        if not lock.acquire():
            raise UsageError(
                f"in use by process {lock.owner}", where=self.root, fix="wait for it, or stop it"
            )
        self.lock = lock

    def close(self) -> None:
        """Let other processes in."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [p for p in self.root.glob("checkpoint-*") if is_complete(p)]
        return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))

    def last(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self.checkpoints()
        return found[-1] if found else None

    def is_empty(self) -> bool:
        """Whether no training and no teacher's answers would be lost with it."""
        return self.last() is None and not any((self.root / TEACHER).glob("*/manifest.json"))

    def remove_if_empty(self) -> None:
        """Delete the folder where nothing would be lost with it."""
        if self.is_empty():
            self.remove()

    def rotate(self, keep: int) -> None:
        """Delete all but the newest `keep` complete checkpoints."""
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def discard_incomplete(self) -> None:
        """Delete what an interrupted save left behind."""
        for folder in self.root.glob("checkpoint-*"):
            if not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def keep_logs(self) -> None:
        """Move what a tracker wrote here (TensorBoard's `runs`) beside the result, as `<out>.runs`."""
        logs, kept = self.root / "runs", self.out.with_name(self.out.name + ".runs")
        if logs.is_dir():
            for entry in sorted(logs.iterdir()):
                kept.mkdir(exist_ok=True)
                shutil.move(entry, kept / entry.name)

    def remove(self) -> None:
        """Delete the whole folder."""
        self.close()
        shutil.rmtree(self.root, ignore_errors=True)


def mark_complete(checkpoint: Path) -> None:
    """Mark a checkpoint complete: its files are on disk and listed with their sizes."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != COMPLETE)
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    write_json(checkpoint / COMPLETE, {str(p.relative_to(checkpoint)): p.stat().st_size for p in files})


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was marked complete and every file still has its size.

    Raises:
        CheckpointError: The mark is damaged.
    """
    mark = checkpoint / COMPLETE
    if not mark.exists():
        return False
    sizes = read_json(mark, fix=go_back(checkpoint))
    if not sizes or not all(isinstance(size, int) for size in sizes.values()):
        raise CheckpointError("damaged (no list of files)", where=mark, fix=go_back(checkpoint))
    files = {checkpoint / name: size for name, size in sizes.items()}
    return all(file.exists() and file.stat().st_size == size for file, size in files.items())


def go_back(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint."""
    return f"delete {checkpoint}: the run goes on from the checkpoint before it, or starts over without one"


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Name a file of a checkpoint that does not hold what was written there.

    Raises:
        CheckpointError: It does not.
    """
    try:
        yield
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"damaged ({reason(error, 80)})", where=path, fix=go_back(path.parent)
        ) from error


@contextmanager
def cleanup_on_error(path: Path) -> Iterator[None]:
    """Delete a file or folder that could not be written whole, and say so in one line.

    Args:
        path: What is written inside.

    Raises:
        CheckpointError: The disk is full, or does not take it for another reason.
    """
    try:
        yield
    except (CheckpointError, OSError, SafetensorError, RuntimeError) as error:
        reason = _why_unwritable(error)
        if reason is None:
            raise
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot be saved ({reason}); earlier checkpoints are kept",
            where=path,
            fix="free disk space and run the same command again",
        ) from error


def _why_unwritable(error: Exception) -> str | None:
    """The reason, as the library states it; None where the error is about something else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, SafetensorError):
        return " ".join(str(error).split())
    if isinstance(error, CheckpointError):  # of `write_json`
        return str(error.what)
    # torch.save says only that less arrived than it wrote.
    return "the disk took less than was written" if "inline_container" in str(error) else None


def stamp_sources(paths: Sequence[str], audio: bool = False) -> dict[str, str]:
    """Size and a digest of samples of each local file that some names of data stand for.

    Args:
        paths: Files, folders, globs; a data set of the Hub has no files here and is left out.
        audio: Whether recordings are read, beside which no table need lie.
    """
    found = ((audio and recordings(path)) or local_files(path) or () for path in paths)
    files = {str(file): file for some in found for file in some}
    return {name: f"{file.stat().st_size} {file_fingerprint(file)}" for name, file in files.items()}


def check_sources(config: UptrainConfig, folder: Path, first: bool, audio: bool = False) -> list[str]:
    """Note the files of a new run; of a resumed one, see that they are the same.

    A run that streams reads on in them at the place where its checkpoint was. One that does not goes on with
    the blocks that it cut; where it has no checkpoint yet, they are cut anew.

    Args:
        config: The run.
        folder: Its run directory.
        first: Whether this is the process that writes.
        audio: Whether recordings are read.

    Returns:
        What the user should know.

    Raises:
        UsageError: A file of a stream has changed, is gone or is new; it is named.
    """
    path, now = folder / SOURCES, stamp_sources([*config.data, *(config.eval_data or ())], audio)
    if not path.exists():
        if first:
            write_json(path, now)
        return []
    before = read_json(
        path, fix=f"delete it: {folder} then takes the text as it is now for what it began with"
    )
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if not changed:
        return []
    name = changed[0]
    what = "is gone" if name not in now else "is new" if name not in before else "has changed"
    others = f" (and {len(changed) - 1} other files)" if len(changed) > 1 else ""
    checkpoint = RunDirectory.at(folder).last()
    if checkpoint is None:
        if first:
            for cut in (*folder.glob("*.npy"), *folder.glob("held_out.none")):
                cut.unlink()
            write_json(path, now)
        return []
    if config.streaming:
        raise UsageError(
            f"{what} since {checkpoint} was saved{others}, so that the run cannot read on where it was",
            where=name,
            fix=f"bring the old text back, choose another OUT, or delete {folder} to start over",
        )
    return [f"{name} {what}{others} since this run began: it goes on with the text that was read then"]

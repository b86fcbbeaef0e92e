"""Finished blocks of an unfinished conversion, `<out>.convert`: the same command goes on after the last of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import distributed
from ..checkpoints.atomic import FileLock, holds_only, replacing, write_json, writing_to
from ..errors import CheckpointError, UsageError, quoted

LOCK, RUN = "lock", "run.json"
MOMENTS = "moments."  # tensors of a block's file beside its weights


@dataclass
class FinishedBlock:
    """What is kept of a block once it is finished.

    Args:
        tensors: Name in the converted model -> tensor, of every tensor that changed.
        modules: Path -> grouping and report of each attention module.
        merged: Hidden states `[N, T, D]` of the merged, unfitted model after this block on the validation
            rows: no weights that are kept could give them again.
        moments: Tensors of the second moments that are to be saved, by name.
        info: Further figures.
    """

    tensors: dict[str, Tensor]
    modules: dict[str, dict[str, Any]]
    merged: Tensor | None = None
    moments: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class WorkDir:
    """The folder beside OUT that holds the finished blocks of a walk.

    Args:
        out: The folder that the conversion makes.

    Example:
        >>> work = WorkDir(Path("out"))
        >>> work.root.name
        'out.convert'
    """

    def __init__(self, out: Path) -> None:
        self.root = out.with_name(out.name + ".convert")
        self._lock = FileLock(self.root / LOCK)
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def open(self, keys: Mapping[str, Any], *, restart: bool = False) -> int:
        """Make the folder, or accept it as that of the same conversion.

        Args:
            keys: Everything that decides the result: source, text, options.
            restart: Delete what a conversion with other options left instead of refusing.

        Returns:
            How many blocks are finished.

        Raises:
            UsageError: Another process works here, or the folder belongs to a conversion with other options,
                which are named, or to none; nothing is lost.
        """
        plain = json.loads(json.dumps(keys, default=str))
        if distributed.is_rank_zero():
            self._open(plain, restart)
        distributed.barrier()
        return self.count()

    def _open(self, options: Mapping[str, Any], restart: bool) -> None:
        known = self.root / RUN
        found = self.root.exists()
        if found and not known.exists() and not holds_only(self.root, LOCK, RUN):
            raise UsageError(
                "is in the way and is not an unfinished conversion", where=self.root, fix="choose another OUT"
            )
        with writing_to(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        if found:
            before, keys = _flat(_read_keys(known)), _flat(options)
            differ = (k for k in before.keys() | keys.keys() if before.get(k) != keys.get(k))
            changed = sorted(
                differ, key=lambda k: ("." in k, k)
            )  # what was asked before what follows from it
            if not self.count() or (changed and restart):
                self._clear()
            elif changed:
                changes = "; ".join(
                    f"{k}: {quoted(before.get(k), 40)} -> {quoted(keys.get(k), 40)}" for k in changed[:3]
                )
                raise UsageError(
                    f"holds {self.count()} finished layers of a conversion with other options ({changes})",
                    where=self.root,
                    fix="repeat those to go on, choose another OUT, or --force to start afresh",
                )
        write_json(known, options)

    def _take_lock(self) -> None:
        if not self._lock.acquire():
            raise UsageError(
                f"in use by process {self._lock.owner}", where=self.root, fix="wait for it, or stop it"
            )

    def _clear(self) -> None:
        # The first block first: killed here, what is left counts for nothing.
        for path in sorted(self.root.iterdir()):
            if path.name not in (LOCK, RUN):  # which is replaced, and says meanwhile whose folder this is
                path.unlink() if path.is_file() else shutil.rmtree(path)

    def count(self) -> int:
        """How many blocks are finished, from the first on."""
        number = 0
        while self._file(number).exists():
            number += 1
        return number

    def _file(self, number: int) -> Path:
        return self.root / f"block-{number:04}.safetensors"

    def put(self, number: int, block: FinishedBlock) -> None:
        """Keep a finished block; called on rank 0. It is written while the next one is made.

        Raises:
            CheckpointError: The disk is full, or does not take the block before for another reason.
        """
        self.wait()
        tensors = dict(block.tensors) | {f"{MOMENTS}{name}": x for name, x in block.moments.items()}
        metadata = {"mha2gqa": json.dumps({"modules": block.modules, "info": block.info})}
        merged = {} if block.merged is None else {"merged": _copy(block.merged)}
        copies = {name: _copy(x) for name, x in tensors.items()}
        self._writing = self._writer.submit(self._write, number, copies, metadata, merged)

    def _write(
        self, number: int, tensors: dict[str, Tensor], metadata: dict[str, str], merged: dict[str, Tensor]
    ) -> None:
        from safetensors import SafetensorError

        path = self._file(number)
        try:
            if merged:
                _save(self._merged(number), merged, None)
            _save(path, tensors, metadata)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot be saved ({error}); the layers before it are kept",
                where=path,
                fix="free disk space and run the same command again",
            ) from error
        self._merged(number - 1).unlink(missing_ok=True)  # needed after the last finished block alone

    def wait(self) -> None:
        """Until the last finished block is on disk.

        Raises:
            CheckpointError: It cannot be saved.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _merged(self, number: int) -> Path:
        return self.root / f"merged-{number:04}.safetensors"

    def get(self, number: int) -> FinishedBlock:
        """A finished block.

        Raises:
            CheckpointError: Its file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self._file(number)
        if not path.exists():
            raise CheckpointError(
                "the file of a finished layer is missing",
                where=path,
                fix="processes on several machines need one OUT, on a file system that they share",
            )
        try:
            with safe_open(str(path), "pt") as file:
                head = json.loads((file.metadata() or {})["mha2gqa"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            merged = None
            if self._merged(number).exists():
                with safe_open(str(self._merged(number)), "pt") as file:
                    merged = file.get_tensor("merged")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"a finished layer cannot be read ({error})",
                where=path,
                fix="delete this file, and run again",
            ) from error
        names = [name for name in tensors if name.startswith(MOMENTS)]
        moments = {name.removeprefix(MOMENTS): tensors.pop(name) for name in names}
        return FinishedBlock(tensors, head["modules"], merged, moments, head["info"])

    def leave(self) -> None:
        """Let other processes in after an error: what is finished stays; our folder goes where nothing is."""
        self._writer.shutdown()
        if self._lock.held and not self.count():
            self.remove()
        self.close()

    def close(self) -> None:
        """Let other processes in; what is finished stays."""
        self._writer.shutdown()
        self._lock.release()

    def remove(self) -> None:
        """Delete the folder: the result is published."""
        self.close()
        if distributed.is_rank_zero():
            shutil.rmtree(self.root, ignore_errors=True)


def _copy(x: Tensor) -> Tensor:
    """A tensor on the processor that nobody else writes to."""
    return x.detach().to("cpu", copy=True).contiguous()


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    from safetensors.torch import save_file

    with replacing(path) as partial:
        save_file(tensors, partial, metadata)


def _flat(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted names."""
    out: dict[str, Any] = {}
    for key, value in keys.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _read_keys(path: Path) -> dict[str, Any]:
    """The options of an earlier run; none where the file is missing or damaged."""
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return keys if isinstance(keys, dict) else {}

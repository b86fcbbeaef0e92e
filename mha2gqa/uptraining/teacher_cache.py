"""A teacher's likeliest tokens on the blocks of a run, computed once and kept on disk for later runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.atomic import FileLock, write_json
from ..checkpoints.hf_config import load_config_json, text_config
from ..checkpoints.json_files import read_json
from ..checkpoints.output import check_space
from ..errors import CheckpointError, UsageError
from ..lm_head import chunk_slices
from .batches import Batch, BlockOrder, Blocks
from .corpus import Corpus
from .loss import teacher_chunks
from .prepare import PreparedRun
from .run_dir import LOCK, changed_keys
from .teacher import Teacher, load_teacher, output_width
from .throughput import forward_flops

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SAVED_ROWS_BYTES = 1 << 28  # what an interruption may cost, of log-probabilities


@dataclass(frozen=True)
class Identity:
    """What the numbers of a cache depend on, beside the blocks.

    Args:
        teacher: The teacher's fingerprint, see `checkpoint_fingerprint`.
        top_k: Tokens kept at each position.
        temperature: By which the distribution was softened.
        width: Columns of the distribution.
        window: Inputs per block T.
        isolated: Whether packed documents were kept apart.
        dtype: What the teacher ran in.
    """

    teacher: str
    top_k: int
    temperature: float
    width: int
    window: int
    isolated: bool
    dtype: str


class TeacherCache:
    """Ids and log-probabilities of the teacher's top k for rows of blocks, appended as they are computed.

    The folder holds the blocks themselves, so that a run whose blocks begin alike uses what is there and adds
    the rest.

    Args:
        folder: Where it is or will be.
        identity: What it must have been made of.

    Raises:
        UsageError: The folder is a cache of something else; what differs is named.
        CheckpointError: Its files are damaged.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        small = identity.width <= 2**16
        k, window = identity.top_k, identity.window
        self.parts: dict[str, tuple[Any, tuple[int, ...]]] = {
            "blocks": (np.int32, (window + 1,)),
            "ids": (np.uint16 if small else np.int32, (window, k)),
            "log_probs": (np.float32, (window, k)),
        }
        self.rows = self._saved_rows()

    def _saved_rows(self) -> int:
        if not (self.folder / MANIFEST).exists():
            return 0
        path, fix = self.folder / MANIFEST, f"delete {self.folder}: it is computed again"
        found = read_json(path, fix=fix)
        if not isinstance(found.get("made_of"), dict) or not isinstance(found.get("rows"), int):
            raise CheckpointError(
                "damaged (says neither rows nor what they were made of)", where=path, fix=fix
            )
        if changed := changed_keys(found["made_of"], vars(self.identity)):
            raise UsageError(
                f"was made with other settings ({'; '.join(changed)})",
                where=f"teacher_cache {self.folder}",
                fix="give another folder, or delete this one",
            )
        for name in self.parts:
            file = self._file(name)
            if not file.exists() or file.stat().st_size < found["rows"] * self._bytes(name):
                raise CheckpointError(f"damaged (shorter than {found['rows']} rows)", where=file, fix=fix)
        return int(found["rows"])

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _bytes(self, name: str) -> int:
        """Of one row of a file."""
        kind, shape = self.parts[name]
        return np.dtype(kind).itemsize * int(np.prod(shape))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, no other run writes here: it would cut files that this one reads, or write into its rows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / LOCK) as lock:
            if not lock.acquire():
                logger.info("waiting for another run that fills %s", self.folder)
                lock.acquire(wait=True)
            self.rows = self._saved_rows()
            yield

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of one block."""
        return sum(map(self._bytes, self.parts))

    def missing(self, blocks: Blocks) -> int:
        """How many rows of `blocks` are still to be computed.

        Raises:
            UsageError: The cache is of other data.
        """
        known = min(self.rows, len(blocks))
        if known and not np.array_equal(self._map("blocks")[:known], np.asarray(blocks[:known], np.int32)):
            raise UsageError(
                "was made of other data (or another seed, tokenizer or split)",
                where=f"teacher_cache {self.folder}",
                fix="give another folder, or delete this one",
            )
        return len(blocks) - known

    def _map(self, name: str) -> np.ndarray:
        kind, shape = self.parts[name]
        return np.memmap(self._file(name), kind, "r", shape=(self.rows, *shape))

    def fill(
        self, blocks: Blocks, teacher: Teacher, collate: Callable[..., Batch], size: int, device: torch.device
    ) -> int:
        """Compute and append what is missing; an interrupted call goes on where its last save was.

        Args:
            blocks: Rows `[N, T + 1]`.
            teacher: The original.
            collate: Makes a batch of rows.
            size: Rows per forward pass.
            device: The teacher's.

        Returns:
            Rows computed.

        Raises:
            CheckpointError: The disk has no space for it.
        """
        with self._alone():
            return self._fill(blocks, teacher, collate, size, device)

    def _fill(
        self, blocks: Blocks, teacher: Teacher, collate: Callable[..., Batch], size: int, device: torch.device
    ) -> int:
        missing = self.missing(blocks)
        if not missing:
            return 0
        check_space(self.folder, missing * self.row_bytes)
        logger.info(
            "the teacher's top %d of %d blocks: %.2f GB in %s",
            self.identity.top_k,
            missing,
            missing * self.row_bytes / 1e9,
            self.folder,
        )
        files = {}
        for name in self.parts:
            path = self._file(name)
            path.touch()
            files[name] = path.open("r+b")
            files[name].truncate(self.rows * self._bytes(name))
            files[name].seek(0, os.SEEK_END)
        try:
            pending = 0
            for start in range(self.rows, len(blocks), size):
                rows = np.asarray(blocks[start : start + size], np.int32)
                batch = collate(rows, keys=list(range(start, start + len(rows))))
                found = self._top(teacher, {name: x.to(device) for name, x in batch.items()})
                for name, values in zip(self.parts, (rows, *found), strict=True):
                    files[name].write(np.ascontiguousarray(values, self.parts[name][0]).tobytes())
                pending += len(rows)
                if pending * self.row_bytes >= SAVED_ROWS_BYTES or start + size >= len(blocks):
                    self._save(files, pending)
                    pending = 0
        finally:
            for file in files.values():
                file.close()
        return missing

    def _save(self, files: Mapping[str, Any], rows: int) -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        self.rows += rows
        write_json(
            self.folder / MANIFEST, {"schema_version": 1, "rows": self.rows, "made_of": vars(self.identity)}
        )

    @torch.no_grad()
    def _top(self, teacher: Teacher, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probabilities `[B, T, k]` of a batch, chunk by chunk."""
        shape = (*batch["input_ids"].shape, self.identity.top_k)
        states = teacher.states(batch)
        chunk, width = teacher_chunks(states, teacher.head), self.identity.width
        ids, log_probs = [], []
        for part in chunk_slices(len(states), width, states.device.type):
            z: Any = chunk(part)
            soft = torch.log_softmax(z[:, :width].float() / self.identity.temperature, -1)
            best = soft.topk(self.identity.top_k, dim=-1)
            ids.append(best.indices.cpu())
            log_probs.append(best.values.cpu())
        if not all(bool(part.isfinite().all()) for part in log_probs):
            raise CheckpointError(
                "predicts values that are not finite",
                where="teacher",
                fix="check its weights with verify --full",
            )
        return torch.cat(ids).view(shape).numpy(), torch.cat(log_probs).view(shape).numpy()

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """`teacher_ids` and `teacher_log_probs` `[B, T, k]` of some rows."""
        ids, log_probs = self._map("ids"), self._map("log_probs")
        return {
            "teacher_ids": torch.from_numpy(np.stack([ids[row] for row in rows]).astype(np.int32)),
            "teacher_log_probs": torch.from_numpy(np.stack([log_probs[row] for row in rows])),
        }


def cache_teacher(
    run: PreparedRun, args: Any, student: Any, tokens: int, corpus: Corpus, folder: Path
) -> dict[str, Any]:
    """Have the teacher's top k on disk for every training block; rank 0 computes what is missing.

    Args:
        run: Whose `teacher` it is.
        args: The run's TrainingArguments.
        student: The model that learns.
        tokens: Size of the shared tokenizer.
        corpus: Its training blocks get the caches.
        folder: Where the caches are, one for each source of data.

    Returns:
        `folder`, `top_k`, `rows`, `computed` rows, `bytes`, and the `flops` of computing them.

    Raises:
        UsageError: A cache is of something else.
        CheckpointError: No space.
    """
    identity = _identity(run, args, output_width(student), tokens)
    window = run.budget.window
    assert isinstance(corpus.train, BlockOrder)
    caches, computed, flops = [], 0, 0.0
    with args.main_process_first(local=False, desc="running the teacher"):
        teacher = None
        for number, blocks in enumerate(corpus.train.sources):
            cache = TeacherCache(folder / f"train-{number}", identity)
            if cache.missing(blocks):
                teacher = teacher or load_teacher(run, args, student, tokens)
                rows = cache.fill(
                    blocks, teacher, corpus.collate, args.per_device_eval_batch_size, args.device
                )
                computed += rows
                flops += rows * window * forward_flops(teacher.model, window)
            caches.append(cache)
    del teacher
    corpus.train.caches = list(caches)
    return {
        "folder": str(folder),
        "top_k": identity.top_k,
        "rows": sum(cache.rows for cache in caches),
        "computed": computed,
        "bytes": sum(cache.rows * cache.row_bytes for cache in caches),
        "flops": flops,
    }


def _identity(run: PreparedRun, args: Any, student_width: int, tokens: int) -> Identity:
    """What the caches of a run are made of."""
    assert run.teacher is not None
    config = run.config
    vocabulary = int(text_config(load_config_json(run.teacher.name)).get("vocab_size") or tokens)
    width = min(student_width, vocabulary)
    return Identity(
        run.teacher.fingerprint,
        min(config.teacher_top_k or width, width),
        config.temperature,
        width,
        run.budget.window,
        config.isolate_documents,
        config.teacher_dtype or ("bfloat16" if args.bf16 else "float32"),
    )

"""A checkpoint seen as another architecture: tensors are made when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoints.atomic import write_text
from ..checkpoints.output import check_space, partial_folder, remove_leftovers
from ..checkpoints.reader import Checkpoint, TensorInfo, open_checkpoint
from ..checkpoints.side_files import copy_side_files, find_side_files
from ..checkpoints.source_file import SourceFile
from ..checkpoints.writer import plan_shards, write_shards
from ..errors import CheckpointError
from .routes import plan
from .tensor_map import ArchConversion, TensorMap, copied
from .tokenizer import carry_tokenizer


class ArchConvertedCheckpoint(Checkpoint):
    """`source` as another architecture, a checkpoint like any other; nothing is read before it is asked for.

    A tensor that only has another name keeps its bytes and is copied as such.

    Args:
        source: The checkpoint on disk.
        found: From `plan`.

    Attributes:
        source, found: As given; the others as in `Checkpoint`.
    """

    def __init__(self, source: Checkpoint, found: ArchConversion) -> None:
        self.source, self.found = source, found
        self.path, self.revision = source.path, source.revision
        self.files, self.is_bin, self.metadata = source.files, source.is_bin, source.metadata
        self.config = found.config
        shapes = shapes_of(found, source.shapes)

        def origin(name: str) -> TensorInfo:
            return source.tensors[found.recipes[name].sources[0]]

        names = sorted(found.recipes, key=lambda n: (self.files.index(origin(n).file), origin(n).begin))
        self.tensors = {
            name: origin(name)
            if found.recipes[name].make is copied
            else TensorInfo(origin(name).file, origin(name).dtype, shapes[name])
            for name in names
        }

    def source_file(self, file: str) -> SourceFile:
        """One of `files`, open."""
        return self.source.source_file(file)

    def check_unchanged(self) -> None:
        """As `Checkpoint` has it."""
        self.source.check_unchanged()

    def read(self, name: str) -> Tensor:
        """The tensor called `name`.

        Raises:
            CheckpointError: It is not finite although its sources are: too large for its dtype.
        """
        recipe = self.found.recipes[name]
        sources = [self.source.read(part) for part in recipe.sources]
        if recipe.make is copied:
            return sources[0]
        made = recipe.make(*sources).contiguous()
        if not made.isfinite().all() and all(x.isfinite().all() for x in sources):
            raise CheckpointError(
                f"too large for {made.dtype} when written as {self.found.target_type}".replace("torch.", ""),
                where=name,
                fix="save the source in bfloat16 or float32 first",
            )
        return made


def as_architecture(
    checkpoint: Checkpoint, groups: int | None = None, as_: str | None = "auto"
) -> Checkpoint:
    """The checkpoint as the architecture it is converted in: itself, or `ArchConvertedCheckpoint`.

    Args:
        checkpoint: The source.
        groups, as_: As in `plan`, which says what is raised.
    """
    found = plan(checkpoint.config, checkpoint.tensors, groups, as_)
    return checkpoint if found is None else ArchConvertedCheckpoint(checkpoint, found)


def shapes_of(found: ArchConversion, shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the result, from those of the source; nothing is read."""

    def meta(recipe: TensorMap) -> Tensor:
        return recipe.make(*(torch.empty(tuple(shapes[s]), device="meta") for s in recipe.sources))

    return {name: tuple(meta(recipe).shape) for name, recipe in found.recipes.items()}


@contextmanager
def written(checkpoint: Checkpoint, beside: Path, trust_remote_code: bool = False) -> Iterator[Checkpoint]:
    """A checkpoint written as another architecture, in a temporary folder, gone when the block ends; any other as it is.

    Args:
        checkpoint: The source.
        beside: The folder stands beside this path, on the same disk.
        trust_remote_code: Consent to a tokenizer's own code.
    """
    if not isinstance(checkpoint, ArchConvertedCheckpoint):
        yield checkpoint
        return
    check_space(beside, 2 * checkpoint.nbytes)
    remove_leftovers(beside)
    with partial_folder(beside, checkpoint.found.target_type) as folder:
        write(checkpoint, folder, trust_remote_code)
        yield open_checkpoint(folder)


def write(checkpoint: ArchConvertedCheckpoint, folder: Path, trust_remote_code: bool = False) -> None:
    """Write a checkpoint as another architecture into an existing folder, tensor by tensor."""
    write_shards(checkpoint, plan_shards(checkpoint, {}), folder)
    copy_side_files(find_side_files(checkpoint.path, checkpoint.source.config), folder)
    write_text(folder / "config.json", json.dumps(checkpoint.config, indent=2, ensure_ascii=False) + "\n")
    carry_tokenizer(checkpoint.path, folder, trust_remote_code)

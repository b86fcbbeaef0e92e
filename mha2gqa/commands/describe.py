"""A model's config and tensor shapes without its weights: from headers, the Hub, or an empty model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..arch_conversion import ArchConversion, shapes_of
from ..arch_conversion import plan as plan_arch_conversion
from ..checkpoints.dtypes import stored_nbytes
from ..checkpoints.folder import check_model_folder, has_weights
from ..checkpoints.hf_config import as_numbers, config_dtype, load_config_json, read_config_json
from ..checkpoints.hub import local_path
from ..checkpoints.loading import loading_class
from ..checkpoints.reader import Checkpoint
from ..errors import CheckpointError, UnsupportedModelError, hub_refusals, reason


@dataclass(frozen=True)
class Description:
    """What is known of a model without reading its weights.

    Args:
        source: As given.
        config: Raw `config.json`.
        shapes: Shape by tensor name.
        dtypes: safetensors dtype name by tensor name.
        exact: True where shapes come from the files, False where from an empty model built from the config.
        largest: Bytes of the largest tensor.
        shard: Bytes of the largest weight file, 0 where unknown.
        found: How it is written as another architecture, where it is.
    """

    source: str
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    exact: bool
    shard: int = 0
    found: ArchConversion | None = None

    def written_as(self, groups: int | None, as_: str) -> Description:
        """The model in the architecture that `convert` would write it in for `groups` KV heads."""
        found = plan_arch_conversion(self.config, self.shapes, groups, as_)
        if found is None:
            return self
        dtypes = {name: self.dtypes[recipe.sources[0]] for name, recipe in found.recipes.items()}
        shapes = shapes_of(found, self.shapes)
        return replace(self, config=found.config, shapes=shapes, dtypes=dtypes, found=found)

    def nbytes(self, name: str, shape: tuple[int, ...] | None = None) -> int:
        """Bytes of a tensor, or of one of another shape in its dtype."""
        return stored_nbytes(self.dtypes[name], self.shapes[name] if shape is None else shape)

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.nbytes(name) for name in self.shapes)

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max((self.nbytes(name) for name in self.shapes), default=0)


def describe(source: str | Path, revision: str | None = None, drop: Sequence[str] = ()) -> Description:
    """Config, shapes and dtypes of a model; never its weights.

    Args:
        source: Checkpoint folder (with or without weights), a `config.json` of its own, or a hub id.
        revision: Branch, tag or commit on the Hub.
        drop: Names or globs of tensors to leave out.

    Raises:
        CheckpointError: Nothing readable is there.
        UnsupportedModelError: No weights, and transformers cannot build the model from its config.
    """
    path = local_path(source)
    if path.is_file():
        return _from_config(str(source), read_config_json(path))
    if path.is_dir():
        check_model_folder(path)
        if has_weights(path):
            checkpoint = Checkpoint(path)
            checkpoint.drop(drop)
            shard = max((path / name).stat().st_size for name in checkpoint.files)
            return Description(
                str(source), checkpoint.config, checkpoint.shapes, checkpoint.dtypes, True, shard
            )
        return _from_config(str(source), read_config_json(path / "config.json"))
    return _from_hub(str(source), revision)


def read_config(source: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The raw config of what `describe` accepts."""
    path = local_path(source)
    return read_config_json(path) if path.is_file() else load_config_json(source, revision=revision)


def _from_hub(source: str, revision: str | None) -> Description:
    """Shapes from the headers of the Hub's safetensors files; from the config where there are none."""
    config = load_config_json(source, revision=revision)
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    unread: tuple[type[Exception], ...] = (NotASafetensorsRepoError, SafetensorsParsingError)
    try:
        found = get_safetensors_metadata(source, revision=revision)
    except unread + hub_refusals():
        return _from_config(source, config)
    shapes, dtypes = {}, {}
    for file in found.files_metadata.values():
        for name, info in file.tensors.items():
            shapes[name], dtypes[name] = tuple(info.shape), str(info.dtype)
    return Description(source, config, shapes, dtypes, True)


def _from_config(source: str, config: dict[str, Any]) -> Description:
    """Shapes of the model that transformers builds from the config, on the meta device: no memory is used."""
    import torch
    from transformers import AutoConfig

    if not isinstance(config.get("model_type"), str):
        raise CheckpointError("no model_type", where=source, fix="give a transformers config.json")
    values = {key: as_numbers(value) for key, value in config.items() if key != "model_type"}
    try:
        with torch.device("meta"):
            chosen, known = loading_class(config), AutoConfig.for_model(config["model_type"], **values)
            model = chosen.from_config(known) if hasattr(chosen, "from_config") else chosen(known)
    except Exception as error:  # whatever the class raises, it is this config that it refuses
        raise UnsupportedModelError(
            f"no weights here, and no stock class can be built from the config ({reason(error)})",
            where=source,
            fix="give the checkpoint folder itself",
        ) from error
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}
    named = config_dtype(config)
    dtypes = dict.fromkeys(shapes, "F32" if named is None else named.stored)
    return Description(source, config, shapes, dtypes, False)

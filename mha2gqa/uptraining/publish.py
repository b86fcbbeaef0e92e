"""The trained weights as a plain checkpoint: names, dtypes, config and side files of the input's."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.atomic import write_text
from ..checkpoints.dtypes import torch_dtype
from ..checkpoints.ignored_keys import without_ignored
from ..checkpoints.json_files import read_json
from ..checkpoints.loading import quiet
from ..checkpoints.manifest import DIGESTS, MANIFEST, read_manifest, write_manifest
from ..checkpoints.output import check_space, publish
from ..checkpoints.reader import Checkpoint, edit_config
from ..checkpoints.side_files import copy_side_files, find_side_files
from ..checkpoints.writer import NewTensor, plan_shards, write_shards
from ..errors import CheckpointError
from ..report import write_card
from ..results import SCHEMA_VERSION
from ..verification.checks import failed, verify_folder


def named_as_stored(model: Any, state: Mapping[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """The state dict under the names of the files it came from.

    Args:
        model: The model, for its prefix and its own way of saving.
        state: Its full state dict.
        source: The input checkpoint.

    Returns:
        The source's tensors, each in the source's shape, but those that are no part of the model.

    Raises:
        CheckpointError: A tensor is missing or has another shape (a sharded save gone wrong).
    """
    prefix = f"{model.base_model_prefix}."
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in source.tensors:
                renamed[candidate] = tensor
                break
    unheld = _ignored_names(model, source)
    trained = {name: info for name, info in source.tensors.items() if name not in unheld}
    if renamed.keys() != trained.keys():
        renamed = _as_saved(model, state)  # transformers fuses or renames some families while loading
    wrong = [
        f"{name} is {tuple(renamed[name].shape) if name in renamed else 'missing'}, expected {info.shape}"
        for name, info in sorted(trained.items())
        if name not in renamed or tuple(renamed[name].shape) != info.shape
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} trained tensors do not fit the input: {'; '.join(wrong[:3])}",
            where=source.path,
            fix="the checkpoints of the run are kept",
        )
    return {name: renamed[name] for name in trained}


def _ignored_names(model: Any, source: Checkpoint) -> set[str]:
    """Names of the source that its class does not have and does not mind: masks of old versions and the like."""
    prefix = f"{model.base_model_prefix}."
    held = set(model.state_dict())
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return {
        name
        for name in source.tensors
        if not held & {name, name.removeprefix(prefix), prefix + name}
        and (not without_ignored([name]) or any(pattern.search(name) for pattern in ignored))
    }


def _as_saved(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder, quiet():
        model.save_pretrained(folder, state_dict=dict(state))
        saved = Checkpoint(Path(folder))
        return {name: saved.read(name).clone() for name in saved.tensors}


def replacements(state: Mapping[str, Tensor], source: Checkpoint) -> dict[str, NewTensor]:
    """Tensors that training changed, in the input's dtypes; the others are copied as bytes."""

    def make(name: str, dtype: torch.dtype) -> Tensor:
        return state[name].detach().to("cpu", dtype)

    new = {}
    for name in state:
        info = source.tensors[name]
        dtype = torch_dtype(info.dtype)
        if not torch.equal(make(name, dtype), source.read(name)):
            new[name] = NewTensor(info.dtype, info.shape, partial(make, name, dtype))
    return new


def manifest_with(source: Checkpoint, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The input's manifest with an `uptrain` section; an earlier one moves into it."""
    path = source.path / MANIFEST
    if path.exists():
        manifest = read_manifest(source.path)
    else:
        manifest = {"schema_version": SCHEMA_VERSION, "command": "uptrain", "source": name}
    previous = {"previous": manifest.pop("uptrain")} if "uptrain" in manifest else {}
    return manifest | {"uptrain": dict(section) | previous}


def with_digests(manifest: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """A manifest whose digests are those of the tensors just made, and the earlier ones of all others."""
    earlier = manifest.get(DIGESTS)
    return {**manifest, DIGESTS: {**(earlier if isinstance(earlier, Mapping) else {}), **digests}}


def publish_trained(
    model: Any,
    state: Mapping[str, Tensor],
    source: Checkpoint,
    out: Path,
    manifest: Mapping[str, Any],
    *,
    force: bool = False,
    adapter: Path | None = None,
    work: Path | None = None,
) -> None:
    """Write OUT, whole or not at all.

    Args:
        model: The trained model.
        state: Its full (consolidated) state dict.
        source: The input checkpoint, whose names, dtypes, config and side files OUT gets.
        out: The folder.
        manifest: What becomes `mha2gqa.json`.
        force: Replace a folder of ours.
        adapter: A folder to keep beside the merged weights, as `OUT/adapter`.
        work: The run's folder, where it goes once OUT is there.

    Raises:
        CheckpointError: Not finite, not fitting the config, or no space.
    """
    stored = named_as_stored(model, state, source)
    sides = find_side_files(source.path, source.config)
    check_space(out, source.nbytes)
    with publish(out, force, work) as folder:
        written = write_shards(source, plan_shards(source, replacements(stored, source)), folder)
        copy_side_files(sides, folder)
        config = source.path / "config.json"
        if read_json(config).get("use_cache") is False:
            write_text(
                folder / "config.json",
                json.dumps(edit_config(source.config, {("use_cache",): True}), indent=2, ensure_ascii=False)
                + "\n",
            )
        else:
            (folder / "config.json").write_bytes(config.read_bytes())
        if adapter is not None:
            (folder / "adapter").mkdir()
            for file in sorted(adapter.iterdir()):
                (folder / "adapter" / file.name).write_bytes(file.read_bytes())
        write_manifest(folder, with_digests(manifest, written.digests), out)
        write_card(folder)
        checks = [c for c in verify_folder(folder, expected=list(source.tensors)) if c.name != "shapes"]
        if problems := failed(checks):
            raise CheckpointError(f"the finished folder fails its checks ({problems})", where=out)

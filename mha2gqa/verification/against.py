"""A result compared with its source: unchanged tensors must be equal, pooled ones are pooled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import heads
from ..arch_conversion import ArchConvertedCheckpoint, as_architecture
from ..architectures import AttentionModule, find_attention_modules, find_spec, geometry
from ..checkpoints.json_files import read_json
from ..checkpoints.manifest import DIGESTS
from ..checkpoints.reader import MANIFEST, Checkpoint
from ..errors import CheckpointError, listed, quoted
from ..merging import MERGERS, MergeContext
from ..results import Check
from .tiny_random import check_arch_conversion

NAME = "against source"
RECOMPUTED = ("mean", "first")  # methods that need no text


def check_against(checkpoint: Checkpoint, source: Checkpoint) -> Check:
    """Unchanged tensors are byte-equal to the source's; mean and first are recomputed.

    Raises:
        CheckpointError: The manifest is broken, or a grouping in it is none of this model.
    """
    place = checkpoint.path / MANIFEST
    manifest = read_json(place)
    was, kind = _source_type(manifest), source.config.get("model_type")
    if was is not None and was != kind:
        return Check(NAME, False, f"{source.path} is a {kind} model, and it was converted from a {was} model")
    seen = as_architecture(source, _num_kv_heads(manifest, place), _target_type(manifest, place))
    if isinstance(seen, ArchConvertedCheckpoint):
        check = check_arch_conversion(source.config, seen.found)
        if check.ok is False:
            return check
    spec = find_spec(seen.config)
    modules = find_attention_modules(spec, seen.tensors)
    touched = {name for module in modules for name in module.names.values()}
    touched |= _trained(manifest, modules)
    dropped = manifest.get("dropped")
    touched.update(map(str, dropped) if isinstance(dropped, list) else ())
    wrong = [name for name in seen.tensors if name not in touched and not _kept(seen, checkpoint, name)]
    if (method := manifest.get("method")) in RECOMPUTED and "uptrain" not in manifest:
        for module in modules:
            before = geometry(spec, seen.config, module, seen.shapes)
            tensors = {role: seen.read(name) for role, name in module.names.items()}
            grouping = _grouping(manifest, module, before.num_kv_heads, place)
            merged = MERGERS[method](heads.split(spec, before, tensors), grouping, MergeContext(spec, 0))
            right = heads.unsplit(spec, merged.weights)
            wrong += [n for role, n in module.names.items() if not _equal(right.get(role), checkpoint, n)]
    detail = f"differ from what the source gives: {listed(wrong)}" if wrong else "as the source gives"
    return Check(NAME, not wrong, f"{len(wrong)} tensors {detail}" if wrong else detail)


def _trained(manifest: Mapping[str, Any], modules: Sequence[AttentionModule]) -> set[str]:
    """Tensors that were made, not copied, beside attention: by uptraining, or of layers that were trained whole."""
    facts, digests = manifest.get("calibration"), manifest.get(DIGESTS)
    if not isinstance(digests, Mapping):
        return set()
    if "uptrain" in manifest:
        return set(digests)
    fit = facts.get("fit") if isinstance(facts, Mapping) else None
    if not isinstance(fit, Mapping) or fit.get("train") != "layer":
        return set()
    blocks = tuple({f"{module.block}." for module in modules})
    return {name for name in digests if name.startswith(blocks)}


def _kept(source: Checkpoint, checkpoint: Checkpoint, name: str) -> bool:
    return _equal(source.read(name), checkpoint, name)


def _equal(right: Tensor | None, checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor of the result is `right`; None is for one that must not be there."""
    if right is None or name not in checkpoint.tensors:
        return right is None and name not in checkpoint.tensors
    found = checkpoint.read(name)
    return right.shape == found.shape and right.dtype == found.dtype and _same_bytes(right, found)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """By bytes: NaN equals itself, and dtypes without arithmetic can be compared."""
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


# --- the manifest, which anybody may have written -------------------------------------------------------


def _broken(place: Path, key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"no usable {key} ({quoted(value)})", where=place, fix="convert again from the source"
    )


def _num_kv_heads(manifest: Mapping[str, Any], place: Path) -> int:
    counts = manifest.get("num_kv_heads")
    after = counts.get("after") if isinstance(counts, Mapping) else None
    if isinstance(after, bool) or not isinstance(after, int) or after < 1:
        raise _broken(place, "num_kv_heads", counts)
    return after


def _source_type(manifest: Mapping[str, Any]) -> str | None:
    """Type of the model that was written as another architecture, if it was."""
    found = manifest.get("reexpression")
    kind = found.get("source_type") if isinstance(found, Mapping) else None
    return kind if isinstance(kind, str) else None


def _target_type(manifest: Mapping[str, Any], place: Path) -> str:
    found = manifest.get("reexpression") or {}
    target = found.get("target_type", "none") if isinstance(found, Mapping) else None
    if not isinstance(target, str):
        raise _broken(place, "reexpression", found)
    return target


def _grouping(
    manifest: Mapping[str, Any], module: AttentionModule, num_kv_heads: int, place: Path
) -> list[list[int]]:
    groupings = manifest.get("grouping")
    grouping = groupings.get(module.path) if isinstance(groupings, Mapping) else None
    parts = grouping if isinstance(grouping, list) and all(isinstance(g, list) for g in grouping) else []
    members = [head for group in parts for head in group]
    whole = all(isinstance(head, int) and not isinstance(head, bool) for head in members)
    if not whole or sorted(members) != list(range(num_kv_heads)) or len({len(group) for group in parts}) != 1:
        raise _broken(place, f"grouping of {module.path}", grouping)
    return parts

"""Checks on a finished folder, and oracles on a small twin of the very architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from .. import heads
from ..arch_conversion import ArchConvertedCheckpoint, as_architecture
from ..architectures import find_attention_modules, find_spec, geometry
from ..checkpoints.ignored_keys import without_ignored
from ..checkpoints.json_files import read_json
from ..checkpoints.loading import quiet
from ..checkpoints.reader import MANIFEST, Checkpoint, open_checkpoint
from ..errors import Mha2gqaError, reason
from ..merging import MERGERS, MergeContext
from ..modeling import exported_class, find_export, modeling_file
from ..results import Result
from .tiny_random import Check, check_arch_conversion, check_tiny_random, model_class


@dataclass
class VerifyResult(Result):
    """Every check made on a folder; `ok` unless one failed."""

    command: ClassVar[str] = "verify"
    table: ClassVar[str] = "checks"
    path: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not failed(self.checks)


def failed(checks: Sequence[Check]) -> str:
    """The failures in one line; empty if there are none."""
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if check.ok is False)


def verify(out: str | Path, *, against: str | Path | None = None, full: bool = False) -> VerifyResult:
    """Check a converted checkpoint.

    Args:
        out: The folder.
        against: The source; tensors that must not change are compared byte by byte, pooled ones recomputed.
        full: Read every tensor and demand finite numbers.

    Returns:
        All checks, also the failed ones.
    """
    checks = verify_folder(Path(out), full=full)
    if not failed(checks):
        checkpoint = open_checkpoint(out)
        checks.append(check_tiny_random(checkpoint.config))
        if against is not None:
            checks.append(_guard("against source", lambda: _against(checkpoint, open_checkpoint(against))))
    return VerifyResult(str(out), checks)


def verify_folder(folder: Path, *, expected: Sequence[str] | None = None, full: bool = False) -> list[Check]:
    """Files, key set, shapes against the config, and a load on the meta device."""
    try:
        checkpoint = open_checkpoint(folder)
    except Mha2gqaError as error:
        return [Check("files", False, str(error))]
    checks = [Check("files", True, f"{len(checkpoint.files)} files, {len(checkpoint.tensors)} tensors")]
    if expected is not None:
        missing, extra = (
            sorted(set(expected) - set(checkpoint.tensors)),
            sorted(set(checkpoint.tensors) - set(expected)),
        )
        detail = f"missing {missing}, unexpected {extra}" if missing or extra else "complete"
        checks.append(Check("tensor names", not (missing or extra), detail))
    checks.append(_guard("shapes", lambda: _shapes(checkpoint)))
    if full:
        checks.append(_guard("finite", lambda: _finite(checkpoint)))
    if (export := find_export(checkpoint.config)) and exported_class(checkpoint.config):
        beside = folder / export.file
        if not beside.is_file():
            checks.append(Check("modelling code", False, f"{export.file} is missing"))
        else:  # another version of this package may have written it
            same = beside.read_bytes() == modeling_file(export).read_bytes()
            detail = "as this package writes it" if same else "not the file this package writes"
            checks.append(Check("modelling code", True if same else None, f"{export.file} is {detail}"))
    checks.append(_guard("loads", lambda: _loads(checkpoint)))
    return checks


def _guard(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Mha2gqaError as error:
        return Check(name, False, str(error))


def _shapes(checkpoint: Checkpoint) -> Check:
    spec = find_spec(checkpoint.config)
    modules = find_attention_modules(spec, checkpoint.tensors)
    counts = {geometry(spec, checkpoint.config, module, checkpoint.shapes).num_kv_heads for module in modules}
    if not modules:
        return Check("shapes", False, "no attention module found")
    return Check("shapes", True, f"{len(modules)} attention modules, KV heads {sorted(counts)}")


def _finite(checkpoint: Checkpoint) -> Check:
    bad = [
        n
        for n in checkpoint.tensors
        if (x := checkpoint.read(n)).is_floating_point() and not x.isfinite().all()
    ]
    return Check(
        "finite", not bad, f"NaN or infinity in {', '.join(bad)}" if bad else "every number is finite"
    )


def _loads(checkpoint: Checkpoint) -> Check:
    """A load on the meta device: no tensor may be missing, unexpected or of another shape."""
    cls = model_class(checkpoint.config)
    if cls is None:
        return Check("loads", None, "not checked: no stock class of the installed transformers")
    try:
        with quiet():
            _, info = cls.from_pretrained(checkpoint.path, device_map="meta", output_loading_info=True)
    except ImportError as error:  # a vision tower that needs a package of its own
        return Check("loads", None, f"not checked: {str(error).strip().splitlines()[0]}")
    except Exception as error:  # whatever the class raises, it is this folder that it refuses
        return Check("loads", False, f"{cls.__name__}: {reason(error)}")
    found = {**info, "unexpected_keys": without_ignored(info["unexpected_keys"])}
    wrong = {kind: sorted(map(str, keys)) for kind, keys in found.items() if keys}
    return Check("loads", not wrong, f"{cls.__name__}: {wrong or 'no missing or unexpected tensor'}")


def _against(checkpoint: Checkpoint, source: Checkpoint) -> Check:
    """Unchanged tensors are byte-equal to the source's; mean and first are recomputed."""
    manifest = read_json(checkpoint.path / MANIFEST)
    as_ = manifest.get("reexpression", {}).get("target_type", "none")
    seen = as_architecture(source, manifest["num_kv_heads"]["after"], as_)
    if isinstance(seen, ArchConvertedCheckpoint):
        twin = check_arch_conversion(source.config, seen.found)
        if twin.ok is False:
            return twin
        source = seen
    spec, modules = find_spec(source.config), find_attention_modules(find_spec(source.config), source.tensors)
    touched = {name for module in modules for name in module.names.values()}
    wrong = [n for n in source.tensors if n not in touched and not _same(source.read(n), checkpoint.read(n))]
    if manifest.get("method") in ("mean", "first") and "uptrain" not in manifest:
        for module in modules:
            before = geometry(spec, source.config, module, source.shapes)
            weights = heads.split(
                spec, before, {role: source.read(name) for role, name in module.names.items()}
            )
            merged = MERGERS[manifest["method"]](
                weights, manifest["grouping"][module.path], MergeContext(spec, 0)
            )
            right = heads.unsplit(spec, merged.weights)
            wrong += [n for role, n in module.names.items() if not _same(right[role], checkpoint.read(n))]
    detail = f"differ from what the source gives: {', '.join(wrong[:5])}" if wrong else "as the source gives"
    return Check("against source", not wrong, f"{len(wrong)} tensors {detail}" if wrong else detail)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)

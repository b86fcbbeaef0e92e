"""Checks on a finished folder, and equivalence on a tiny random model of the very architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..architectures import find_attention_modules, find_spec, geometry
from ..architectures.explain import refuse_latent
from ..checkpoints.reader import Checkpoint, open_checkpoint
from ..errors import Mha2gqaError
from ..modeling import Export, exported_class, find_export, modeling_file
from ..results import Check, Result
from .against import check_against
from .as_written import NAME as AS_WRITTEN
from .as_written import check_as_written
from .loads import check_loads
from .preflight import unchecked
from .tiny_random import check_tiny_random


@dataclass
class VerifyResult(Result):
    """Every check made on a folder.

    Args:
        path: The folder.
        checks: Each with `name`, `ok` (None where it was not made) and `detail`.
        unchecked: Checks that are due and could not be made, with reasons.
    """

    command: ClassVar[str] = "verify"
    table: ClassVar[str] = "checks"
    path: str
    checks: list[Check] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no check failed and none that is due is missing."""
        return not (failed(self.checks) or self.unchecked)


def failed(checks: Sequence[Check]) -> str:
    """The failures in one line; empty if there are none."""
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if check.ok is False)


def verify(out: str | Path, *, against: str | Path | None = None, full: bool = False) -> VerifyResult:
    """Check a converted checkpoint; with `against` or `full` also what was made, by the digests in its manifest.

    Args:
        out: The folder.
        against: The source; tensors that must not change are compared byte by byte, pooled ones recomputed.
        full: Read every tensor and demand finite numbers.

    Returns:
        All checks, also the failed ones: a folder that cannot be read is one of those, not an error.

    Example:
        >>> verify("llama-gqa8", against="llama", full=True).ok  # doctest: +SKIP
        True
    """
    checks = verify_folder(Path(out), full=full)
    if not failed(checks):
        checkpoint = open_checkpoint(out)
        checks.append(check_tiny_random(checkpoint.config))
        if full or against is not None:
            checks.append(_guard(AS_WRITTEN, lambda: check_as_written(checkpoint)))
        if against is not None:
            checks.append(
                _guard("against source", lambda: check_against(checkpoint, open_checkpoint(against)))
            )
        return VerifyResult(str(out), checks, unchecked(checks, checkpoint.config))
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
        checks.append(_modelling_code(folder, export))
    checks.append(_guard("loads", lambda: check_loads(folder, checkpoint.config)))
    return checks


def _modelling_code(folder: Path, export: Export) -> Check:
    """Whether the code beside the weights is ours; another version of this package may have written it."""
    name, beside = "modelling code", folder / export.file
    if not beside.is_file():
        return Check(name, False, f"{export.file} is missing")
    if beside.read_bytes() != modeling_file(export).read_bytes():
        return Check(name, None, f"{export.file} is not the file this package writes")
    return Check(name, True, f"{export.file} is as this package writes it")


def _guard(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Mha2gqaError as error:
        return Check(name, False, str(error))


def _shapes(checkpoint: Checkpoint) -> Check:
    spec = find_spec(checkpoint.config)
    refuse_latent(checkpoint.config, checkpoint.tensors)
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

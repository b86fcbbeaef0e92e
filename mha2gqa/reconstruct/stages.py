"""The stages after merging, for a whole model: refit, then regression, module after module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import AttentionSite, AttentionSpec, find_sites
from ..calibration import Batch, site_key
from ..errors import DataError
from .capture import gather, slice_rows
from .config import ReconstructConfig
from .refit import refit
from .regress import regress

Progress = Callable[[str, int, int], None]  # stage, done, in all


@dataclass(frozen=True)
class SiteFit:
    """How close one module came to the original's output.

    Args:
        path: The module in the student.
        merged, refitted: Relative squared error of the attention output on the rows used, at the student's
            own inputs, before and after the refit; None if it was not run.
        before, after: Relative squared error on held-out rows, before and after the regression.
    """

    path: str
    merged: float | None = None
    refitted: float | None = None
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class _Pair:
    """One module in both models."""

    site: AttentionSite
    teacher: str
    projection: str
    teacher_projection: str


def _pairs(
    teacher: nn.Module, student: nn.Module, spec: AttentionSpec, student_spec: AttentionSpec
) -> list[_Pair]:
    original = {site_key(site): site for site in find_sites(spec, teacher.state_dict().keys())}
    # In a layer, cross-attention comes after self-attention and sees what that made.
    sites = sorted(
        find_sites(student_spec, student.state_dict().keys()), key=lambda s: (s.layer, s.kind != "self")
    )
    return [
        _Pair(site, original[key].path, f"{site.path}.{student_spec.o}", f"{original[key].path}.{spec.o}")
        for site in sites
        if (key := site_key(site)) in original
    ]


def reconstruct(
    teacher: Any,
    student: Any,
    inputs: Batch | Tensor,
    config: ReconstructConfig,
    *,
    spec: AttentionSpec,
    student_spec: AttentionSpec | None = None,
    progress: Progress | None = None,
) -> list[SiteFit]:
    """Refit and regress every attention module of `student`, in place.

    Args:
        teacher: The original model, in eval mode; not changed.
        student: The merged model, in eval mode, on the same device.
        inputs: `[N, T]` token ids, or keyword tensors of both models' forward with N rows each.
        config: Which stages, and how hard.
        spec: The original's architecture.
        student_spec: The student's, where it is another.
        progress: Called with stage, modules (or steps) done, and how many there are.

    Returns:
        One entry per module, in layer order.

    Raises:
        DataError: Not even two batches of rows.

    Example:
        >>> fits = reconstruct(teacher, student, blocks[:, :-1], ReconstructConfig(), spec=spec)  # doctest: +SKIP
    """
    train, held_out = split_rows(inputs, config)
    pairs = _pairs(teacher, student, spec, student_spec or spec)
    fits = {pair.site.path: SiteFit(pair.site.path) for pair in pairs}
    if config.refit:
        for done, pair in enumerate(pairs, 1):
            before, after = refit(
                student,
                student.get_submodule(pair.projection),
                teacher,
                teacher.get_submodule(pair.teacher_projection),
                train,
                transposed=(student_spec or spec).transposed,
                ridge=config.ridge,
                batch_size=config.batch_size,
            )
            fits[pair.site.path] = SiteFit(pair.site.path, before, after)
            if progress:
                progress("refit", done, len(pairs))
    if config.regress and config.steps:
        for done, pair in enumerate(pairs):
            say = _steps(progress, done, len(pairs))
            before, after = _regress_pair(
                teacher, student, pair, train, held_out, config, student_spec or spec, say
            )
            last = fits[pair.site.path]
            fits[pair.site.path] = SiteFit(last.path, last.merged, last.refitted, before, after)
    return list(fits.values())


def _steps(progress: Progress | None, site: int, sites: int) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, steps: progress("reconstruct", site * steps + done, sites * steps)


def split_rows(inputs: Batch | Tensor, config: ReconstructConfig) -> tuple[Batch | Tensor, Batch | Tensor]:
    """Rows to fit and rows to judge by, both whole batches; the last rows are held out.

    Raises:
        DataError: There are fewer than two batches of rows.
    """
    rows = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    whole = len(rows) // config.batch_size
    if whole < 2:
        raise DataError(
            f"{len(rows)} blocks of calibration text, at least {2 * config.batch_size} are needed",
            where="--calibration",
            fix="give more text, or switch reconstruct and refit off",
        )
    held = max(1, round(whole * config.holdout)) * config.batch_size
    train = whole * config.batch_size - held
    return slice_rows(inputs, 0, train), slice_rows(inputs, train, train + held)


def trained_parameters(module: nn.Module, site: AttentionSite) -> list[nn.Parameter]:
    """The projections of one attention module, and the gains of norms with one slice per head."""
    wanted = {
        name.removeprefix(f"{site.path}.")
        for role, name in site.names.items()
        if role.split(".")[0] in ("q", "k", "v", "o", "qkv") or role in ("q_norm.weight", "k_norm.weight")
    }
    return [p for name, p in module.named_parameters() if name in wanted]


def _regress_pair(
    teacher: nn.Module,
    student: nn.Module,
    pair: _Pair,
    train: Batch | Tensor,
    held_out: Batch | Tensor,
    config: ReconstructConfig,
    spec: AttentionSpec,
    report: Callable[[int, int], None] | None,
) -> tuple[float, float]:
    """Regression of one module, in float32, cast back at the end."""
    attention = student.get_submodule(pair.site.path)
    path, target = pair.site.path, pair.teacher
    if config.scope == "block":
        path, target = path.rpartition(".")[0], target.rpartition(".")[0]
    module = student.get_submodule(path)
    own = config.mode == "sequential"
    calls = [
        gather(
            student, module, rows, config.batch_size, teacher, teacher.get_submodule(target), own_inputs=own
        )
        for rows in (train, held_out)
    ]
    parameters = trained_parameters(attention, pair.site)
    dtypes = [p.dtype for p in parameters]
    for p in parameters:
        p.data = p.data.float()
    try:
        with torch.enable_grad():
            return regress(module, parameters, calls[0], calls[1], config, report)
    finally:
        for p, dtype in zip(parameters, dtypes, strict=True):
            p.data = p.data.to(dtype)

"""Calibration of a checkpoint through its model, block by block or in memory as a whole; an unfinished one goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import distributed
from ..architectures import AttentionModule
from ..calibration import (
    Statistics,
    attention_instances,
    data_digest,
    module_key,
    writable,
)
from ..calibration.sampling import check_decoder
from ..checkpoints.dtypes import torch_dtype
from ..checkpoints.fingerprints import checkpoint_fingerprint
from ..checkpoints.hf_config import is_encoder_decoder, stored_dtype
from ..checkpoints.loading import free_memory, load_model, load_tokenizer, resolve_device
from ..checkpoints.output import targets_file
from ..checkpoints.reader import Checkpoint
from ..checkpoints.streaming import CheckpointLayers, Layers, ResidentLayers
from ..checkpoints.writer import NewTensor
from ..config.pair_options import GENERATE
from ..data import TextSource
from ..data.windows import calibration_window
from ..errors import UnsupportedModelError
from ..progress import current
from ..reconstruct import ReconstructConfig
from ..reconstruct.module_calls import block_paths
from ..reconstruct.ranks import check_shared
from .calibration_options import CALIBRATED, FLOAT32_PARAMETERS, CalibrationOptions
from .converted import Converted, NotAChain
from .in_memory import plan_model
from .inputs import Inputs, calibration_inputs, split_held_out
from .known_statistics import saved_statistics, stored_owner
from .plan import ModulePlan, Plan
from .rest_of_layers import RestOfLayers
from .result_tensors import end_to_end_bytes, end_to_end_refusal
from .rewrite import ModuleConverter, module_converters
from .sampled_text import with_generated
from .storing import as_stored
from .walked import walked
from .work_dir import WorkDir

logger = logging.getLogger("mha2gqa")


@dataclass
class Calibrated:
    """What calibration decided.

    Args:
        plan: The conversion, groupings included.
        converters: One per attention module of the checkpoint.
        about: Text, tokens, losses, seconds: for the result and the manifest.
        warnings: What the user should know.
        work: Holds the finished blocks until the result is published.
        rest: What else changed, by the names of the files.
    """

    plan: Plan
    converters: list[ModuleConverter]
    about: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    work: WorkDir | None = None
    rest: dict[str, NewTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    """What is calibrated, on what, and how far.

    Args:
        checkpoint: The source.
        plan: Its conversion, in the names of its files.
        inputs: What the model reads.
        options: Grouping, statistics.
        fit: The stages after merging; None for none.
        out: Folder that the conversion makes: what is finished is kept beside it; None keeps nothing.
        force: Start afresh where another conversion is unfinished.
        statistics: Second moments that are known already.
    """

    checkpoint: Checkpoint
    plan: Plan
    inputs: Inputs
    options: CalibrationOptions
    fit: ReconstructConfig | None
    out: Path | None
    force: bool
    statistics: Statistics | None


def check_walk(checkpoint: Checkpoint, plan: Plan, options: CalibrationOptions) -> None:
    """Refuse what a walk would fail on, before anything is written, sampled or read for it.

    Args:
        checkpoint: The source.
        plan: Its conversion.
        options: Of calibration, whose text is read.

    Raises:
        UnsupportedModelError: The model cannot be calibrated.
        UsageError: The device cannot hold distillation, the processes cannot share a step, the file of moments cannot be
            written, or the model cannot write its text.
    """
    check_calibrated(plan, checkpoint.path)
    if options.texts == (GENERATE,):
        check_decoder(checkpoint.config)
    if plan.method in CALIBRATED and options.statistics and not Path(options.statistics).exists():
        writable(options.statistics)
    fit = options.fitting(text=True)
    if fit is not None:
        _check_processes(checkpoint.config, options, fit)
    if _distils(fit):
        _check_whole(checkpoint, plan, resolve_device(options.device))


def _check_processes(config: Mapping[str, Any], options: CalibrationOptions, fit: ReconstructConfig) -> None:
    """Refuse as many processes as cannot share a step; of an encoder-decoder its pairs decide how many blocks that has."""
    window = calibration_window(config, options.tokens, options.window)
    known = fit.batch_size or not is_encoder_decoder(config)
    check_shared(fit.for_window(window).batch_size if known else None, distributed.world_size())


def check_calibrated(plan: Plan, where: object) -> None:
    """Refuse text for a model whose layers cannot be run on it one by one.

    Raises:
        UnsupportedModelError: With the reason.
    """
    if plan.spec.uncalibrated:
        raise UnsupportedModelError(
            f"cannot be calibrated: {plan.spec.uncalibrated}",
            where=where,
            fix="convert without --calibration, and uptrain the result",
        )


def _distils(fit: ReconstructConfig | None) -> bool:
    """Whether all layers are trained together, at the end."""
    return fit is not None and fit.regress and fit.distill_steps > 0


def with_model(
    checkpoint: Checkpoint,
    plan: Plan,
    options: CalibrationOptions,
    fit: ReconstructConfig | None,
    out: Path | None,
    force: bool,
) -> Calibrated:
    """Walk over the model of a checkpoint; what is finished is handed to the writer by role.

    Args:
        checkpoint: The source.
        plan: Its conversion, with neighbouring heads sharing.
        options: Text, grouping, statistics.
        fit: The stages after merging; None for none.
        out, force: As in `calibrate`.

    Raises:
        UsageError: The file of moments is of another model; or as `with_generated`.
    """
    statistics = saved_statistics(plan, checkpoint.read, options)
    options = with_generated(checkpoint, options, out)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=options.trust_remote_code)
    kept = None if out is None else targets_file(out)
    with distributed.rank_zero_first() if options.pairs.targets == GENERATE else nullcontext():
        inputs = calibration_inputs(tokenizer, checkpoint.config, options, checkpoint.path, kept)
    job = _Job(checkpoint, plan, inputs, options, fit, out, force, statistics)
    layers = _resident(checkpoint, options) if _distils(fit) else _streamed(checkpoint, options)
    try:
        return _through(job, layers)
    except NotAChain:
        del layers
        return _through(job, _resident(checkpoint, options))


def _check_whole(checkpoint: Checkpoint, plan: Plan, device: torch.device) -> None:
    """Refuse distillation end to end where both models and the optimiser do not fit, before an hour of walking.

    Raises:
        UsageError: With the bytes needed and the bytes there.
    """
    free = free_memory(device)
    itemsize = 4 if _working_dtype(checkpoint) == "float32" else stored_dtype(checkpoint.config).itemsize
    needed = end_to_end_bytes(plan, dict(checkpoint.shapes), itemsize)
    if free is not None and needed > free:
        raise end_to_end_refusal(needed, free, device)


def _through(job: _Job, layers: Layers) -> Calibrated:
    """The walk over a model whose layers are at hand, kept in a work folder where it is not in memory as a whole."""
    teacher, plan = layers.model, job.plan
    live = plan_model(teacher, plan.groups, plan.method, None, plan.seed, plan.attention, plan.wide)
    attention_instances(teacher, [s.module for s in live.modules])  # a file holds a shared module once
    live = live.regrouped({s.path: _stored_module(plan, s.module).grouping for s in live.modules})
    blocks = _blocks(teacher, live)
    if isinstance(layers, CheckpointLayers):
        layers.split(blocks)
    trains_layer = job.fit is not None and job.fit.trains_layer
    rest = RestOfLayers(teacher, job.checkpoint, live, blocks) if trains_layer else None
    work = None if job.out is None or layers.resident else WorkDir(job.out)
    try:
        if work is not None and (count := work.open(_work_keys(job, live, layers), restart=job.force)):
            logger.info("%s: going on after %d finished layers", work.root, count)
        stored = stored_owner(plan, job.checkpoint.read, job.options)
        inputs = job.inputs.to(layers.device)
        done = walked(layers, live, inputs, job.options, job.fit, job.statistics, work, stored)
    except BaseException:
        if work is not None:
            work.leave()
        raise
    made = _handed_over(job, done, work)
    if rest is not None and done.fitted_layers:
        made.rest = rest.tensors(lambda block: _tensors_of(done, block, work)())
    return made


def _blocks(model: Any, plan: Plan) -> list[str]:
    """Paths of the decoder layers of a model."""
    first = min(plan.modules, key=lambda m: m.module.layer)
    return block_paths(model, first.module)


def _handed_over(job: _Job, done: Converted, work: WorkDir | None) -> Calibrated:
    """What a walk has finished, as converters of the checkpoint's own modules."""
    checkpoint = job.checkpoint
    plan = job.plan.regrouped(
        {_stored_module(job.plan, s.module).path: s.grouping for s in done.plan.modules}
    )
    made = module_converters(plan, checkpoint.shapes, checkpoint.read, None, job.fit is not None)
    known = {module_key(m.module): m for m in done.plan.modules}
    for converter in made:
        source = known[module_key(converter.module.module)]
        report = done.reports.get(source.path, {})
        report = report | {"path": converter.module.path} if report else {}
        roles = converter.module.names
        state = _tensors_of(done, source.path, work)
        converter.finish_with(partial(_as_stored, plan, done.plan, source, state, roles, checkpoint), report)
    texts = job.options.texts
    names = texts.names if isinstance(texts, TextSource) else list(texts)
    about = {"texts": names} | job.inputs.targets | done.about
    return Calibrated(plan, made, about, [*job.inputs.warnings, *done.warnings], work)


def _tensors_of(done: Converted, path: str, work: WorkDir | None) -> Callable[[], Mapping[str, Tensor]]:
    """The converted model's tensors, when they are due: of the model in memory, or of the block of a path."""
    if work is None:
        return done.model.state_dict
    blocks = _blocks(done.model, done.plan)
    number = next(i for i, block in enumerate(blocks) if f"{path}.".startswith(f"{block}."))
    return lambda: work.get(number).tensors


def _as_stored(
    plan: Plan,
    live: Plan,
    module: ModulePlan,
    state: Callable[[], Mapping[str, Tensor]],
    names: Mapping[str, str],
    checkpoint: Checkpoint,
) -> dict[str, Tensor]:
    """A finished module as its checkpoint stores it."""
    tensors = as_stored(plan.spec, live, module, state(), names)
    dtypes = {role: torch_dtype(checkpoint.tensors[name].dtype) for role, name in names.items()}
    return {role: x.to("cpu", dtypes[role]) for role, x in tensors.items() if role in dtypes}


def _work_keys(job: _Job, plan: Plan, layers: Layers) -> dict[str, Any]:
    """Everything that decides what a walk makes; `plan` is in the names of the model."""
    seen = split_held_out(job.inputs)[0]
    moments = {} if job.statistics is None else job.statistics.about
    return {
        "source": checkpoint_fingerprint(job.checkpoint.path),
        "groups": plan.groups,
        "wide": plan.wide,
        "method": plan.method,
        "attention": list(plan.attention),
        "grouping": job.options.how(plan),
        "groupings": {m.path: [list(g) for g in m.grouping] for m in plan.modules},
        "calibration": data_digest(job.inputs.rows),
        "statistics": job.options.statistics is not None,  # a layer's moments are kept with it then
        "measured_on": moments.get("data_sha256") or data_digest(seen.read),
        "fit": None if job.fit is None else asdict(job.fit),
        "seed": plan.seed,
        "dtype": str(layers.model.dtype),
        "device": layers.device.type,
    }


def _working_dtype(checkpoint: Checkpoint) -> str:
    """float32 for models small enough to afford it, which a machine must not decide; else as stored."""
    count = sum(torch.Size(info.shape).numel() for info in checkpoint.tensors.values())
    return "float32" if count <= FLOAT32_PARAMETERS else "auto"


def _streamed(checkpoint: Checkpoint, options: CalibrationOptions) -> CheckpointLayers:
    """The source, read block by block."""
    device = resolve_device(options.device)
    stored = stored_dtype(checkpoint.config)
    name = _working_dtype(checkpoint)
    dtype = torch.float32 if name == "float32" else stored
    return CheckpointLayers(checkpoint, dtype, device, trust_remote_code=options.trust_remote_code)


def _resident(checkpoint: Checkpoint, options: CalibrationOptions) -> ResidentLayers:
    """The source in memory as a whole."""
    current().stage("loading")
    device = resolve_device(options.device)
    dtype = stored_dtype(checkpoint.config) if _working_dtype(checkpoint) == "auto" else torch.float32
    model = load_model(
        checkpoint.path, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code
    )
    return ResidentLayers(model.requires_grad_(False))


def _stored_module(plan: Plan, live: AttentionModule) -> ModulePlan:
    return next(s for s in plan.modules if module_key(s.module) == module_key(live))

"""Calibrated conversion: text and a model give moments, groupings, merged heads, and fitted weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arch_conversion import arch_converted_model
from ..architectures import AttentionModule
from ..calibration import (
    Statistics,
    attention_instances,
    collect,
    data_digest,
    fingerprint,
    load_statistics,
    module_key,
    writable,
)
from ..checkpoints.loading import free_memory, load_model, load_tokenizer, resolve_device, weight_bytes
from ..checkpoints.reader import Checkpoint
from ..data import TextSource
from ..errors import UsageError
from ..progress import Callback, Progress, reporting
from ..reconstruct import LayerFit, ReconstructConfig, distill, reconstruct
from .in_memory import assemble, plan_model
from .inputs import Inputs, calibration_inputs, held_out_loss, split_held_out
from .options import CALIBRATED, CalibrationOptions, Stage
from .plan import ATTENTION, Groupings, ModulePlan, Plan
from .rewrite import ModuleConverter
from .search import grouped
from .storing import as_stored, result_spec


@dataclass
class Calibrated:
    """What calibration decided.

    Args:
        plan: The conversion, groupings included.
        rewriters: One per attention module of the checkpoint.
        about: Text, tokens, losses, seconds: for the result and the manifest.
        warnings: What the user should know.
    """

    plan: Plan
    converters: list[ModuleConverter]
    about: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def calibrate(checkpoint: Checkpoint, plan: Plan, options: CalibrationOptions) -> Calibrated:
    """Choose groupings, merge, and fit, as far as the options and the text allow.

    The model is only loaded where text must run through it.

    Args:
        checkpoint: The source.
        plan: The conversion with neighbouring heads sharing.
        options: Text and stages.

    Returns:
        The plan with groupings, and rewriters that give the new tensors.

    Raises:
        UsageError: Options that need text, or contradict the method.
        DataError: The text is too short.
    """
    fitted, told = options.fitted(bool(options.texts)), list[str]()
    options.how(plan)
    if options.statistics and plan.method not in CALIBRATED:
        options = replace(options, statistics=None)
        told.append(f"method {plan.method} uses no statistics: --statistics is left alone")
    if options.texts and all(module.unchanged for module in plan.modules):
        told.append("nothing to share: calibration text is not used")
        return Calibrated(plan, _converters(plan, checkpoint.shapes, checkpoint.read, None), warnings=told)
    stored = options.statistics is not None and Path(options.statistics).exists()
    if options.texts and (fitted is not None or not stored):
        made = _with_model(checkpoint, plan, options, fitted)
        return replace(made, warnings=told + made.warnings)
    if options.texts:
        told.append(f"the moments in {options.statistics} are used: calibration text is not read")
    statistics = None
    if options.statistics:
        statistics = load_statistics(options.statistics)
        _check_owner(statistics, plan, checkpoint.read)
    plan, facts = grouped(plan, checkpoint.read, statistics, options)
    device = resolve_device(options.device) if plan.method in CALIBRATED else torch.device("cpu")
    converters = _converters(
        plan, checkpoint.shapes, lambda name: checkpoint.read(name).to(device), statistics
    )
    for converter in converters:
        converter.facts = facts.get(converter.module.path, {})
    return Calibrated(plan, converters, _about(statistics), told + _notes(statistics))


def _converters(
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
    statistics: Statistics | None,
    fitted: bool = False,
) -> list[ModuleConverter]:
    return [ModuleConverter(plan, module, shapes, read, statistics, fitted) for module in plan.modules]


def _about(statistics: Statistics | None) -> dict[str, Any]:
    return {} if statistics is None else {"statistics": dict(statistics.about)}


def _notes(statistics: Statistics | None) -> list[str]:
    return [] if statistics is None else list(statistics.about.get("notes", []))


def _check_owner(statistics: Statistics, plan: Plan, read: Callable[[str], Tensor]) -> None:
    owner = statistics.about.get("model")
    if owner and owner != fingerprint([module.module for module in plan.modules], read):
        raise UsageError(
            "measured on another model", where="--statistics", fix="give another file name or remove the file"
        )


# --- in memory -----------------------------------------------------------------------------------------


@dataclass
class Converted:
    """A model converted in memory.

    Args:
        model: The result.
        plan: How, in the names of the original's state dict.
        rewriters: One per attention module, with its report.
        about, warnings: As in `Calibrated`.
    """

    model: Any
    plan: Plan
    converters: list[ModuleConverter]
    about: dict[str, Any]
    warnings: list[str]


def convert_live(teacher: Any, plan: Plan, inputs: Inputs | None, options: CalibrationOptions) -> Converted:
    """Merge a model in memory and fit it on text.

    Args:
        teacher: The original, in eval mode; not changed.
        plan: From `plan_model`; its groupings are neighbours unless the options say `given`.
        inputs: What the model reads, on its device; None uses the weights (or saved statistics) alone.
        options: Grouping, stages, statistics.
    """
    fitted = options.fitted(inputs is not None)
    clock, state = _Clock(), teacher.state_dict()
    seen, kept = (None, None) if inputs is None else split_held_out(inputs)
    with clock("statistics"):
        statistics = _statistics(teacher, plan, state, seen, options)
    with clock("grouping"):
        plan, facts = grouped(plan, state.__getitem__, statistics, options)
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    converters = _converters(plan, shapes, state.__getitem__, statistics)
    for converter in converters:
        converter.facts = dict(facts.get(converter.module.path, {}))
    with clock("merge"):
        student = assemble(teacher, plan, converters, state)
    result = Converted(student, plan, converters, _about(statistics), _notes(statistics))
    if statistics and seen is not None and statistics.about.get("data_sha256") != data_digest(seen.read):
        result.warnings.append(
            f"the moments in {options.statistics} were measured on other text than --calibration, and are used; "
            "remove the file to measure them again"
        )
    if seen is not None:
        result.about |= {"unique_tokens": seen.tokens, "window": seen.window}
    if seen is not None and kept is not None:
        losses = {"original": held_out_loss(teacher, kept), "merged": held_out_loss(student, kept)}
        result.about["losses"] = losses
        if fitted is not None:
            with clock("fit"):
                _fit(teacher, result, seen, fitted, options)
            losses["fitted"] = held_out_loss(student, kept)
    elif fitted is not None and seen is not None:
        result.warnings.append(
            f"{len(seen)} blocks of {seen.window} tokens are too few to fit modules and to judge the fit: "
            "refit and reconstruct are left out"
        )
    result.about |= {"seconds": clock.seconds} if inputs is not None else {}
    return result


class _Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - began, 2)


def _statistics(
    teacher: Any, plan: Plan, state: Mapping[str, Tensor], inputs: Inputs | None, options: CalibrationOptions
) -> Statistics | None:
    """Moments, from the file if it exists (and kept there if not); none where the method has no use for them."""
    if plan.method not in CALIBRATED:
        return None
    path = Path(options.statistics) if options.statistics else None
    if path and (path.exists() or inputs is None):
        statistics = load_statistics(path)
        _check_owner(statistics, plan, state.__getitem__)
        return statistics
    if inputs is None:
        return None
    statistics = collect(
        teacher, plan.spec, inputs.read, progress=lambda done, total: options.say("statistics", done, total)
    )
    if path:
        statistics.save(path)
    return statistics


def _fit(
    teacher: Any, result: Converted, inputs: Inputs, fitted: ReconstructConfig, options: CalibrationOptions
) -> None:
    """Fit the merged model; errors go into the modules' reports."""
    fitted = fitted.for_window(inputs.window)
    fitted = replace(fitted, batch_size=min(fitted.batch_size, max(1, len(inputs) // 8)))
    fits: list[LayerFit] = []
    shared = {module_key(s.module) for s in result.plan.modules if not s.unchanged}  # only these are written

    def progress(fit: LayerFit) -> None:
        fits.append(fit)
        options.say("fitting", len(fits), len(shared))

    spec = result.plan.spec
    own = result_spec(spec, result.plan)
    reconstruct(teacher, result.model, spec, inputs.read, fitted, progress, student_spec=own, only=shared)
    reports = {r.module.path: r.report for r in result.converters}
    for fit in fits:
        errors = {"error_merged": fit.before, "error_refitted": fit.refitted, "error_fitted": fit.after}
        reports[fit.path] |= {name: x for name, x in errors.items() if x is not None}
    most = max((fit.steps for fit in fits), default=0)
    each = fitted.batch_size * inputs.window
    result.about |= {"fit": asdict(fitted), "token_visits": most * each}
    if shared and fitted.regress and fitted.distill_steps:
        done = distill(
            teacher,
            result.model,
            spec,
            inputs.read,
            fitted,
            lambda step, steps: options.say("distilling", step, steps),
            student_spec=own,
            only=shared,
        )
        result.about |= {"distilled": asdict(done), "distilled_token_visits": done.steps * each}


# --- a checkpoint, through its model -------------------------------------------------------------------


def _with_model(
    checkpoint: Checkpoint, plan: Plan, options: CalibrationOptions, fitted: ReconstructConfig | None
) -> Calibrated:
    """Run the model on the text; merge and fit in memory; hand the tensors to the writer by role."""
    if options.statistics and not Path(options.statistics).exists():
        writable(options.statistics)  # before the text is run, which may take an hour
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=options.trust_remote_code)
    inputs = calibration_inputs(tokenizer, checkpoint.config, options)
    teacher = _load_teacher(checkpoint, options)
    live = plan_model(teacher, plan.num_kv_heads[1], plan.method, None, plan.seed, plan.attention)
    attention_instances(teacher, [s.module for s in live.modules])  # a file holds a shared module once
    live = live.regrouped({s.path: _stored_module(plan, s.module).grouping for s in live.modules})
    done = convert_live(teacher, live, inputs.to(teacher.device), options)
    plan = plan.regrouped({_stored_module(plan, s.module).module.path: s.grouping for s in done.plan.modules})
    made = _converters(plan, checkpoint.shapes, checkpoint.read, None, fitted is not None)
    after = done.model.state_dict()
    for converter in made:
        source = next(
            r for r in done.converters if module_key(r.module.module) == module_key(converter.module.module)
        )
        tensors = as_stored(plan.spec, done.plan, source, after, converter.module.names)
        dtypes = {role: checkpoint.read(name).dtype for role, name in converter.names.items()}
        report = source.report | {"path": converter.module.path} if source.report else {}
        converter.set({role: tensors[role].to("cpu", dtype) for role, dtype in dtypes.items()}, report)
    names = options.texts.names if isinstance(options.texts, TextSource) else list(options.texts)
    return Calibrated(plan, made, {"texts": names} | done.about, [*inputs.warnings, *done.warnings])


def _load_teacher(checkpoint: Checkpoint, options: CalibrationOptions) -> Any:
    """The source in float32 where two copies fit the device, else as stored."""
    options.say("loading", 0, 1)
    device = resolve_device(options.device)
    free, stored = free_memory(device), weight_bytes(checkpoint.path) or 0
    wide = 2 * stored * (4 / max(1, _itemsize(checkpoint)))
    dtype = "float32" if free is None or wide < 0.6 * free else "auto"
    model = load_model(
        checkpoint.path, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code
    )
    return model.requires_grad_(False)


def _itemsize(checkpoint: Checkpoint) -> float:
    infos = checkpoint.tensors.values()
    return checkpoint.nbytes / max(1, sum(torch.Size(info.shape).numel() for info in infos))


def _stored_module(plan: Plan, live: AttentionModule) -> ModulePlan:
    return next(s for s in plan.modules if module_key(s.module) == module_key(live))


# --- public --------------------------------------------------------------------------------------------


def convert_model(
    model: Any,
    groups: int,
    *,
    method: str | None = None,
    calibration: Tensor | Mapping[str, Tensor] | None = None,
    statistics: str | None = None,
    grouping: str | None = None,
    groupings: Groupings | None = None,
    refit: bool | None = None,
    reconstruct: bool | None = None,
    fit: ReconstructConfig | None = None,
    seed: int = 0,
    as_: str = "auto",
    attention: Sequence[str] = ATTENTION,
    progress: Progress | None = None,
    stage: Stage | None = None,
) -> Any:
    """Convert a model in memory; the given one stays as it is.

    Args:
        model: A `transformers` model of a supported architecture.
        groups: KV heads G to reach.
        method: A key of `MERGERS`; None is `joint` with calibration or statistics, else `mean`.
        calibration: Token blocks `[N, T + 1]` (`data.token_blocks`); for an encoder-decoder keyword tensors
            with N rows each: `input_ids`, `decoder_input_ids`, `labels`.
        statistics: File of saved moments: used if it exists, else written.
        grouping: `neighbours`, `search` (the default of `joint` and `align`) or a file of partitions.
        groupings: Which heads share, by module path, instead of `grouping`.
        refit, reconstruct: Stages after merging; on with calibration.
        fit: How hard those two try.
        seed: For methods that draw numbers, and the order of blocks.
        as_: As `convert` takes it: which architecture the result is written in.
        attention: Kinds of decoder attention to share (`self`, `cross`), of those the model has.
        progress: Whom to report to.
        stage: The older form of `progress`: called with a stage, what is done of it, and how much there is.

    Returns:
        A working model with its own tensors, in eval mode: of the same class, of the stock class it is re-expressed as,
        or of the class exported beside checkpoints whose stock class has no KV-head count (its code travels
        with `save_pretrained`).

    Example:
        >>> blocks = token_blocks(tokenizer, read_documents("train.jsonl"), 512)  # doctest: +SKIP
        >>> small = convert_model(model, groups=8, calibration=blocks)  # doctest: +SKIP
    """
    method = method or ("joint" if calibration is not None or statistics else "mean")
    model = arch_converted_model(model, groups, as_)
    plan = plan_model(model, groups, method, groupings, seed, attention)
    device = next(model.parameters()).device
    options = CalibrationOptions(
        statistics=statistics,
        grouping=grouping if groupings is None else "given",
        refit=refit,
        reconstruct=reconstruct,
        fit=fit or ReconstructConfig(),
        device=str(device),
        seed=seed,
    )
    inputs = None if calibration is None else Inputs(calibration).to(device)
    with reporting(progress or (Callback(stage) if stage else None)):
        return convert_live(model, plan, inputs, options).model

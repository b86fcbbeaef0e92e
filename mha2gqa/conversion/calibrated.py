"""Calibrated conversion: text and a model give moments, groupings, merged heads, and fitted weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arch_conversion import arch_converted_model
from ..architectures import AttentionModule
from ..architectures.wide import stored_heads
from ..calibration import (
    Statistics,
    attention_instances,
    data_digest,
    fingerprint,
    load_statistics,
    module_key,
    writable,
)
from ..checkpoints.dtypes import torch_dtype
from ..checkpoints.fingerprints import checkpoint_fingerprint
from ..checkpoints.hf_config import stored_dtype
from ..checkpoints.loading import load_model, load_tokenizer, resolve_device
from ..checkpoints.reader import Checkpoint
from ..checkpoints.streaming import CheckpointLayers, Layers, ResidentLayers
from ..config.convert import DEFAULT_METHOD
from ..config.given import require_model
from ..data import TextSource
from ..errors import UsageError
from ..progress import Callback, Progress, current, reporting
from ..reconstruct import ReconstructConfig, distill
from ..reconstruct.hidden_states import block_paths
from .in_memory import assemble, plan_model
from .inputs import Inputs, calibration_inputs, held_out_loss, split_held_out
from .options import CALIBRATED, CalibrationOptions, Stage
from .plan import ATTENTION, Groupings, ModulePlan, Plan
from .rewrite import ModuleConverter
from .search import grouped
from .storing import as_stored, result_spec
from .walk import Converted, NotAChain, Walk, fit_config
from .warnings import data_free_warnings
from .work_dir import WorkDir

logger = logging.getLogger("mha2gqa")
FLOAT32_PARAMETERS = 10**9  # models up to this size are worked on in float32


@dataclass
class Calibrated:
    """What calibration decided.

    Args:
        plan: The conversion, groupings included.
        converters: One per attention module of the checkpoint.
        about: Text, tokens, losses, seconds: for the result and the manifest.
        warnings: What the user should know.
        work: Holds the finished blocks until the result is published.
    """

    plan: Plan
    converters: list[ModuleConverter]
    about: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    work: WorkDir | None = None


def calibrate(
    checkpoint: Checkpoint,
    plan: Plan,
    options: CalibrationOptions,
    out: Path | None = None,
    force: bool = False,
) -> Calibrated:
    """Choose groupings, merge, and fit, as far as the options and the text allow.

    The model is only loaded where text must run through it.

    Args:
        checkpoint: The source.
        plan: The conversion with neighbouring heads sharing.
        options: Text and stages.
        out: Folder that the conversion makes: what is finished is kept beside it until then.
        force: Start afresh where another conversion is unfinished.

    Returns:
        The plan with groupings, and converters that give the new tensors.

    Raises:
        UsageError: Options that need text, or contradict the method.
        DataError: The text is too short.
    """
    fitted, warnings = options.fitted(bool(options.texts)), list[str]()
    options.how(plan)
    if options.statistics and plan.method not in CALIBRATED:
        options = replace(options, statistics=None)
        warnings.append(f"method {plan.method} uses no statistics: --statistics is left alone")
    if options.texts and all(module.unchanged for module in plan.modules):
        warnings.append("nothing to share: calibration text is not used")
        return Calibrated(
            plan, _converters(plan, checkpoint.shapes, checkpoint.read, None), warnings=warnings
        )
    stored = options.statistics is not None and Path(options.statistics).exists()
    if options.texts and (fitted is not None or not stored):
        made = _with_model(checkpoint, plan, options, fitted, out, force)
        return replace(made, warnings=warnings + made.warnings)
    if options.texts:
        warnings.append(f"the moments in {options.statistics} are used: calibration text is not read")
    statistics = None
    if options.statistics:
        statistics = load_statistics(options.statistics)
        _check_owner(statistics, plan, checkpoint.read)
    plan, fields = grouped(plan, checkpoint.read, statistics, options)
    device = resolve_device(options.device) if plan.method in CALIBRATED else torch.device("cpu")
    converters = _converters(
        plan, checkpoint.shapes, lambda name: checkpoint.read(name).to(device), statistics
    )
    for converter in converters:
        converter.fields = fields.get(converter.module.path, {})
    return Calibrated(plan, converters, _about(statistics), warnings + _statistics_warnings(statistics))


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


def _statistics_warnings(statistics: Statistics | None) -> list[str]:
    return [] if statistics is None else list(statistics.about.get("notes", []))


def _check_owner(statistics: Statistics, plan: Plan, read: Callable[[str], Tensor]) -> None:
    owner = statistics.about.get("model")
    if owner and owner != fingerprint([module.module for module in plan.modules], read):
        raise UsageError(
            "measured on another model", where="--statistics", fix="give another file name or remove the file"
        )


# --- in memory -----------------------------------------------------------------------------------------


def convert_live(teacher: Any, plan: Plan, inputs: Inputs | None, options: CalibrationOptions) -> Converted:
    """Merge a model in memory and fit it on text.

    Args:
        teacher: The original, in eval mode; not changed.
        plan: From `plan_model`; its groupings are neighbours unless the options say `given`.
        inputs: What the model reads, on its device; None uses the weights (or saved statistics) alone.
        options: Grouping, stages, statistics.
    """
    fitted = options.fitted(inputs is not None)
    state = teacher.state_dict()
    statistics = _saved_statistics(plan, state.__getitem__, options)
    if inputs is not None:
        return _walked(ResidentLayers(teacher), plan, inputs, options, fitted, statistics)
    plan, fields = grouped(plan, state.__getitem__, statistics, options)
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    converters = _converters(plan, shapes, state.__getitem__, statistics)
    for converter in converters:
        converter.fields = dict(fields.get(converter.module.path, {}))
    model = assemble(teacher, plan, converters, state)
    reports = {c.module.path: c.report for c in converters}
    return Converted(model, plan, reports, _about(statistics), _statistics_warnings(statistics))


def _walked(
    layers: Layers,
    plan: Plan,
    inputs: Inputs,
    options: CalibrationOptions,
    fitted: ReconstructConfig | None,
    statistics: Statistics | None,
    work: WorkDir | None = None,
) -> Converted:
    """Walk over the blocks of a model, and train it end to end where the options ask for it."""
    warnings = []
    seen, kept = split_held_out(inputs)
    if kept is None and fitted is not None:
        warnings.append(
            f"{len(seen)} blocks of {seen.window} tokens are too few to fit modules and to judge the fit: "
            "refit and reconstruct are left out"
        )
        fitted = None
    how = options.how(plan)
    if how not in ("neighbours", "search", "given"):
        plan, _ = grouped(plan, _unread, None, options)
    if statistics is not None and statistics.about.get("data_sha256") != data_digest(seen.read):
        warnings.append(
            f"the moments in {options.statistics} were measured on other text than --calibration, and are used; "
            "remove the file to measure them again"
        )
    config = None if fitted is None else fit_config(fitted, seen)
    done = Walk(layers, plan, seen, kept, options, config, work, statistics).run()
    done.warnings += warnings
    if config is not None and config.regress and config.distill_steps:
        _distil(layers.model, done, seen, kept, config)
    return done


def _unread(name: str) -> Tensor:
    raise AssertionError(f"{name} is not needed to read groupings")


def _distil(
    teacher: Any, done: Converted, seen: Inputs, kept: Inputs | None, config: ReconstructConfig
) -> None:
    """Train the fitted model end to end; its losses and steps go into the result."""
    shared = {module_key(m.module) for m in done.plan.modules if not m.unchanged}
    if not shared:
        return
    shown = current()
    shown.stage("distilling", config.distill_steps, "steps")
    made = distill(
        teacher,
        done.model,
        done.plan.spec,
        seen.read,
        config,
        lambda step, steps: shown.advance(step),
        student_spec=result_spec(done.plan.spec, done.plan),
        only=shared,
    )
    done.about |= {"distilled": asdict(made)}
    done.about |= {"distilled_token_visits": made.steps * config.batch_size * seen.window}
    if kept is not None:
        done.about["losses"]["fitted"] = held_out_loss(done.model, kept)


def _saved_statistics(
    plan: Plan, read: Callable[[str], Tensor], options: CalibrationOptions
) -> Statistics | None:
    """Moments from the file, if the method has a use for them and the file exists."""
    if plan.method not in CALIBRATED or not options.statistics or not Path(options.statistics).exists():
        return None
    statistics = load_statistics(options.statistics)
    _check_owner(statistics, plan, read)
    return statistics


# --- a checkpoint, through its model -------------------------------------------------------------------


def _with_model(
    checkpoint: Checkpoint,
    plan: Plan,
    options: CalibrationOptions,
    fitted: ReconstructConfig | None,
    out: Path | None,
    force: bool,
) -> Calibrated:
    """Walk over the model of a checkpoint; what is finished is handed to the writer by role."""
    if options.statistics and not Path(options.statistics).exists():
        writable(options.statistics)  # before the text is run, which may take an hour
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=options.trust_remote_code)
    inputs = calibration_inputs(tokenizer, checkpoint.config, options, checkpoint.path)
    whole = fitted is not None and fitted.regress and fitted.distill_steps > 0
    layers = _resident(checkpoint, options) if whole else _streamed(checkpoint, options)
    try:
        return _through(layers, checkpoint, plan, inputs, options, fitted, out, force)
    except NotAChain:
        del layers
        return _through(_resident(checkpoint, options), checkpoint, plan, inputs, options, fitted, out, force)


def _through(
    layers: Layers,
    checkpoint: Checkpoint,
    plan: Plan,
    inputs: Inputs,
    options: CalibrationOptions,
    fitted: ReconstructConfig | None,
    out: Path | None,
    force: bool,
) -> Calibrated:
    teacher = layers.model
    live = plan_model(teacher, plan.groups, plan.method, None, plan.seed, plan.attention, plan.wide)
    attention_instances(teacher, [s.module for s in live.modules])  # a file holds a shared module once
    live = live.regrouped({s.path: _stored_module(plan, s.module).grouping for s in live.modules})
    if isinstance(layers, CheckpointLayers):
        first = min(live.modules, key=lambda m: m.module.layer)
        layers.split(block_paths(teacher, first.path, first.module.layer))
    work = None if out is None or layers.resident else WorkDir(out)
    try:
        if work is not None:
            keys = _work_keys(checkpoint, live, inputs, options, fitted, layers)
            if count := work.open(keys, restart=force):
                logger.info("%s: going on after %d finished layers", work.root, count)
        statistics = _saved_statistics(plan, checkpoint.read, options)
        done = _walked(layers, live, inputs.to(layers.device), options, fitted, statistics, work)
    except BaseException:
        if work is not None:
            work.close()
        raise
    return _handed_over(done, checkpoint, plan, inputs, options, fitted, work)


def _handed_over(
    done: Converted,
    checkpoint: Checkpoint,
    plan: Plan,
    inputs: Inputs,
    options: CalibrationOptions,
    fitted: ReconstructConfig | None,
    work: WorkDir | None,
) -> Calibrated:
    """What a walk has finished, as converters of the checkpoint's own modules."""
    plan = plan.regrouped({_stored_module(plan, s.module).path: s.grouping for s in done.plan.modules})
    made = _converters(plan, checkpoint.shapes, checkpoint.read, None, fitted is not None)
    known = {module_key(m.module): m for m in done.plan.modules}
    for converter in made:
        source = known[module_key(converter.module.module)]
        report = done.reports.get(source.path, {})
        report = report | {"path": converter.module.path} if report else {}
        roles = converter.module.names
        state = _state_of(done, source, work)
        converter.finish_with(partial(_as_stored, plan, done.plan, source, state, roles, checkpoint), report)
    names = options.texts.names if isinstance(options.texts, TextSource) else list(options.texts)
    about = {"texts": names} | done.about
    return Calibrated(plan, made, about, [*inputs.warnings, *done.warnings], work)


def _state_of(
    done: Converted, module: ModulePlan, work: WorkDir | None
) -> Callable[[], Mapping[str, Tensor]]:
    """The converted model's tensors, when they are due: of the model in memory, or of the finished block."""
    if work is None:
        return done.model.state_dict
    blocks = block_paths(done.model, module.path, module.module.layer)
    number = next(i for i, block in enumerate(blocks) if module.path.startswith(f"{block}."))
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


def _work_keys(
    checkpoint: Checkpoint,
    plan: Plan,
    inputs: Inputs,
    options: CalibrationOptions,
    fitted: ReconstructConfig | None,
    layers: Layers,
) -> dict[str, Any]:
    """Everything that decides what a walk makes."""
    return {
        "source": checkpoint_fingerprint(checkpoint.path),
        "groups": plan.groups,
        "wide": plan.wide,
        "method": plan.method,
        "attention": list(plan.attention),
        "grouping": options.how(plan),
        "groupings": {m.path: [list(g) for g in m.grouping] for m in plan.modules},
        "calibration": data_digest(inputs.rows),
        "statistics": None if options.statistics is None else str(options.statistics),
        "fit": None if fitted is None else asdict(fitted),
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


# --- public --------------------------------------------------------------------------------------------


def convert_model(
    model: Any,
    groups: int,
    *,
    method: str | None = DEFAULT_METHOD,
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
    wide: int = 1,
    progress: Progress | None = None,
    stage: Stage | None = None,
) -> Any:
    """Convert a model in memory; the given one stays as it is.

    Args:
        model: A `transformers` model of a supported architecture.
        groups: KV heads G to reach.
        method: A key of `MERGERS`.
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
        wide: R: G / R KV heads that are R times as wide in place of G.
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
    require_model("model", model)
    method = method or DEFAULT_METHOD
    model = arch_converted_model(model, stored_heads(groups, wide), as_)
    plan = plan_model(model, groups, method, groupings, seed, attention, wide)
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
    if inputs is None and statistics is None:
        for sentence in data_free_warnings(plan):
            logger.warning("%s", sentence)
    with reporting(progress or (Callback(stage) if stage else None)):
        return convert_live(model, plan, inputs, options).model

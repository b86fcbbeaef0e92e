"""Calibrated conversion: text and a model give second moments, groupings, merged heads, and fitted weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arch_conversion import arch_converted_model
from ..architectures import check_read
from ..architectures.wide import stored_heads
from ..calibration import (
    load_statistics,
)
from ..checkpoints.in_memory_model import digest, require_class, require_language_model, require_whole
from ..checkpoints.loading import resolve_device
from ..checkpoints.reader import Checkpoint
from ..checkpoints.streaming import ResidentLayers
from ..config.convert import DEFAULT_METHOD, ConvertConfig
from ..config.option import taken
from ..config.reconstruct import Effort, with_effort
from ..config.signature import names_in_python
from ..progress import Callback, Progress, reporting
from ..reconstruct import ReconstructConfig
from .calibration_options import CALIBRATED, CalibrationOptions, Stage, grouping_asked
from .converted import Converted
from .in_memory import assemble, keep_trainable, plan_model
from .inputs import Inputs, given_inputs
from .known_statistics import (
    about_statistics,
    check_owner,
    other_weights,
    saved_statistics,
    statistics_warnings,
)
from .plan import ATTENTION, Groupings, Plan
from .rewrite import module_converters
from .search import grouped
from .through_model import Calibrated, check_calibrated, with_model
from .walked import walked
from .warnings import data_free_warnings

logger = logging.getLogger("mha2gqa")


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
        UsageError: Options that need text.
        DataError: The text is too short.
    """
    fit = options.fitting(bool(options.texts))
    warnings = options.without_effect(plan, fit)
    if plan.method not in CALIBRATED:
        options = replace(options, statistics=None)
    if options.texts and all(module.unchanged for module in plan.modules):
        warnings.append("nothing to share: calibration text is not used")
        return Calibrated(
            plan, module_converters(plan, checkpoint.shapes, checkpoint.read, None), warnings=warnings
        )
    if options.reads_text(plan):
        made = with_model(checkpoint, plan, options, fit, out, force)
        return replace(made, warnings=warnings + made.warnings)
    if options.texts:
        warnings.append(f"the second moments in {options.statistics} are used: calibration text is not read")
    statistics = None
    if options.statistics:
        statistics = load_statistics(options.statistics)
        check_owner(statistics, plan, checkpoint.read)
        warnings += other_weights(statistics, options)
    plan, fields = grouped(plan, checkpoint.read, statistics, options)
    device = resolve_device(options.device) if plan.method in CALIBRATED else torch.device("cpu")
    converters = module_converters(
        plan, checkpoint.shapes, lambda name: checkpoint.read(name).to(device), statistics
    )
    for converter in converters:
        converter.fields = fields.get(converter.module.path, {})
    return Calibrated(
        plan, converters, about_statistics(statistics), warnings + statistics_warnings(statistics)
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
    if inputs is not None:
        check_calibrated(plan, type(teacher).__name__)
    fit = options.fitting(inputs is not None)
    warnings = options.without_effect(plan, fit)
    if plan.method not in CALIBRATED:
        options = replace(options, statistics=None)
    state = teacher.state_dict()
    if inputs is not None:
        statistics = saved_statistics(plan, state.__getitem__, options)
        made = walked(ResidentLayers(teacher), plan, inputs, options, fit, statistics)
        return replace(made, warnings=warnings + made.warnings)
    statistics = None
    if options.statistics:
        statistics = load_statistics(options.statistics)
        check_owner(statistics, plan, state.__getitem__)
        warnings += other_weights(statistics, options)
    plan, fields = grouped(plan, state.__getitem__, statistics, options)
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    converters = module_converters(plan, shapes, state.__getitem__, statistics)
    for converter in converters:
        converter.fields = dict(fields.get(converter.module.path, {}))
    model = assemble(teacher, plan, converters, state)
    reports = {c.module.path: c.report for c in converters}
    warnings += statistics_warnings(statistics)
    return Converted(model, plan, reports, about_statistics(statistics), warnings)


# --- public --------------------------------------------------------------------------------------------


@names_in_python(ConvertConfig)
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
    fit: ReconstructConfig | Mapping[str, Any] | None = None,
    effort: Effort | None = None,
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
            with N rows each: `input_ids`, `decoder_input_ids`, `labels`. The model must have its output head.
        statistics: File of saved second moments: used if it exists, else written.
        grouping: `neighbours`, `search` (the default of `joint` and `align`) or a file of partitions.
        groupings: Which heads share, by module path, instead of `grouping`.
        refit, reconstruct: Stages after merging; on with calibration.
        fit: How hard those two try; a mapping of its fields will do.
        effort: The same in a word: `quick`, `normal` or `thorough`.
        seed: For methods that draw numbers, and the order of blocks.
        as_: As `convert` takes it: which architecture the result is written in.
        attention: Kinds of decoder attention to share (`self`, `cross`), of those the model has.
        wide: R: G / R KV heads that are R times as wide in place of G.
        progress: Whom to report to.
        stage: The older form of `progress`: called with a stage, what is done of it, and how much there is.

    Returns:
        A working model with its own tensors, in eval mode: of the same class, of the stock class it is written as,
        or of the class exported beside checkpoints whose stock class has no KV-head count (its code travels
        with `save_pretrained`). Parameters ask for gradients as those of the same name in `model` do, new ones do.

    Raises:
        UsageError, UnsupportedModelError: Arguments or the model are invalid, or its weights are not all here.

    Example:
        >>> blocks = token_blocks(tokenizer, read_documents("train.jsonl"), 2048)  # doctest: +SKIP
        >>> small = convert_model(model, groups=8, calibration=blocks)  # doctest: +SKIP
    """
    require_whole("model", model)
    given = taken(
        ConvertConfig,
        {
            "method": method,
            "statistics": statistics,
            "refit": refit,
            "reconstruct": reconstruct,
            "seed": seed,
            "as_": as_,
            "attention": attention,
            "wide": wide,
            "grouping": grouping_asked(grouping, groupings),
        },
    )
    method, wide = given["method"] or DEFAULT_METHOD, given["wide"]
    original, model = model, arch_converted_model(model, stored_heads(groups, wide), given["as_"])
    plan = plan_model(model, groups, method, groupings, given["seed"], given["attention"], wide)
    require_class("model", original)
    if plan.export is not None:  # one class for each type, with its head
        require_language_model("model", original)
    options = CalibrationOptions(
        statistics=given["statistics"],
        grouping=given["grouping"],
        refit=given["refit"],
        reconstruct=given["reconstruct"],
        fit=with_effort(effort, fit),
        device=str(next(model.parameters()).device),
        seed=given["seed"],
        weights=f"memory {digest(original.state_dict())}" if given["statistics"] else "",
    )
    inputs = None if calibration is None else _live_inputs(calibration, model, plan)
    if inputs is None and statistics is None:
        for sentence in data_free_warnings(plan):
            logger.warning("%s", sentence)
    with reporting(progress or (Callback(stage) if stage else None)):
        made = convert_live(model, plan, inputs, options)
    for sentence in made.warnings:
        logger.warning("%s", sentence)
    return keep_trainable(made.model, original)


def _live_inputs(calibration: Tensor | Mapping[str, Tensor], model: Any, plan: Plan) -> Inputs:
    """What a model in memory reads, on its device.

    Raises:
        UsageError, UnsupportedModelError: The model cannot read it, or has no output head.
    """
    check_read(plan.source, "--calibration")
    require_language_model("model", model)
    return given_inputs(calibration, model, plan.source).to(next(model.parameters()).device)

"""A model converted by a walk over its blocks, and trained end to end where the options ask for it."""

from __future__ import annotations

from dataclasses import asdict
from threading import Lock
from typing import Any

from ..calibration import (
    Statistics,
    data_digest,
    module_key,
)
from ..checkpoints.streaming import Layers
from ..progress import current
from ..reconstruct import ReconstructConfig, distill
from ..reconstruct.train_state import undisturbed
from .calibration_options import CalibrationOptions
from .converted import Converted, fit_config, small_batches
from .inputs import Inputs, held_out_loss, split_held_out
from .known_statistics import other_weights
from .plan import Plan
from .search import with_groupings
from .storing import result_spec
from .walk import Walk
from .work_dir import WorkDir

_ONE_AT_A_TIME = Lock()


def walked(
    layers: Layers,
    plan: Plan,
    inputs: Inputs,
    options: CalibrationOptions,
    fit: ReconstructConfig | None,
    statistics: Statistics | None,
    work: WorkDir | None = None,
    stored: str | None = None,
) -> Converted:
    """Walk over the blocks of a model, and train it end to end where the options ask for it.

    One walk at a time in a process: attention is observed, and kernels are chosen, for all of it.
    """
    warnings = []
    seen, kept = split_held_out(inputs)
    if kept is None and fit is not None:
        warnings.append(
            f"{seen.counted} are too few to fit modules and to judge the fit: refit and reconstruct are left out"
        )
        fit = None
    plan, options = with_groupings(plan, options)
    warnings += other_weights(statistics, options)
    if statistics is not None and statistics.about.get("data_sha256") != data_digest(seen.read):
        warnings.append(
            f"the second moments in {options.statistics} were measured on other text than --calibration, or on blocks of "
            "another length, and are used; remove the file to measure them again"
        )
    config = None if fit is None else fit_config(fit, seen)
    if fit is not None and config is not None:
        warnings += small_batches(fit, config, seen)
    with _ONE_AT_A_TIME, undisturbed(layers.device):
        done = Walk(
            layers=layers,
            plan=plan,
            inputs=seen,
            validation=kept,
            options=options,
            config=config,
            work=work,
            statistics=statistics,
            stored=stored,
        ).run()
        if config is not None and config.regress and config.distill_steps:
            _distil(layers.model, done, seen, kept, config)
    done.warnings += warnings
    return done


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

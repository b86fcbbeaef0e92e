"""Second moments that were measured before: reading them, and what the result says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..calibration import Statistics, fingerprint, load_statistics
from ..errors import UsageError
from .calibration_options import CALIBRATED, CalibrationOptions
from .plan import Plan


def saved_statistics(
    plan: Plan, read: Callable[[str], Tensor], options: CalibrationOptions
) -> Statistics | None:
    """Moments from the file, if the method has a use for them and the file exists."""
    if plan.method not in CALIBRATED or not options.statistics or not Path(options.statistics).exists():
        return None
    statistics = load_statistics(options.statistics)
    check_owner(statistics, plan, read)
    return statistics


def check_owner(statistics: Statistics, plan: Plan, read: Callable[[str], Tensor]) -> None:
    """Refuse statistics of another model.

    Raises:
        UsageError: They were measured on other weights.
    """
    owners = {statistics.about[key] for key in ("model", "stored") if statistics.about.get(key)}
    if owners and fingerprint([module.module for module in plan.modules], read) not in owners:
        raise UsageError(
            "measured on another model", where="--statistics", fix="give another file name or remove the file"
        )


def other_weights(statistics: Statistics | None, options: CalibrationOptions) -> list[str]:
    """A warning of statistics of other weights; attention is the same, or they were refused (`check_owner`)."""
    before, now = "" if statistics is None else statistics.about.get("weights", ""), options.weights
    if not before or not now or before == now or before.split()[0] != now.split()[0]:
        return []
    return [
        f"the second moments in {options.statistics} were measured on other weights with the same attention, or on other "
        "files of the same: unless these are the same, remove the file to measure them again"
    ]


def stored_owner(plan: Plan, read: Callable[[str], Tensor], options: CalibrationOptions) -> str | None:
    """The digest of a checkpoint's attention weights, where its model in memory has them in another layout.

    Args:
        plan: Of the checkpoint.
        read: Name -> tensor.
        options: Whether statistics are saved.
    """
    if plan.spec.memory is None or not options.statistics:
        return None
    return fingerprint([module.module for module in plan.modules], read)


def about_statistics(statistics: Statistics | None) -> dict[str, Any]:
    """What the manifest says of them."""
    return {} if statistics is None else {"statistics": dict(statistics.about)}


def statistics_warnings(statistics: Statistics | None) -> list[str]:
    """What the user should know of them."""
    return [] if statistics is None else list(statistics.about.get("notes", []))

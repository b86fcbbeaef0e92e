"""Uptraining: continue pretraining for a fraction of the original budget, distilling from the original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .budget import Budget, UptrainConfig, plan_budget

if TYPE_CHECKING:
    from .run import UptrainResult, run_uptrain, train_model, uptrain

__all__ = ["Budget", "UptrainConfig", "UptrainResult", "plan_budget", "run_uptrain", "train_model", "uptrain"]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name in ("UptrainResult", "run_uptrain", "train_model", "uptrain"):
        from . import run

        return getattr(run, name)
    raise AttributeError(name)

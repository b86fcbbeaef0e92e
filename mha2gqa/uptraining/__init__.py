"""Uptraining: continue pretraining for a fraction of the original budget, distilling from the original."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .budget import Budget, UptrainConfig, plan_budget

if TYPE_CHECKING:
    from .run import run_uptrain, train_model, uptrain
    from .uptrain_result import UptrainResult

__all__ = ["Budget", "UptrainConfig", "UptrainResult", "plan_budget", "run_uptrain", "train_model", "uptrain"]

_HOMES = {"train_model": "run", "UptrainResult": "uptrain_result", "run_uptrain": "run", "uptrain": "run"}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(name)

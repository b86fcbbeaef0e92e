"""mha2gqa: turn multi-head-attention checkpoints into grouped-query ones, almost without retraining.

Example:
    >>> import mha2gqa
    >>> mha2gqa.convert("llama-2-7b", "llama-2-7b-gqa8", groups=8)  # doctest: +SKIP
    >>> mha2gqa.evaluate(["llama-2-7b", "llama-2-7b-gqa8"], "heldout.jsonl")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .architectures import AttentionSpec
    from .checkpoints.loading import load_model
    from .commands.estimate import PlanResult, plan
    from .commands.run_recipe import RunResult, run
    from .commands.sweep import SweepResult, sweep
    from .config import ConvertConfig, EvaluateConfig, Recipe, ReconstructConfig, UptrainConfig, load_recipe
    from .conversion.checkpoint import ConvertResult, convert, convert_model, convert_state_dict
    from .errors import (
        CheckpointError,
        DataError,
        GateError,
        Mha2gqaError,
        TrainingError,
        UnsupportedModelError,
        UsageError,
    )
    from .evaluation import EvaluateResult, LoadedModel, ModelResult, evaluate
    from .evaluation.gates import check_gates
    from .uptraining import UptrainResult, train_model, uptrain
    from .verification.checks import VerifyResult, verify

# Name -> module that has it; imported when it is first asked for, so that `import mha2gqa` costs nothing.
_EXPORTS = {
    "AttentionSpec": "architectures",
    "CheckpointError": "errors",
    "ConvertConfig": "config",
    "ConvertResult": "conversion.checkpoint",
    "DataError": "errors",
    "EvaluateConfig": "config",
    "EvaluateResult": "evaluation",
    "GateError": "errors",
    "LoadedModel": "evaluation",
    "Mha2gqaError": "errors",
    "ModelResult": "evaluation",
    "PlanResult": "commands.estimate",
    "Recipe": "config",
    "ReconstructConfig": "config",
    "RunResult": "commands.run_recipe",
    "SweepResult": "commands.sweep",
    "TrainingError": "errors",
    "UnsupportedModelError": "errors",
    "UptrainConfig": "config",
    "UptrainResult": "uptraining",
    "UsageError": "errors",
    "VerifyResult": "verification.checks",
    "check_gates": "evaluation.gates",
    "convert": "conversion.checkpoint",
    "convert_model": "conversion.checkpoint",
    "convert_state_dict": "conversion.checkpoint",
    "evaluate": "evaluation",
    "load_model": "checkpoints.loading",
    "load_recipe": "config",
    "plan": "commands.estimate",
    "run": "commands.run_recipe",
    "sweep": "commands.sweep",
    "train_model": "uptraining",
    "uptrain": "uptraining",
    "verify": "verification.checks",
}

__all__ = [
    "AttentionSpec",
    "CheckpointError",
    "ConvertConfig",
    "ConvertResult",
    "DataError",
    "EvaluateConfig",
    "EvaluateResult",
    "GateError",
    "LoadedModel",
    "Mha2gqaError",
    "ModelResult",
    "PlanResult",
    "Recipe",
    "ReconstructConfig",
    "RunResult",
    "SweepResult",
    "TrainingError",
    "UnsupportedModelError",
    "UptrainConfig",
    "UptrainResult",
    "UsageError",
    "VerifyResult",
    "__version__",
    "check_gates",
    "convert",
    "convert_model",
    "convert_state_dict",
    "evaluate",
    "load_model",
    "load_recipe",
    "plan",
    "run",
    "sweep",
    "train_model",
    "uptrain",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The public names, imported on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

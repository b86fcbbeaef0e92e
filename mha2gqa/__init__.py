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
    from .commands.estimate import PlanResult, plan
    from .commands.run_recipe import RunResult, run
    from .commands.sweep import SweepResult, sweep
    from .config import Recipe, load_recipe
    from .conversion.checkpoint import ConvertResult, convert, convert_model, convert_state_dict
    from .evaluation import EvaluateResult, ModelResult, evaluate
    from .uptraining import UptrainResult, train_model, uptrain
    from .verification.checks import VerifyResult, verify

# Name -> module that has it; imported when it is first asked for, so that `import mha2gqa` costs nothing.
_EXPORTS = {
    "AttentionSpec": "architectures",
    "ConvertResult": "conversion.checkpoint",
    "EvaluateResult": "evaluation",
    "ModelResult": "evaluation",
    "PlanResult": "commands.estimate",
    "Recipe": "config",
    "RunResult": "commands.run_recipe",
    "SweepResult": "commands.sweep",
    "UptrainResult": "uptraining",
    "VerifyResult": "verification.checks",
    "convert": "conversion.checkpoint",
    "convert_model": "conversion.checkpoint",
    "convert_state_dict": "conversion.checkpoint",
    "evaluate": "evaluation",
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
    "ConvertResult",
    "EvaluateResult",
    "ModelResult",
    "PlanResult",
    "Recipe",
    "RunResult",
    "SweepResult",
    "UptrainResult",
    "VerifyResult",
    "__version__",
    "convert",
    "convert_model",
    "convert_state_dict",
    "evaluate",
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

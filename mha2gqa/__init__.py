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
    from .conversion import ConvertResult, convert, convert_model, convert_state_dict
    from .evaluation import EvaluateResult, ModelResult, evaluate
    from .pipeline.plan import PlanResult, plan
    from .pipeline.run import RunResult, run
    from .pipeline.sweep import SweepResult, sweep
    from .recipe import Recipe, load_recipe
    from .uptraining import UptrainResult, train_model, uptrain
    from .verification import VerifyResult, verify

# Name -> module that has it; imported when it is first asked for, so that `import mha2gqa` costs nothing.
_EXPORTS = {
    "AttentionSpec": "architectures",
    "ConvertResult": "conversion",
    "EvaluateResult": "evaluation",
    "ModelResult": "evaluation",
    "PlanResult": "pipeline.plan",
    "Recipe": "recipe",
    "RunResult": "pipeline.run",
    "SweepResult": "pipeline.sweep",
    "UptrainResult": "uptraining",
    "VerifyResult": "verification",
    "convert": "conversion",
    "convert_model": "conversion",
    "convert_state_dict": "conversion",
    "evaluate": "evaluation",
    "load_recipe": "recipe",
    "plan": "pipeline.plan",
    "run": "pipeline.run",
    "sweep": "pipeline.sweep",
    "train_model": "uptraining",
    "uptrain": "uptraining",
    "verify": "verification",
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

"""Evaluation: token-exact loss, perplexity and bits per byte of several models on the same text."""

from .bootstrap import Interval, PairedTest, bootstrap, paired_test
from .comparison import evaluate
from .evaluate_result import (
    Agreement,
    EvaluateConfig,
    EvaluateResult,
    LoadedModel,
    ModelResult,
    PositionLoss,
    WorstDocument,
)
from .gates import check_gates, check_limits, measure_gates, perplexity_ratio, require
from .protocols import PROTOCOLS, Settings, Window
from .scoring import block_loss
from .setup import measured_metrics

__all__ = [
    "PROTOCOLS",
    "Agreement",
    "EvaluateConfig",
    "EvaluateResult",
    "Interval",
    "LoadedModel",
    "ModelResult",
    "PairedTest",
    "PositionLoss",
    "Settings",
    "Window",
    "WorstDocument",
    "block_loss",
    "bootstrap",
    "check_gates",
    "check_limits",
    "evaluate",
    "measure_gates",
    "measured_metrics",
    "paired_test",
    "perplexity_ratio",
    "require",
]

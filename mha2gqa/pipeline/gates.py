"""The quality gates of `evaluate`, under the names the commands use."""

from ..evaluation.gates import measure_gates as check_gates
from ..evaluation.gates import perplexity_ratio, require

__all__ = ["check_gates", "perplexity_ratio", "require"]

"""Every option of every command, declared once; recipes, which hold them; errors that name the place.

Imports nothing heavy: no torch, no transformers, and YAML only where a recipe is read.
"""

from .coerce import coerce, parse_count, parse_size
from .commands import BenchConfig, DemoConfig, ExportConfig, PlanConfig, PushConfig, VerifyConfig
from .convert import ConvertConfig
from .evaluate import EvaluateConfig, GateConfig
from .option import Config, OptionError, declared
from .recipe import SECTIONS, Recipe, Section
from .recipe_reading import load_recipe, recipe_from_dict
from .reconstruct import ReconstructConfig
from .report import ReportConfig, SweepConfig
from .training_arguments import TrainerOptions
from .uptrain import UptrainConfig

__all__ = [
    "SECTIONS",
    "BenchConfig",
    "Config",
    "ConvertConfig",
    "DemoConfig",
    "EvaluateConfig",
    "ExportConfig",
    "GateConfig",
    "OptionError",
    "PlanConfig",
    "PushConfig",
    "Recipe",
    "ReconstructConfig",
    "ReportConfig",
    "Section",
    "SweepConfig",
    "TrainerOptions",
    "UptrainConfig",
    "VerifyConfig",
    "coerce",
    "declared",
    "load_recipe",
    "parse_count",
    "parse_size",
    "recipe_from_dict",
]

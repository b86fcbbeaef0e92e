"""A whole job as one YAML file: frozen dataclasses, strict keys, dotted overrides. Imports no torch.

Every mistake is answered with the file (and line), the key, and the nearest valid key.
"""

from .coerce import coerce, parse_count, parse_size
from .recipe import check_training_words, load_recipe, recipe_from_dict, recipe_from_overrides
from .sections import (
    SECTIONS,
    ConvertRecipe,
    EvaluateRecipe,
    FitRecipe,
    Recipe,
    ReportRecipe,
    SweepRecipe,
    UptrainRecipe,
)

__all__ = [
    "SECTIONS",
    "ConvertRecipe",
    "EvaluateRecipe",
    "FitRecipe",
    "Recipe",
    "ReportRecipe",
    "SweepRecipe",
    "UptrainRecipe",
    "check_training_words",
    "coerce",
    "load_recipe",
    "parse_count",
    "parse_size",
    "recipe_from_dict",
    "recipe_from_overrides",
]

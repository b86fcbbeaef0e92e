"""A whole job as one YAML file: frozen dataclasses, strict keys, dotted overrides. Imports no torch.

Every mistake is answered with the file (and line), the key, and the nearest valid key.
"""

from .reading import check_training_words, load_recipe, recipe_from_dict
from .sections import (
    SECTIONS,
    ConvertRecipe,
    EvaluateRecipe,
    Recipe,
    ReportRecipe,
    SweepRecipe,
    UptrainRecipe,
)
from .values import coerce, parse_count

__all__ = [
    "SECTIONS",
    "ConvertRecipe",
    "EvaluateRecipe",
    "Recipe",
    "ReportRecipe",
    "SweepRecipe",
    "UptrainRecipe",
    "check_training_words",
    "coerce",
    "load_recipe",
    "parse_count",
    "recipe_from_dict",
]

"""Names of recipes for what the package carries: `builtin:tiny`, `builtin:stdlib`, `builtin:heldout`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..assets import demo_texts, heldout_path, tiny_model_path
from ..errors import UsageError

PREFIX = "builtin:"
MODELS, TEXTS = ("builtin:tiny",), ("builtin:stdlib", "builtin:heldout")


def resolve_model(name: str) -> str:
    """The folder of a built-in model; any other name unchanged.

    Raises:
        UsageError: No such built-in model.
    """
    if not name.startswith(PREFIX):
        return name
    if name not in MODELS:
        raise UsageError("no such built-in model", where=name, fix=f"{', '.join(MODELS)} is there")
    return str(tiny_model_path())


def resolve_data(names: Sequence[str], folder: Path) -> list[str]:
    """Paths of built-in texts, written to `folder` where they must be; any other name unchanged.

    Raises:
        UsageError: No such built-in text.
    """
    found = []
    for name in names:
        if name == "builtin:heldout":
            found.append(str(heldout_path()))
        elif name == "builtin:stdlib":
            train = folder / "train.jsonl"
            found.append(str(train if train.exists() else demo_texts(folder)[0]))
        elif name.startswith(PREFIX):
            raise UsageError("no such built-in text", where=name, fix=f"{', '.join(TEXTS)} are there")
        else:
            found.append(name)
    return found

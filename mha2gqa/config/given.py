"""Arguments of the Python API that are not options: refused in one line where they are something else."""

from __future__ import annotations

import os
from typing import Any

from ..errors import UsageError, quoted


def require_path(name: str, value: object) -> None:
    """Refuse what is neither text nor a path.

    Args:
        name: The argument.
        value: What was given for it.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"must be a path or a Hub id, not {quoted(value)}", where=name)


def require_model(name: str, value: Any) -> None:
    """Refuse what is not a model in memory.

    Args:
        name: The argument.
        value: What was given for it.

    Raises:
        UsageError: It has no config, or no state dict.
    """
    if not (hasattr(value, "config") and hasattr(value, "state_dict")):
        raise UsageError(
            f"must be a model of transformers, not {quoted(value)}",
            where=name,
            fix=f"give {name}.module, which it wraps"
            if hasattr(value, "module")
            else "for a folder or a Hub id use convert and uptrain",
        )

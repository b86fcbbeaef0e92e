"""What `accelerate launch` asks for through the environment, past the options of a run and their checks."""

from __future__ import annotations

import os

from ..errors import UsageError

# Option of a run: the variable that asks for the same, its name, the launcher's flag, and how a run asks for it.
ASKED = {
    "deepspeed": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed", "--use_deepspeed", "--set deepspeed=FILE"),
    "fsdp": ("ACCELERATE_USE_FSDP", "FSDP", "--use_fsdp", "--set fsdp=true"),
}


def check_launched(name: str, given: object) -> None:
    """Refuse settings of a launcher, which nothing here reads.

    Args:
        name: Option of the run.
        given: Its value; what the run itself asks for goes first.

    Raises:
        UsageError: The environment asks for it, and the run does not.
    """
    variable, what, flag, option = ASKED[name]
    if not given and os.environ.get(variable, "").lower() in ("1", "true", "yes", "y", "t", "on"):
        raise UsageError(
            f"asks for {what} with settings that are not checked",
            where=variable,
            fix=f"launch without {flag}, and give {option}",
        )

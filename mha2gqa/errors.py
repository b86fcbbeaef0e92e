"""Every error the toolkit raises on purpose. Each message is one line: what, where, what to do."""

from __future__ import annotations


class Mha2gqaError(Exception):
    """Base of all deliberate errors; the CLI prints the message and exits with `exit_code`.

    Args:
        what: The fault, in words a user understands.
        where: The file, tensor, option or layer concerned.
        fix: What to do about it.

    Example:
        >>> str(UsageError("3 does not divide 8 KV heads", where="--groups 3", fix="try 1, 2, 4"))
        '--groups 3: 3 does not divide 8 KV heads; try 1, 2, 4'
    """

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        message = what if where is None else f"{where}: {what}"
        super().__init__(" ".join((message if fix is None else f"{message}; {fix}").split()))


def reason(error: BaseException, limit: int = 200) -> str:
    """What a library said, for a message of one line: line breaks closed up, lists of hundreds cut."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= limit else words[:limit].rsplit(" ", 1)[0] + " …"


def config_refusals() -> tuple[type[Exception], ...]:
    """What transformers raises for a config that it will not build.

    To be called where such an error has come up: the import loads an HTTP client.
    """
    from huggingface_hub.errors import StrictDataclassError

    return (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError)


def hub_refusals() -> tuple[type[Exception], ...]:
    """What the Hub's client raises: no network, no such repository, no rights, offline, a malformed name.

    To be called where such an error has come up, as `config_refusals`.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    # Its HTTP library has changed its name more than once; connection errors have the same base there.
    library = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    return (OSError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled, *library)


class UsageError(Mha2gqaError):
    """An option, argument or recipe that cannot be meant as given."""

    exit_code = 2


class UnsupportedModelError(UsageError):
    """A model that cannot hold fewer KV heads, or is not handled; the message says why."""


class CheckpointError(Mha2gqaError):
    """A checkpoint that is incomplete, contradicts its config, or cannot be written."""


class DataError(Mha2gqaError):
    """Text that cannot be read, or that is too short for what was asked."""


class TrainingError(Mha2gqaError):
    """A run that cannot go on: non-finite loss, changed recipe, not enough memory."""


class GateError(Mha2gqaError):
    """A quality gate (`--max-ppl-ratio`, …) that the converted model does not pass."""

    exit_code = 3

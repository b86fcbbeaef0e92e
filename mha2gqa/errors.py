"""Every error the toolkit raises on purpose. Each message is one short line: where, what, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 400  # characters of a message
# What would move the cursor, colour the terminal or turn the reading direction, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` on one line, with control characters as escapes: safe to show on a terminal."""
    return _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode(), " ".join(text.split()))


def shortened(text: str, limit: int) -> str:
    """`text`, its middle left out where it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3].rstrip()} … {text[len(text) - tail :].lstrip()}"


def quoted(value: object, limit: int = 80) -> str:
    """`value` as a message may repeat it: in quotes, shortened."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= limit else shortened(repr(value[: 2 * limit]), limit)
    return shortened(repr(value), limit)


def listed(names: list[str] | tuple[str, ...], limit: int = 5) -> str:
    """Some names with commas between them, and how many more there are."""
    shown = ", ".join(shortened(name, 80) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def no_effect(names: Sequence[str]) -> str:
    """What a warning says of options that were given for nothing.

    Example:
        >>> no_effect(["--beams"]), no_effect(["--beams", "--task"])
        ('--beams has no effect', '--beams, --task have no effect')
    """
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect"


class Mha2gqaError(Exception):
    """Base of all deliberate errors; the CLI prints the message and exits with `exit_code`.

    Args:
        what: The fault, in words a user understands.
        where: The file, tensor, option or layer concerned.
        fix: What to do about it.

    Attributes:
        what, where, fix: As given, whatever their length; the message itself has at most 400 characters.

    Example:
        >>> str(UsageError("3 does not divide 8 KV heads", where="--groups 3", fix="try 1, 2, 4"))
        '--groups 3: 3 does not divide 8 KV heads; try 1, 2, 4'
    """

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.message())

    def message(self, limit: int = LONGEST) -> str:
        """The message on one line, the longest of its parts shortened where it would exceed `limit`."""
        where = "" if self.where is None else f"{self.where}: "
        fix = "" if self.fix is None else f"; {self.fix}"
        line = printable(f"{where}{self.what}{fix}")
        if len(line) <= limit:
            return line
        where, what, fix = (printable(part) + " " * part.endswith(" ") for part in (where, self.what, fix))
        if len(where) > limit * 2 // 5:
            where = shortened(where.removesuffix(": "), limit * 2 // 5 - 5) + ": "
        fix = shortened(fix, limit * 3 // 10)
        return f"{where}{shortened(what, limit - len(where) - len(fix))}{fix}"


def reason(error: BaseException, limit: int = 200) -> str:
    """What a library said, for a message of one line: line breaks closed up, lists of hundreds cut."""
    words = " ".join(str(error).split()) or type(error).__name__
    words = f"lacks {words}" if type(error) is KeyError else words  # which says no more than the key
    return words if len(words) <= limit else words[:limit].rsplit(" ", 1)[0] + " …"


def first_line(error: BaseException) -> str:
    """The first line of what a library said; the error's type where it said nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def hub_refusals() -> tuple[type[Exception], ...]:
    """What the Hub's client raises: no network, no such repository, no rights, offline, a malformed name.

    To be called where such an error has come up: the import loads an HTTP client.
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
    """An option, argument or recipe that is invalid."""

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

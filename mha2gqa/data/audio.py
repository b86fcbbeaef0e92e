"""Recordings: decoded, mixed to one channel, at the sampling rate that a model was trained on."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError, reason

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64")
UNREAD_SUFFIXES = (
    ".m4a",
    ".mp4",
    ".aac",
    ".webm",
    ".wma",
    ".amr",
    ".3gp",
    ".mka",
)  # which libsndfile does not read
FEATURE_BYTES = 1 << 30  # of features kept at a time: a thousand recordings of Whisper
INSTALL = "run pip install 'mha2gqa[audio]'"
INTEGERS = ("uint8", "int16", "int32")  # of sound
LOUDEST = 100.0  # full scale is 1; a decoder of MP3 may go a little beyond, samples of 16 bits far


@dataclass(frozen=True)
class Audio:
    """A recording that is decoded when it is needed.

    Args:
        place: For messages: the file, or `file:line` of what names it.
        path: The file, where there is one.
        data: Its bytes (a WAV or FLAC file in a column), where there are.
        samples: Already decoded, `[n]`, or `[n, c]` or `[c, n]` of several channels: floats between -1 and 1, or
            integers of 8, 16 or 32 bits.
        rate: Sampling rate of `samples`.
    """

    place: str
    path: Path | None = None
    data: bytes | None = None
    samples: np.ndarray | None = None
    rate: int | None = None

    def check(self, rate: int, least: int = 1) -> None:
        """Look at the header only.

        Args:
            rate: Of the model, in Hz.
            least: Samples at that rate that the model needs.

        Raises:
            DataError: There is no such file, it is not a sound file, or it is too short.
            UsageError: What decodes or resamples is not installed.
        """
        if self.samples is None:
            frames, own = _header(self)
        else:
            frames, own = max(self.samples.shape), self.rate or rate
        check_length(-(-frames * rate // own), self.place, least)
        if own != rate:
            _resampler(own, rate)

    def load(self, rate: int) -> tuple[np.ndarray, int]:
        """Samples of one channel at `rate` Hz, float32 `[n]` between -1 and 1; and the recording's own rate.

        Raises:
            DataError: As `check`, or the file is corrupt.
            UsageError: What decodes or resamples is not installed.
        """
        samples, own = _decoded(self)
        check_length(len(samples), self.place)
        mono = samples.mean(axis=1) if samples.ndim == 2 else samples
        _check_scale(mono, self.place)
        return _resampled(mono.astype(np.float32), own, rate), own

    def digest(self) -> str:
        """What tells the recording, as it is given, from others."""
        digest = hashlib.blake2b(digest_size=16)
        if self.samples is not None:
            digest.update(self.samples.tobytes())
        elif self.path is not None:
            digest.update(self.path.read_bytes())
        else:
            digest.update(self.data or b"")
        return digest.hexdigest()


class KeptFeatures:
    """Features of recordings, kept while there is room: making them takes longer than a step of a small model."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, np.ndarray] = {}
        self._room = FEATURE_BYTES

    def of(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The features of a recording: those kept, or made now.

        Args:
            key: What tells it from others.
            make: Makes them.
        """
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        found = make()
        if found.nbytes <= self._room:
            self._room -= found.nbytes
            self._kept[key] = found
        return found


def to_audio(value: Any, place: str, folder: Path | None = None) -> Audio:
    """A recording from a value of a column: a path, the bytes or samples that `datasets` holds.

    Args:
        value: `str`, `bytes`, `{"bytes": …, "path": …}`, or `{"array": …, "sampling_rate": …}`.
        place: Where it stands.
        folder: What relative paths are relative to.

    Raises:
        DataError: Something else, no such file, or an array that cannot be sound.
    """
    if isinstance(value, str | Path) and str(value):
        path = Path(value).expanduser()
        path = path if path.is_absolute() or folder is None else folder / path
        if not path.is_file():
            raise DataError(f"no such recording: {value}", where=place, fix="paths are relative to the table")
        return Audio(place, path)
    if isinstance(value, bytes) and value:
        return Audio(place, data=value)
    if isinstance(value, dict):
        if value.get("array") is not None and int(value.get("sampling_rate") or 0) > 0:
            return Audio(place, samples=_array(value["array"], place), rate=int(value["sampling_rate"]))
        if value.get("bytes"):
            return Audio(place, data=bytes(value["bytes"]))
        if value.get("path"):
            return to_audio(value["path"], place, folder)
    raise DataError(
        f"a {type(value).__name__} is not a recording",
        where=place,
        fix="name the column of audio; of samples array and sampling_rate are needed",
    )


def _array(value: Any, place: str) -> np.ndarray:
    """Samples that a column holds, as they are.

    Raises:
        DataError: They have no channels, or are of a kind whose full scale is not known.
    """
    samples = np.asarray(value)
    if samples.ndim not in (1, 2):
        raise DataError(f"an array of {samples.ndim} axes is not a recording", where=place, fix="give [n]")
    if samples.dtype.kind != "f" and samples.dtype not in INTEGERS:
        raise DataError(
            f"samples of {samples.dtype} have no known full scale",
            where=place,
            fix="give floats between -1 and 1, or int16",
        )
    return samples


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its C library is missing
        raise UsageError(
            "soundfile, which reads recordings, is not installed", where="audio", fix=INSTALL
        ) from error
    return soundfile


def _opened(audio: Audio) -> Any:
    return str(audio.path) if audio.path is not None else io.BytesIO(audio.data or b"")


def _header(audio: Audio) -> tuple[int, int]:
    soundfile = _soundfile()
    try:
        info = soundfile.info(_opened(audio))
    except Exception as error:  # of libsndfile
        raise _unreadable(audio, error) from error
    return int(info.frames), int(info.samplerate)


def _decoded(audio: Audio) -> tuple[np.ndarray, int]:
    if audio.samples is not None:
        samples = audio.samples if audio.samples.ndim == 1 else _time_first(audio.samples)
        return _full_scale(samples), audio.rate or 0
    soundfile = _soundfile()
    try:
        samples, rate = soundfile.read(_opened(audio), dtype="float32")
    except Exception as error:  # of libsndfile
        raise _unreadable(audio, error) from error
    return samples, int(rate)


def _unreadable(audio: Audio, error: Exception) -> DataError:
    return DataError(
        f"not a recording that can be read ({reason(error)})",
        where=audio.place,
        fix="convert it to WAV or FLAC",
    )


def _time_first(samples: np.ndarray) -> np.ndarray:
    """Samples `[n, c]`, of which some libraries make `[c, n]`: there are fewer channels than samples."""
    return samples.T if samples.shape[0] < samples.shape[1] else samples


def _full_scale(samples: np.ndarray) -> np.ndarray:
    """Integers between -1 and 1, floats as they are."""
    if samples.dtype.kind == "f":
        return samples
    half = float(1 << (8 * samples.dtype.itemsize - 1))
    return (samples.astype(np.float32) - (half if samples.dtype.kind == "u" else 0)) / half


def check_length(samples: int, place: str, least: int = 1) -> None:
    """Refuse a recording that is empty, or shorter than a model hears.

    Raises:
        DataError: It is.
    """
    if samples < least:
        short = f"; the model needs {least}" if samples else ""
        raise DataError(
            f"a recording of {samples or 'no'} sample{'s' * (samples != 1)}{short}",
            where=place,
            fix="remove it",
        )


def _check_scale(samples: np.ndarray, place: str) -> None:
    """Refuse samples that cannot be sound.

    Raises:
        DataError: Some are not finite, or far beyond full scale.
    """
    peak = float(np.abs(samples).max())
    if not math.isfinite(peak):
        raise DataError(
            "a recording with samples of nan or inf", where=place, fix="convert it anew, or remove it"
        )
    if peak > LOUDEST:
        raise DataError(
            f"a recording with samples up to {peak:,.0f}, where full scale is 1",
            where=place,
            fix="divide them by their full scale, 32,768 for 16 bits",
        )


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Samples at another rate, by a polyphase filter."""
    if own == rate:
        return samples
    common = math.gcd(own, rate)
    return np.asarray(_resampler(own, rate)(samples, rate // common, own // common), dtype=np.float32)


def _resampler(own: int, rate: int) -> Any:
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise UsageError(
            f"scipy, which brings {own} Hz to {rate} Hz, is not installed", where="audio", fix=INSTALL
        ) from error
    return resample_poly

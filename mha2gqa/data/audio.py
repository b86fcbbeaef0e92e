"""Recordings: decoded, mixed to one channel, at the sampling rate that a model was trained on."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError, reason

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64")
FEATURE_BYTES = 1 << 30  # of features kept at a time: a thousand recordings of Whisper
INSTALL = "run pip install 'mha2gqa[audio]'"


@dataclass(frozen=True)
class Audio:
    """A recording that is decoded when it is needed.

    Args:
        place: For messages: the file, or `file:line` of what names it.
        path: The file, where there is one.
        data: Its bytes (a WAV or FLAC file in a column), where there are.
        samples: float32 `[n]`, already decoded, with their `rate`.
        rate: Sampling rate of `samples`.
    """

    place: str
    path: Path | None = None
    data: bytes | None = None
    samples: np.ndarray | None = None
    rate: int | None = None

    def check(self) -> None:
        """Look at the header only.

        Raises:
            DataError: There is no such file, it is none of sound, or it is empty.
        """
        if self.samples is None:
            frames, _ = _header(self)
            _check_length(frames, self)

    def load(self, rate: int) -> tuple[np.ndarray, int]:
        """Samples of one channel at `rate` Hz, float32 `[n]` between -1 and 1; and the recording's own rate.

        Raises:
            DataError: As `check`, or the file is corrupt.
            UsageError: What decodes or resamples is not installed.
        """
        samples, own = _decoded(self)
        _check_length(len(samples), self)
        mono = samples.mean(axis=1) if samples.ndim == 2 else samples
        return _resampled(mono.astype(np.float32), own, rate), own


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
        value: `str`, `{"bytes": …, "path": …}`, or `{"array": …, "sampling_rate": …}`.
        place: Where it stands.
        folder: What relative paths are relative to.

    Raises:
        DataError: Something else, or no such file.
    """
    if isinstance(value, str | Path) and str(value):
        path = Path(value).expanduser()
        path = path if path.is_absolute() or folder is None else folder / path
        if not path.is_file():
            raise DataError(f"no such recording: {value}", where=place, fix="paths are relative to the table")
        return Audio(place, path)
    if isinstance(value, dict):
        if value.get("array") is not None and value.get("sampling_rate"):
            return Audio(place, samples=np.asarray(value["array"]), rate=int(value["sampling_rate"]))
        if value.get("bytes"):
            return Audio(place, data=bytes(value["bytes"]))
        if value.get("path"):
            return to_audio(value["path"], place, folder)
    raise DataError(
        f"a {type(value).__name__} is not a recording", where=place, fix="name the column of audio"
    )


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
        return audio.samples, audio.rate or 0
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


def _check_length(frames: int, audio: Audio) -> None:
    if frames == 0:
        raise DataError("a recording of no samples", where=audio.place, fix="remove it")


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Samples at another rate, by a polyphase filter."""
    if own == rate:
        return samples
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise UsageError(
            f"scipy, which brings {own} Hz to {rate} Hz, is not installed", where="audio", fix=INSTALL
        ) from error
    common = math.gcd(own, rate)
    return np.asarray(resample_poly(samples, rate // common, own // common), dtype=np.float32)

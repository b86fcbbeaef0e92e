"""Feature extractors of speech models: loaded, held against their model, and what they make of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, DataError, reason
from .prompts import WHISPER

LEAST_SAMPLES = {"moonshine": 895}  # of which the encoder's convolutions leave one position


def least_samples(model_type: str) -> int:
    """How many samples a recording must have for a model of this type."""
    return LEAST_SAMPLES.get(model_type, 1)


def load_extractor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The feature extractor of a folder or Hub id.

    Raises:
        CheckpointError: There is none or it cannot be read.
    """
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of transformers and the Hub's client
        raise CheckpointError(
            f"its feature extractor cannot be loaded ({reason(error)})",
            where=path,
            fix="copy the original model's preprocessor_config.json beside the weights",
        ) from error


def make_features(extractor: Any, samples: np.ndarray, place: str) -> np.ndarray:
    """What an encoder reads of samples.

    Args:
        extractor: The model's.
        samples: float32 `[n]` at its rate.
        place: Where they come from.

    Raises:
        DataError: The extractor refuses them.
    """
    try:
        made = extractor(samples, sampling_rate=int(extractor.sampling_rate), return_tensors="np")
    except Exception as error:  # of the extractor's own code
        raise DataError(f"no features ({reason(error)})", where=place) from error
    return np.asarray(made[str(extractor.model_input_names[0])][0], dtype=np.float32)


def check_extractor(extractor: Any, model_type: str, known: Any, name: str) -> None:
    """Refuse a feature extractor of another model, whose features the encoder does not take.

    Args:
        extractor: The extractor.
        model_type: Of the stock class.
        known: The model's config with the defaults of its class.
        name: The model, for messages.

    Raises:
        DataError: It is another model's.
    """
    least = least_samples(model_type)
    if model_type == WHISPER:
        right: tuple[int, ...] = (known.num_mel_bins, 2 * known.max_source_positions)
    elif model_type in LEAST_SAMPLES:
        right = (least,)
    else:
        return
    found = make_features(extractor, np.zeros(least, np.float32), name).shape
    if found != right:
        given, taken = (" x ".join(map(str, shape)) for shape in (found, right))
        raise DataError(
            f"its feature extractor makes {given} of {least} samples, the encoder takes {taken}",
            where=name,
            fix="copy the original's preprocessor_config.json beside it",
        )

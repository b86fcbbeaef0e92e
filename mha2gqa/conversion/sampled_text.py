"""`calibration="generate"`: text that the original samples itself, kept beside the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .. import distributed
from ..calibration.sampling import generate_text
from ..checkpoints.hf_config import longest_context
from ..checkpoints.reader import Checkpoint
from ..config.pair_options import GENERATE
from ..progress import current
from .calibration_options import CalibrationOptions
from .inputs import MIN_TOKENS

LEAST_TOKENS = 2 * MIN_TOKENS  # some are lost where text is encoded again
DOCUMENT_TOKENS = 2048  # a document ends there, if not before


def generated_file(out: Path) -> Path:
    """The file of what the original of OUT wrote."""
    return out.with_name(f"{out.name}.{GENERATE}d.jsonl")


def with_generated(
    checkpoint: Checkpoint, options: CalibrationOptions, out: Path | None
) -> CalibrationOptions:
    """The options with a file of sampled text in place of `generate`; a file made before is used again.

    Args:
        checkpoint: The original, which writes.
        options: Of calibration.
        out: The folder that the conversion makes.

    Raises:
        UsageError: An encoder-decoder, no start token, or model and cache do not fit the device.
    """
    if options.texts != (GENERATE,):
        return options
    assert out is not None  # of a model in memory it is not an option
    file = generated_file(out)
    if distributed.is_rank_zero():
        current().stage("generating", options.tokens, "tokens")
        generate_text(
            checkpoint.path,
            file,
            tokens=max(options.tokens, LEAST_TOKENS),
            window=min(DOCUMENT_TOKENS, longest_context(checkpoint.config) or DOCUMENT_TOKENS),
            seed=options.seed,
            device=str(options.device),
            trust_remote_code=options.trust_remote_code,
            original=options.original,
        )
    distributed.barrier()
    return replace(options, texts=(str(file),), text_column="text")

"""`data="generate"`: text that the original samples itself, kept beside the result."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from ..calibration.sampling import DATA, check_writer, generate_text, written_by
from ..checkpoints.hf_config import load_config_json, longest_context
from ..checkpoints.loading import resolve_device
from ..checkpoints.reader import open_checkpoint
from ..config.pair_options import GENERATE
from ..conversion.sampled_text import DOCUMENT_TOKENS, generated_file
from ..distributed import barrier, is_rank_zero
from ..errors import UsageError
from ..progress import current
from .prepare import PreparedRun

MOST_TOKENS = 4_194_304  # sampled at most; a longer run reads them several times


def check_generated(run: PreparedRun) -> None:
    """Refuse a run whose original cannot write its text, before anything is loaded.

    Raises:
        UsageError: There is no original, it has no start token, or it does not fit the device.
    """
    if run.teacher is None:
        raise UsageError(
            "the model's manifest names no original that could generate text",
            where=f"{DATA} {GENERATE}",
            fix="name it with --teacher, or give --data FILE",
        )
    config = run.config
    device = resolve_device(config.device)
    trust = config.trust_remote_code
    check_writer(_original(run), window=_document(run), device=device, trust_remote_code=trust, option=DATA)


def with_generated(run: PreparedRun, device: torch.device) -> PreparedRun:
    """The run with files of sampled text in place of `generate`; a file made before is used again.

    What `convert` sampled from the same original counts; only the rest is sampled now, with another seed.

    Args:
        run: The run.
        device: Where the original writes.
    """
    if not run.config.generates:
        return run
    assert run.teacher is not None
    wanted, files = _wanted(run), []
    seed = run.config.seed + 1  # the seed itself is usually that of what `convert` sampled
    before = generated_file(Path(run.config.model))
    if (record := written_by(run.teacher.fingerprint, before)) is not None:
        files.append(before)
        wanted -= int(record["tokens"])
        seed += seed == record.get("seed")  # which would write the same text again
    if wanted > 0:
        files.append(generated_file(Path(run.config.out)))
        if is_rank_zero():
            current().stage("generating", wanted, "tokens")
            generate_text(
                _original(run),
                files[-1],
                tokens=wanted,
                window=_document(run),
                seed=seed,
                device=str(device),
                trust_remote_code=run.config.trust_remote_code,
                option=DATA,
                original=run.teacher.fingerprint,
            )
        barrier()
    if run.budget.tokens > MOST_TOKENS:
        run.warn(
            f"the original wrote {MOST_TOKENS:,} tokens, which a run of {run.budget.tokens:,} reads again"
        )
    named = tuple(str(file) for file in files)
    return replace(run, config=replace(run.config, data=named, text_column="text"))


def _wanted(run: PreparedRun) -> int:
    """Tokens that the run reads, what is held out and a block that is cut off included."""
    tokens = min(run.budget.tokens, MOST_TOKENS) + run.budget.window
    return math.ceil(tokens / (1 - run.config.holdout))


def _original(run: PreparedRun) -> Path:
    """The folder of the original, in the local cache where it is one of the Hub."""
    assert run.teacher is not None
    return open_checkpoint(run.teacher.name).path


def _document(run: PreparedRun) -> int:
    """Tokens of a document, at most."""
    return min(DOCUMENT_TOKENS, longest_context(load_config_json(_original(run))) or DOCUMENT_TOKENS)

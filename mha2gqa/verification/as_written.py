"""A result compared with the digests in its own manifest: what was made is still what was written."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch

from ..checkpoints.json_files import read_json
from ..checkpoints.manifest import DIGESTS, MANIFEST
from ..checkpoints.reader import Checkpoint
from ..errors import CheckpointError, listed, quoted
from ..results import Check

NAME = "as written"


def check_as_written(checkpoint: Checkpoint) -> Check:
    """Every tensor that was made, not copied, has the SHA-256 that the manifest records.

    Raises:
        CheckpointError: The manifest is broken.
    """
    place = checkpoint.path / MANIFEST
    if not place.is_file():
        return Check(NAME, None, f"not checked: no {MANIFEST}")
    digests = read_json(place).get(DIGESTS)
    if digests is None:  # of an earlier version
        return Check(NAME, None, f"not checked: {MANIFEST} records no digests")
    if not isinstance(digests, dict) or not all(map(_is_digest, digests.values())):
        raise CheckpointError(
            f"no usable {DIGESTS} ({quoted(digests)})", where=place, fix="convert again from the source"
        )
    wrong = sorted(name for name, digest in digests.items() if _digest(checkpoint, name) != digest)
    if wrong:
        return Check(NAME, False, f"{len(wrong)} tensors are not as they were written: {listed(wrong)}")
    return Check(NAME, True, f"{len(digests)} new tensors have the bytes that were written")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _digest(checkpoint: Checkpoint, name: str) -> str | None:
    """SHA-256 of the bytes of a tensor; None where there is none of that name."""
    if name not in checkpoint.tensors:
        return None
    data = checkpoint.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()

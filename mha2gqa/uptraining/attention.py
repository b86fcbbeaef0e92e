"""Attention without a look at the data to choose its mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import masking_utils


@contextmanager
def unpacked() -> Iterator[None]:
    """Inside, transformers takes for granted that no row holds several documents kept apart.

    It would look for restarted positions in every forward pass, and wait for the GPU to know. Only for
    batches without `position_ids`, whose positions run on by construction.
    """
    found = getattr(masking_utils, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found

"""What a forward pass under bf16 can do without: a look at the data for its mask, a float32 stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


@contextmanager
def narrow_stream(model: Any) -> Iterator[None]:
    """Inside, hidden states leave the input embedding in autocast's dtype and stay in it through the layers.

    Under autocast a float32 embedding starts a float32 stream, to which each layer adds in float32.

    Args:
        model: A model of transformers with float32 weights.
    """

    def narrow(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kind = output.device.type
        return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output

    hook = model.get_input_embeddings().register_forward_hook(narrow)
    try:
        yield
    finally:
        hook.remove()

"""Rows of a walk: how many go together, which are this rank's, where their hidden states lie, what is measured on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import distributed
from ..calibration import attention_instances, check_finite_moments, mark_padding, moment_rows, observing
from ..calibration.clipping import Clip
from ..calibration.hooks import Accumulator
from ..reconstruct import ReconstructConfig
from ..reconstruct.hidden_states import Stream
from ..reconstruct.ranks import Ranks, check_shared
from ..reconstruct.row_store import STREAMS, Memory, choose_place
from .converted import most_blocks
from .inputs import Inputs
from .plan import ModulePlan

OBSERVED = "observed"  # the blocks' arguments under the attention function that is observed


def batch_rows(config: ReconstructConfig | None, inputs: Inputs, ranks: Ranks) -> int:
    """Rows of a batch on this rank.

    Raises:
        UsageError: The processes cannot share a step.
    """
    if config is None:
        return max(1, min(32, len(inputs) // ranks.count))
    few = config.batch_size == most_blocks(inputs)
    check_shared(config.batch_size, ranks.count, len(inputs) if few else 0)
    return config.batch_size // ranks.count


def own_rows(inputs: Inputs, ranks: Ranks) -> Any:
    """This rank's rows."""
    read = inputs.read
    if isinstance(read, Tensor):
        return ranks.share(read)
    return {name: ranks.share(x) for name, x in read.items()}


def hidden_state_memory(
    model: Any, inputs: Inputs, device: torch.device, ranks: Ranks, folder: Path | None
) -> tuple[Memory, list[str]]:
    """Where hidden states lie: on the device, in host memory, or on disk; and the warning that it is the last.

    Args:
        model: The original.
        inputs: The rows of all ranks.
        device: Where blocks run.
        ranks: The processes.
        folder: For files; None where there is no work folder.
    """
    width = int(model.config.get_text_config().hidden_size)
    itemsize = next(p for p in model.parameters()).dtype.itemsize
    nbytes = STREAMS * inputs.tokens * width * itemsize // ranks.count
    where = choose_place(nbytes, device, distributed.local_world_size())
    on_disk = (
        f"hidden states of {nbytes / 2**30:.1f} GiB do not fit in host memory: they are kept on disk, which is "
        "slower; fewer --calibration-tokens fit"
    )
    return Memory(where, device, folder), [on_disk] if where == "disk" else []


def block_sums(
    stream: Stream, modules: Sequence[ModulePlan], clip: Clip | None, window: int
) -> Mapping[str, Accumulator]:
    """Sums of second moments of the modules of a block over this rank's rows, by path.

    Args:
        stream: Of the original, at that block.
        modules: Of the block.
        clip: Where the model bounds q, k and v.
        window: Tokens of a row.

    Raises:
        CheckpointError: Activations are not finite; the module is named.
    """
    instances = attention_instances(stream.model, [m.module for m in modules])
    rows = moment_rows(stream.model, window)
    with observing(stream.model, instances, clip) as sums:
        for i, batch in enumerate(stream.batches):
            mark_padding(sums, batch)
            count = len(next(iter(batch.values())))
            step = count if stream.masked else min(rows, count)
            for start in range(0, count, step):
                part = slice(start, min(count, start + step))
                stream.run_block(i, None if stream.masked else part, OBSERVED)
            check_finite_moments(sums.values())
    return sums

"""Blocks of a model, and one call of a module: what it is passed, what it returns, which positions are real."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..architectures import AttentionModule
from ..calibration import Batch

SEQUENCES = ("key_value_states", "encoder_hidden_states")  # differ from row to row, like hidden states
MASKS = (
    "attention_mask",
    "decoder_attention_mask",
)  # of the inputs: where given, every batch has masks of its own


class Reached(Exception):
    """The forward pass has got as far as needed."""


def first_tensor(output: Any) -> Tensor:
    """A module's output without what it returns beside it."""
    return output[0] if isinstance(output, (tuple, list)) else output


def with_first(output: Any, first: Tensor) -> Any:
    """An output of the same structure with another first tensor."""
    return type(output)([first, *output[1:]]) if isinstance(output, (tuple, list)) else first


@dataclass
class Call:
    """One call of a module.

    Args:
        rows: Inputs that differ from row to row, by parameter name; the first is the hidden states.
        fixed: All other arguments (positions, masks).
        output: `[B, T, D]`, None if the pass was stopped before.
    """

    rows: dict[str, Tensor]
    fixed: dict[str, Any]
    output: Tensor | None = None


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call, by the names of the parameters of the module's forward."""
    signature = inspect.signature(type(module).forward)
    bound = dict(signature.bind_partial(module, *args, **kwargs).arguments)
    bound.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    first = next(iter(bound))
    rows = {n: x for n, x in bound.items() if (n == first or n in SEQUENCES) and isinstance(x, Tensor)}
    return Call(rows, {n: x for n, x in bound.items() if n not in rows})


def real_positions(inputs: Batch | Tensor) -> Tensor | None:
    """Which positions of the decoder are real: bool `[N, T]`; None where all are."""
    if isinstance(inputs, Tensor):
        return None
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    return None if mask is None or mask.ndim != 2 or bool(mask.all()) else mask.bool()


def block_paths(model: nn.Module, module: AttentionModule) -> list[str]:
    """Paths of all blocks of the stack that holds a module, those without attention included.

    Args:
        model: The model.
        module: Inside a block of it.
    """
    container = module.block.rpartition(".")[0]
    return [f"{container}.{name}" for name, _ in model.get_submodule(container).named_children()]


def marker_like(hidden: Tensor) -> Tensor:
    """Stands for hidden states where only their shape matters; takes no memory."""
    return hidden.new_zeros(()).expand(hidden.shape)

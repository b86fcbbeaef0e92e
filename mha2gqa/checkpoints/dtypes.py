"""The number formats of checkpoints: their names in safetensors, in torch and in configs. No torch is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """One number format.

    Args:
        stored: Its name in a safetensors header.
        torch: Its attribute of `torch`; empty where torch has none.
        bits: Width of one element.
        names: What else configs and options call it.
    """

    stored: str
    torch: str
    bits: int
    names: tuple[str, ...] = ()


_TABLE = (
    Dtype("F64", "float64", 64, ("double",)),
    Dtype("F32", "float32", 32, ("fp32", "float")),
    Dtype("F16", "float16", 16, ("fp16", "half")),
    Dtype("BF16", "bfloat16", 16, ("bf16",)),
    Dtype("I64", "int64", 64),
    Dtype("I32", "int32", 32),
    Dtype("I16", "int16", 16),
    Dtype("I8", "int8", 8),
    Dtype("U64", "uint64", 64),
    Dtype("U32", "uint32", 32),
    Dtype("U16", "uint16", 16),
    Dtype("U8", "uint8", 8),
    Dtype("BOOL", "bool", 8),
    Dtype("C64", "complex64", 64),
    Dtype("F8_E4M3", "float8_e4m3fn", 8),
    Dtype("F8_E5M2", "float8_e5m2", 8),
    Dtype("F8_E8M0", "float8_e8m0fnu", 8),
    Dtype("F8_E4M3FNUZ", "float8_e4m3fnuz", 8),
    Dtype("F8_E5M2FNUZ", "float8_e5m2fnuz", 8),
    Dtype("F4", "float4_e2m1fn_x2", 4),
    Dtype("F6_E2M3", "", 6),
    Dtype("F6_E3M2", "", 6),
)
_STORED = {dtype.stored: dtype for dtype in _TABLE}
_NAMED = {name: dtype for dtype in _TABLE for name in (dtype.torch, *dtype.names) if name}
COMPUTED = tuple(dtype.stored for dtype in _TABLE[:4])  # what attention weights can be merged in
OPTION_NAMES = tuple(name for dtype in _TABLE[:4] for name in (dtype.torch, *dtype.names))


def stored_dtype_bits(stored: str) -> int:
    """Bits of one element of a safetensors dtype.

    Raises:
        CheckpointError: The name is unknown: its width is never guessed.
    """
    if stored not in _STORED:
        raise CheckpointError(
            f"unknown dtype {stored!r}", fix=f"save the model in one of {', '.join(COMPUTED)}"
        )
    return _STORED[stored].bits


def stored_nbytes(stored: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this safetensors dtype and shape.

    Raises:
        CheckpointError: The dtype is unknown, or such a tensor does not fill whole bytes.
    """
    bits = stored_dtype_bits(stored) * math.prod(shape)
    if bits % 8:
        raise CheckpointError(f"{stored} of shape {list(shape)} does not fill whole bytes")
    return bits // 8


def named_dtype(name: object) -> Dtype | None:
    """The format that a config or an option calls `name` (`bfloat16`, `torch.bfloat16`, `bf16`, …), or None."""
    return _NAMED.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def torch_dtype(stored: str) -> torch.dtype:
    """torch's dtype for a safetensors dtype name.

    Raises:
        CheckpointError: The installed torch has none.
    """
    import torch

    found = getattr(torch, _STORED[stored].torch or " ", None) if stored in _STORED else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch has no dtype {stored}", fix="save the model in another dtype")
    return found


def stored_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype.

    Raises:
        CheckpointError: safetensors has none for it.
    """
    found = named_dtype(str(dtype))
    if found is None:
        raise CheckpointError(
            f"safetensors cannot store {dtype}".replace("torch.", ""), fix="save the model in another dtype"
        )
    return found.stored

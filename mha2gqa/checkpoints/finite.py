"""Whether stored numbers are finite, by their bits, without making a tensor of them."""

from __future__ import annotations

import numpy as np

from .safetensors_file import TensorInfo
from .source_file import SourceFile

PIECE = 1 << 20  # bytes looked at in one go: they stay in the processor's cache

# All bits but the sign, and the largest of them that stand for a finite number.
_PATTERNS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "F64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FEF_FFFF_FFFF_FFFF),
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F7F_FFFF),
    "C64": (np.uint32, 0x7FFF_FFFF, 0x7F7F_FFFF),
    "F16": (np.uint16, 0x7FFF, 0x7BFF),
    "BF16": (np.uint16, 0x7FFF, 0x7F7F),
    "F8_E4M3": (np.uint8, 0x7F, 0x7E),
    "F8_E5M2": (np.uint8, 0x7F, 0x7B),
    "F8_E8M0": (np.uint8, 0xFF, 0xFE),
}


def all_finite(data: np.ndarray, dtype: str) -> bool:
    """Whether no number is NaN or infinite.

    Args:
        data: Their bytes `[n]`, uint8.
        dtype: Their safetensors dtype; those without NaN are finite always.

    Example:
        >>> all_finite(np.array([1.0, np.inf], np.float16).view(np.uint8), "F16")
        False
    """
    if dtype not in _PATTERNS:
        return True
    kind, mask, largest = _PATTERNS[dtype]
    bare = np.empty(min(PIECE, len(data)) // np.dtype(kind).itemsize, kind)
    for begin in range(0, len(data), PIECE):
        numbers = data[begin : begin + PIECE].view(kind)
        if np.bitwise_and(numbers, kind(mask), out=bare[: len(numbers)]).max() > largest:
            return False
    return True


def stored_finite(source: SourceFile, info: TensorInfo) -> bool:
    """`all_finite` of a tensor as it lies in a file."""
    if info.dtype not in _PATTERNS:
        return True
    buffer = np.empty(PIECE, np.uint8)
    for begin in range(info.begin, info.end, PIECE):
        piece = buffer[: min(PIECE, info.end - begin)]
        source.read_into(piece.data, begin)
        if not all_finite(piece, info.dtype):
            return False
    return True

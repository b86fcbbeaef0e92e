"""Reads GGUF files: metadata, and tensors of the kinds F32, F16, Q4_1 and Q8_0 as float32."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
BLOCK = 32  # weights that share a scale


class GgufFile:
    """A GGUF file in memory.

    Args:
        data: Its bytes.

    Attributes:
        metadata: By key.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        if data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        self.at = 8
        tensors, entries = self._take("<Q"), self._take("<Q")
        self.metadata = {self._text(): self._value(self._take("<I")) for _ in range(entries)}
        self._tensors = {}
        for _ in range(tensors):
            name, rank = self._text(), self._take("<I")
            shape = [self._take("<Q") for _ in range(rank)][::-1]
            self._tensors[name] = (shape, self._take("<I"), self._take("<Q"))
        align = self.metadata.get("general.alignment", 32)
        self.start = -(-self.at // align) * align

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            inner, count = self._take("<I"), self._take("<Q")
            return [self._value(inner) for _ in range(count)]
        return self._take(SCALARS[kind])

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        shape, kind, offset = self._tensors[name]
        count, begin = int(np.prod(shape)), self.start + offset
        if kind in (0, 1):
            dtype = np.float32 if kind == 0 else np.float16
            return np.frombuffer(self.data, dtype, count, begin).astype(np.float32).reshape(shape)
        if kind == 3:  # Q4_1: scale and least value, then 32 numbers of 4 bits, low halves first
            row = np.dtype([("scale", "<f2"), ("least", "<f2"), ("codes", "u1", BLOCK // 2)])
            rows = np.frombuffer(self.data, row, count // BLOCK, begin)
            codes = np.concatenate([rows["codes"] & 15, rows["codes"] >> 4], axis=1).astype(np.float32)
            least = rows["least"].astype(np.float32)[:, None]
            return (codes * rows["scale"].astype(np.float32)[:, None] + least).reshape(shape)
        if kind == 8:  # Q8_0
            row = np.dtype([("scale", "<f2"), ("codes", "i1", BLOCK)])
            rows = np.frombuffer(self.data, row, count // BLOCK, begin)
            return (rows["codes"] * rows["scale"].astype(np.float32)[:, None]).reshape(shape)
        raise ValueError(f"{name}: kind {kind} is not read")

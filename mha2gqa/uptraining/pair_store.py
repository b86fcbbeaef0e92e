"""Encoded pairs on disk: ids and samples written once, drawn in any order, so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from ..data import Pair
from ..data.audio import Audio, KeptFeatures
from ..data.seq2seq import Example, PairEncoder
from ..errors import CheckpointError, DataError, reason
from .run_dir import cleanup_on_error

FULL_SCALE = 32_768  # of 16-bit sound, as nearly all recordings are: what was read comes back to the bit
AGAIN = "delete it: the pairs are encoded again"


class StoredPairs(Sequence[Example]):
    """The pairs of `write_pairs`, mapped into memory; the features of a recording are made when it is first drawn.

    Args:
        path: As given there.
        encoder: Of the model.

    Attributes:
        targets: int64 `[N]`, target tokens of each pair, which carry its loss.
        source_length: Mean length of a source: ids, or samples.
        decoder_length: Mean positions of the decoder.

    Raises:
        CheckpointError: The files are damaged.

    Example:
        >>> rows = StoredPairs(folder / "train", encoder)  # doctest: +SKIP
        >>> batch = encoder.collate(rows[[3, 1]])  # doctest: +SKIP
    """

    def __init__(self, path: Path, encoder: PairEncoder) -> None:
        self.encoder = encoder
        # In each process that reads: a run of several passes draws them again.
        self._features = KeptFeatures()
        files = _files(path)
        try:
            index = np.load(files["index"])
            self._ends, prompts = index[:, :2], index[:, 2]  # where source and target end, [N, 2]
            kind = np.int16 if encoder.audio else np.int32
            self._source = np.memmap(files["source"], kind, "r", shape=int(self._ends[-1, 0]))
            self._target = np.memmap(files["target"], np.int32, "r", shape=int(self._ends[-1, 1]))
        except (EOFError, IndexError, OSError, ValueError) as error:
            raise CheckpointError(
                f"damaged ({reason(error, 80)})", where=files["index"], fix=AGAIN
            ) from error
        lengths = np.diff(self._ends, axis=0, prepend=0)
        self._prompts, self.targets = prompts, lengths[:, 1] - prompts
        self.source_length, self.decoder_length = float(lengths[:, 0].mean()), float(lengths[:, 1].mean()) - 1

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, row: int) -> Example: ...
    @overload
    def __getitem__(self, row: slice | Sequence[int]) -> list[Example]: ...
    def __getitem__(self, row: int | slice | Sequence[int]) -> Example | list[Example]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not isinstance(row, int | np.integer):
            return [self[i] for i in row]
        start = self._ends[row - 1] if row else np.zeros(2, np.int64)
        end, place = self._ends[row], f"pair {row}"
        source, decoder = self._source[start[0] : end[0]], np.array(self._target[start[1] : end[1]])
        if self.encoder.audio:

            def heard() -> np.ndarray:
                return self.encoder.features(np.asarray(source, np.float32) / FULL_SCALE, place)

            features = self._features.of(int(row), heard)
            return Example(features, decoder, int(self._prompts[row]), place)
        return Example(np.array(source), decoder, int(self._prompts[row]), place)


class PairsInMemory(Sequence[Example]):
    """Encoded pairs as a list, with what a run must know of their lengths; attributes as of `StoredPairs`.

    Args:
        examples: At least one.
        encoder: Of the model.

    Raises:
        DataError: There are none, or one has no target.
    """

    def __init__(self, examples: Sequence[Example], encoder: PairEncoder) -> None:
        self.encoder, self._examples = encoder, list(examples)
        if not self._examples:
            raise DataError("there are no pairs", where="pairs", fix="give at least one example")
        self.targets = np.array([len(e.decoder) - e.prompt for e in self._examples], np.int64)
        if (self.targets < 1).any():
            raise DataError(
                "no target", where=self._examples[int(self.targets.argmin())].place, fix="leave it out"
            )
        self.source_length = float(np.mean([e.encoder.shape[0] for e in self._examples]))
        self.decoder_length = float(np.mean([len(e.decoder) for e in self._examples])) - 1

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, row: int) -> Example: ...
    @overload
    def __getitem__(self, row: slice | Sequence[int]) -> list[Example]: ...
    def __getitem__(self, row: int | slice | Sequence[int]) -> Example | list[Example]:
        if isinstance(row, slice | int | np.integer):
            return self._examples[row]
        return [self._examples[i] for i in row]


Pairs = StoredPairs | PairsInMemory


def is_written(path: Path) -> bool:
    """Whether `write_pairs` finished there."""
    return _files(path)["index"].exists()


def write_pairs(path: Path, encoder: PairEncoder, pairs: Iterable[Pair], targets: int | None = None) -> int:
    """Encode pairs into files, complete or not at all, and count them.

    Recordings are kept as 16-bit samples at the model's rate: 115 MB an hour at 16 kHz.

    Args:
        path: The files are this name with `.source.bin`, `.target.bin` and, written last, `.index.npy`.
        encoder: Of the model.
        pairs: In the order of the file.
        targets: Stop where there are so many target tokens.

    Raises:
        DataError: As `PairEncoder.encode`.
    """
    files, rows = _files(path), []
    source_end = target_end = found = 0
    partial = path.with_name(f"{path.name}.index.partial")
    with (
        cleanup_on_error(partial),
        files["source"].open("wb") as source_file,
        files["target"].open("wb") as target_file,
    ):
        for pair in pairs:
            source, decoder, prompt = encoder.encode_raw(pair)
            if encoder.audio:
                source = np.clip(np.rint(source * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
            source_file.write(source.tobytes())
            target_file.write(decoder.tobytes())
            source_end, target_end = source_end + len(source), target_end + len(decoder)
            rows.append((source_end, target_end, prompt))
            found += len(decoder) - prompt
            if targets is not None and found >= targets:
                break
    with cleanup_on_error(partial):
        with partial.open("wb") as file:
            np.save(file, np.array(rows, np.int64).reshape(-1, 3))
        partial.replace(files["index"])
    return len(rows)


def _files(path: Path) -> dict[str, Path]:
    names = {"source": "source.bin", "target": "target.bin", "index": "index.npy"}
    return {part: path.with_name(f"{path.name}.{name}") for part, name in names.items()}


def content_key(pair: Pair) -> str:
    """What a pair is known by when training and held-out pairs are kept apart: its source alone."""
    return pair.source.digest() if isinstance(pair.source, Audio) else " ".join(pair.source.split())

"""Short digests that tell whether files are still what they were: sizes, and samples of their contents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

# Files of a checkpoint beside its weights that decide what a run computes.
DECISIVE = (
    "config.json",
    "mha2gqa.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
EDGE, PIECES, PIECE = 1 << 20, 16, 1 << 16  # bytes read at either end of a file, and in pieces between


def checkpoint_fingerprint(folder: Path) -> str:
    """A fingerprint of a checkpoint: config, manifest, tokenizer, and size and samples of each weight file."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name in DECISIVE or file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size} {file_fingerprint(file)}".encode())
    return digest.hexdigest()[:16]


def weights_fingerprint(folder: Path) -> str:
    """A fingerprint of the weight files of a checkpoint alone: their sizes, and samples of each."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return hashlib.sha256(" ".join(map(file_fingerprint, files)).encode()).hexdigest()[:16]


def file_fingerprint(file: Path) -> str:
    """A digest of both ends of a file and of pieces evenly between them; of all of a small one."""
    size, digest = file.stat().st_size, hashlib.sha256()
    between = (EDGE + (size - 2 * EDGE) * piece // PIECES for piece in range(PIECES))
    with file.open("rb") as handle:
        digest.update(handle.read(EDGE))
        for start in between if size > 2 * EDGE else ():
            handle.seek(start)
            digest.update(handle.read(PIECE))
        handle.seek(max(0, size - EDGE))
        digest.update(handle.read())
    return digest.hexdigest()[:16]


def source_fingerprint(name: str) -> str:
    """A fingerprint of a model or of data: a checkpoint's, of the files' ends; names of the Hub stand for themselves."""
    path = Path(name)
    if path.is_dir() and (path / "config.json").exists():
        return checkpoint_fingerprint(path)
    if path.is_dir():
        return _files_fingerprint(sorted(p for p in path.rglob("*") if p.is_file()))
    return _files_fingerprint([path]) if path.is_file() else name


def source_fingerprints(names: Sequence[str]) -> dict[str, str]:
    """`source_fingerprint` of every name."""
    return {name: source_fingerprint(name) for name in names}


def _files_fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(EDGE))
            handle.seek(max(0, size - EDGE))
            digest.update(handle.read())
    return digest.hexdigest()[:16]

"""Which recordings a name of data stands for, and the tables that name them: the layout of `datasets`' AudioFolder."""

from __future__ import annotations

import glob
from pathlib import Path

from ..errors import DataError, listed
from .audio import AUDIO_SUFFIXES, UNREAD_SUFFIXES
from .sniffing import Sniffed, by_name, exists, is_metadata, of_split, parted, sniff


def sniff_recordings(name: str) -> Sniffed | None:
    """The tables of recordings that a name stands for; a folder that holds nothing is refused in words of recordings.

    Raises:
        DataError: As `sniff`.
    """
    folder, _ = parted(name)
    if exists(folder) and folder.is_dir() and not any(by_name(p.name)[1] for p in folder.rglob("*")):
        kinds = sorted({p.suffix for p in folder.rglob("*") if p.suffix.lower() in UNREAD_SUFFIXES})
        others = f" ({', '.join(kinds)} are not read)" if kinds else ""
        raise DataError(
            f"no recordings in this folder, and no table of them{others}",
            where=name,
            fix=f"known are {', '.join(AUDIO_SUFFIXES)}, with metadata.csv or metadata.jsonl for transcripts",
        )
    found = sniff(name)
    return None if found is None else _metadata_alone(name, found)


def _metadata_alone(name: str, found: Sniffed) -> Sniffed:
    """Of a folder of recordings its metadata, where other tables lie beside it."""
    tables = tuple(file for file in found.files if is_metadata(file.path))
    others = [file.path.name for file in found.files if file not in tables]
    if not tables or not others or parted(name)[0].is_file():
        return found
    unread = f"{name}: not read beside its metadata: {listed(others)}; name a file to read it"
    return Sniffed(tables, (unread,))


def recordings(name: str) -> list[Path]:
    """The recordings a name stands for where no table lies beside them: a file of sound, a folder of them, a glob.

    Raises:
        UsageError: A folder has folders of several splits, and none is asked for.
        DataError: It has none of that name.
    """
    path, split = parted(name)
    if not exists(path):
        found = sorted(map(Path, glob.glob(str(path), recursive=True))) if glob.has_magic(name) else []  # noqa: PTH207
        return found if all(map(_is_sound, found)) else []
    if path.is_file():
        return [path] if _is_sound(path) else []
    there = sorted(p.relative_to(path) for p in path.rglob("*"))
    seen = [p for p in there if not any(part.startswith(".") for part in p.parts)]
    if any(map(is_metadata, seen)):
        return []
    found = [p for p in seen if _is_sound(path / p)]
    chosen, _ = of_split(path, found, split, lambda p: p.parent.as_posix()) if found else ([], [])
    return [path / p for p in chosen]


def _is_sound(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_SUFFIXES and path.is_file()


def unread(name: str) -> list[str]:
    """A warning of recordings in a folder that are of kinds which are not read."""
    path, _ = parted(name)
    files = sorted(path.rglob("*")) if exists(path) and path.is_dir() else []
    found = [p.name for p in files if p.suffix.lower() in UNREAD_SUFFIXES and not p.name.startswith(".")]
    return [f"{name}: not read: {listed(found)}; convert them to WAV or FLAC"] if found else []


def tables_beside(name: str) -> list[str]:
    """Tables in a folder of recordings that are not read since they are not called metadata."""
    path, _ = parted(name)
    files = sorted(path.rglob("*")) if path.is_dir() else []
    return [str(p) for p in files if by_name(p.name)[1] not in (None, "text") and not p.name.startswith(".")]

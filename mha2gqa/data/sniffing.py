"""What a name of data stands for: which files, of which format, in which compression. Asked once, before reading."""

from __future__ import annotations

import glob
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import DataError, UsageError, reason
from .audio import AUDIO_SUFFIXES

FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    **dict.fromkeys((".txt", ".text", ".raw", ".md", ".rst"), "text"),
}
PROSE = (".md", ".rst")  # data only where a folder holds nothing else
COMPRESSIONS = {
    ".gz": b"\x1f\x8b",
    ".xz": b"\xfd7zXZ\x00",
    ".bz2": b"BZh",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".zip": b"PK",
}
MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
# Files that lie beside data and are none: cards, licences, what `datasets` and Git write.
BESIDE = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|authors)\b.*"
    r"|(dataset_infos?|dataset_dict|state|croissant)\.json",
    re.IGNORECASE,
)
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation", "heldout"), "validation"),
}
_SPLIT = re.compile(rf"(?:^|[-._ /])({'|'.join(SPLITS)})(?=$|[-._ /0-9])", re.IGNORECASE)
SPLIT_MARK = "::"  # FOLDER::SPLIT
ALL_SPLITS = "all"
NAMED = 4  # names in a message, at most
HEAD = 4096  # bytes looked at
SAVED = "saved"  # format of a folder that `Dataset.save_to_disk` wrote
LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class SourceFile:
    """A file of data.

    Args:
        path: The file (a folder where `format` is `saved`).
        format: `jsonl`, `text`, `csv`, `tsv`, `parquet`, `arrow` or `saved`.
        compression: `.gz`, `.xz`, `.bz2`, `.zst`, `.zip`, or None.
        member: Which file of a zip archive.
    """

    path: Path
    format: str
    compression: str | None = None
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"


@dataclass(frozen=True)
class Sniffed:
    """The files a name stands for, and what was not taken for data."""

    files: tuple[SourceFile, ...]
    warnings: tuple[str, ...] = ()


def sniff(name: str) -> Sniffed | None:
    """The files a name stands for, or None when it can only be a data set of the Hub.

    Args:
        name: A file, a folder (`FOLDER::SPLIT` for one of its splits), or a glob.

    Raises:
        DataError: There is nothing of that name, or nothing in it that can be read.
        UsageError: A folder holds several splits and none was chosen.
    """
    path, split = parted(name)
    if exists(path) and path.is_dir():
        return _sniff_folder(path, split)
    if split is not None:
        raise DataError(
            "no such folder", where=path, fix=f"FOLDER{SPLIT_MARK}SPLIT names a split of a folder"
        )
    if exists(path):
        return Sniffed(tuple(sniff_file(path)))
    if glob.has_magic(name):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        files = sorted(p for p in map(Path, matches) if p.is_file())
        if not files:
            raise DataError("no file matches", where=name)
        found = [file for match in files for file in sniff_file(match)]
        splits = sorted({s for file in files if (s := split_of(file.name))})
        mixed = (f"{name}: reads the splits {', '.join(splits)} together",) if len(splits) > 1 else ()
        return Sniffed(tuple(found), mixed)
    if looks_like_file(name):
        raise DataError("no such file or folder", where=name)
    return None


def parted(name: str) -> tuple[Path, str | None]:
    """Path and split of a name."""
    path = Path(name).expanduser()
    if SPLIT_MARK in name and not exists(path):
        folder, _, split = name.rpartition(SPLIT_MARK)
        return Path(folder).expanduser(), split.lower()
    return path, None


def exists(path: Path) -> bool:
    """Whether there is such a file; False where no file can have such a name."""
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than names can be, or with a NUL
        return False


def looks_like_file(name: str) -> bool:
    """Whether a name is meant as a local path, going by its form."""
    suffix = PurePosixPath(name).suffix.lower()
    by_suffix = suffix in FORMATS or suffix in COMPRESSIONS or suffix in AUDIO_SUFFIXES
    return by_suffix or name.startswith((".", "/", "~")) or name.count("/") > 1 or SPLIT_MARK in name


# --- files ---------------------------------------------------------------------------------------------


def sniff_file(path: Path) -> list[SourceFile]:
    """What a file is: one entry, or one for each file of data in a zip archive.

    Raises:
        DataError: It is a Git LFS pointer, or not of a kind that can be read.
    """
    compression, kind = by_name(path.name)
    if not path.is_file():  # a pipe: what it holds can be read only once
        return [SourceFile(path, kind or "text", compression)]
    head = _head(path)
    if head.startswith(LFS):
        raise DataError("a Git LFS pointer, not the data itself", where=path, fix="run git lfs pull")
    if path.suffix.lower() in AUDIO_SUFFIXES:
        raise DataError(
            "a recording, where text or a table is read",
            where=path,
            fix="give text or pairs; to a speech model the folder of recordings, or files of sound alone",
        )
    compression = next((c for c, magic in COMPRESSIONS.items() if head.startswith(magic)), compression)
    if compression == ".zip":
        return _sniff_zip(path)
    if compression is None:
        kind = next((k for magic, k in MAGIC.items() if head.startswith(magic)), kind)
        _refuse_binary(head, kind, path)
    return [SourceFile(path, kind or "text", compression)]


def by_name(name: str) -> tuple[str | None, str | None]:
    """Compression and format that the endings of a name tell."""
    path = PurePosixPath(name.lower())
    compression = path.suffix if path.suffix in COMPRESSIONS else None
    inner = PurePosixPath(path.stem) if compression else path
    return compression, FORMATS.get(inner.suffix)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise DataError(f"cannot be read ({reason(error)})", where=path) from error


def _refuse_binary(head: bytes, kind: str | None, where: object) -> None:
    """UTF-8 text has no zero bytes; UTF-16, archives and weights do."""
    if b"\0" in head and kind not in ("parquet", "arrow"):
        raise DataError(
            f"not UTF-8 at byte {head.index(0)}: a zero byte, as UTF-16 and binary files have",
            where=where,
            fix=f"convert it to UTF-8, or to one of {', '.join(FORMATS)}",
        )


def _sniff_zip(path: Path) -> list[SourceFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [i.filename for i in archive.infolist() if not i.is_dir()]
    except Exception as error:
        raise DataError(f"cannot be read ({reason(error)})", where=path, fix="download it again") from error
    kept = [n for n in names if not n.startswith("__MACOSX/") and not BESIDE.fullmatch(PurePosixPath(n).name)]
    known = [(n, kind) for n in sorted(kept) if (kind := by_name(n)[1]) and by_name(n)[0] is None]
    if not known and len(kept) == 1 and (kind := by_name(path.name)[1]):  # data.jsonl.zip with one odd name
        known = [(kept[0], kind)]
    if not known:
        raise DataError(
            f"no {', '.join(FORMATS)} file in this archive", where=path, fix="unpack it and name the files"
        )
    return [SourceFile(path, kind, ".zip", name) for name, kind in known]


# --- folders -------------------------------------------------------------------------------------------


def _sniff_folder(folder: Path, split: str | None) -> Sniffed:
    if (folder / "dataset_dict.json").is_file():
        return _saved_splits(folder, split)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return Sniffed((SourceFile(folder, SAVED),))
    data, left_out = _listed(folder)
    if not data:
        there = f" (it holds {_names(left_out)})" if left_out else ""
        endings = ", ".join((*FORMATS, *COMPRESSIONS))
        raise DataError(f"no data file in this folder{there}", where=folder, fix=f"known are {endings}")
    data, chosen = of_split(folder, data, split)
    files = [file for path in data for file in sniff_file(folder / path)]
    warnings = [*chosen, *_mixed_formats(folder, files)]
    if left_out:
        warnings.append(f"{folder}: not read: {_names(left_out)}; name a file to read it")
    return Sniffed(tuple(files), tuple(warnings))


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of data, and files that are not read, relative to the folder; hidden ones are neither."""
    try:
        listed = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    except OSError as error:
        raise DataError(f"cannot be listed ({reason(error)})", where=folder) from error
    seen = [p for p in listed if not any(part.startswith(".") for part in p.parts)]
    if any(map(is_metadata, seen)):  # a table of recordings, which it names itself
        seen = [p for p in seen if p.suffix.lower() not in AUDIO_SUFFIXES]
    data = [p for p in seen if _may_be_data(p)]
    prose = [p for p in data if by_name(p.name)[1] == "text"]
    if len(prose) == len(data):  # plain text; notes in Markdown lie beside it
        prose = [p for p in prose if PurePosixPath(p.name.lower()).suffix in PROSE]
    if len(prose) < len(data):
        data = [p for p in data if p not in set(prose)]
    return data, [p for p in seen if p not in set(data)]


def is_metadata(path: Path) -> bool:
    """Whether a file is the table of the recordings beside it, by its name."""
    return path.name.partition(".")[0] == "metadata" and by_name(path.name)[1] not in (None, "text")


def _may_be_data(path: Path) -> bool:
    compression, kind = by_name(path.name)
    return (kind is not None or compression == ".zip") and not BESIDE.fullmatch(path.name)


def of_split(
    folder: Path, data: list[Path], split: str | None, named: Callable[[Path], str] = Path.as_posix
) -> tuple[list[Path], list[str]]:
    """The files of one split, and what to say of it.

    Args:
        folder: Where they are.
        data: Files relative to it.
        split: As asked, None where none was.
        named: What of a file says which split it belongs to.

    Raises:
        UsageError: There are several, and none was asked for.
        DataError: There is none of that name.
    """
    splits = {path: split_of(named(path)) for path in data}
    found = Counter(s or "others" for s in splits.values())
    if split == ALL_SPLITS:
        return data, [f"{folder}: reads the splits {', '.join(sorted(found))} together"] if len(
            found
        ) > 1 else []
    if split is not None:
        wanted = SPLITS.get(split, split)
        chosen = [path for path, s in splits.items() if s == wanted]
        if not chosen:
            raise DataError(
                f"no files of a split {split}", where=folder, fix=f"it has {', '.join(sorted(found))}"
            )
        return chosen, [f"{folder}: split {wanted}, {len(chosen)} of {len(data)} files"]
    if len(found) > 1 and set(found) - {"train", "others"}:
        parts = ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))
        raise UsageError(
            f"holds several splits, which are not mixed: {parts}",
            where=folder,
            fix=f"choose one with {folder}{SPLIT_MARK}{min(set(found) - {'others'})}, or {SPLIT_MARK}{ALL_SPLITS}",
        )
    return data, []


def split_of(name: str) -> str | None:
    """`train`, `test` or `validation` where a path relative to its folder says so."""
    found = _SPLIT.findall(name)
    return SPLITS[found[-1].lower()] if found else None


def _saved_splits(folder: Path, split: str | None) -> Sniffed:
    """A saved `DatasetDict`: a folder for each split."""
    names = sorted(p.name for p in folder.iterdir() if (p / "state.json").is_file())
    if split is None and len(names) > 1:
        raise UsageError(
            f"holds several splits, which are not mixed: {', '.join(names)}",
            where=folder,
            fix=f"choose one with {folder}{SPLIT_MARK}{names[0]}, or {SPLIT_MARK}{ALL_SPLITS}",
        )
    chosen = names if split in (None, ALL_SPLITS) else [n for n in names if n.lower() == split]
    if not chosen:
        raise DataError(f"no split {split or ''}", where=folder, fix=f"it has {', '.join(names) or 'none'}")
    return Sniffed(tuple(SourceFile(folder / name, SAVED) for name in chosen))


def _mixed_formats(folder: Path, files: Sequence[SourceFile]) -> list[str]:
    found = Counter(f".{file.format}{file.compression or ''}" for file in files)
    if len(found) < 2:
        return []
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
    return [f"{folder}: files of several kinds are read together: {parts}"]


def _names(paths: Iterable[Path]) -> str:
    listed = [path.as_posix() for path in paths]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more

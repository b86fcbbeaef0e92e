"""The files beside a checkpoint's weights: which are copied, by known names, and which are named and left out."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError, UsageError, listed, quoted
from .json_files import LFS_POINTER, check_pointer, read_json
from .manifest import MANIFEST, read_manifest

# What of a source goes with its result, and why. Names are compared without regard to case.
KNOWN: dict[str, tuple[str, ...]] = {
    "tokenizer": (
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model",
        "spm.model", "*.spm", "*.tiktoken", "tekken.json", "normalizer.json", "dict.txt", "bpe.codes",
    ),
    "processor": ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "chat template": ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    "generation": ("generation_config.json",),
    "licence": ("license*", "licence*", "notice*", "copying*", "use_policy*", "acceptable_use*"),
    "model card": ("readme.md", "readme.base.md"),
}  # fmt: skip
_PATTERNS = tuple(pattern for patterns in KNOWN.values() for pattern in patterns)
# Parsed when the result is loaded: they must be JSON objects.
_PARSED = (
    "generation_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_NAMES_CODE = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".tflite", ".npz", ".distcp",
)  # fmt: skip
_WEIGHT_FOLDERS = ("original", "onnx", "openvino", "coreml")
_OURS = ("config.json", MANIFEST)
_RELATIVE_IMPORT = re.compile(r"^\s*(?:from\s+\.(\w+)(?:\.\w+)*\s+import|import\s+\.(\w+))", re.MULTILINE)
MOST = 10_000  # files a folder is searched for


@dataclass(frozen=True)
class SideFiles:
    """The files beside the weights of a source.

    Args:
        folder: The source.
        copied: Relative names of those that go with the result.
        left: Names of those that stay behind.
        outside: Names of links among them that lead out of the folder.
    """

    folder: Path
    copied: tuple[str, ...]
    left: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def warnings(self) -> list[str]:
        """What the user should know of files that stay behind."""
        found = []
        if self.left:
            found.append(
                f"not copied, since nothing is known of them: {listed(self.left)} (--keep GLOB takes them along)"
            )
        if self.outside:
            found.append(f"not copied, since they are links out of the folder: {listed(self.outside)}")
        return found


def find_side_files(folder: Path, config: Mapping[str, Any], keep: Sequence[str] = ()) -> SideFiles:
    """Decide which files go with the result, and see that they can be read.

    Args:
        folder: The source.
        config: Its raw config: code that it names goes along.
        keep: Further patterns of relative names, such as `notes/*.txt`.

    Raises:
        CheckpointError: A known file is a dangling link, a Git LFS pointer, no regular file, or no JSON where
            it must be.
        UsageError: A pattern names nothing, or weights.
    """
    names = list(_names(folder))
    _check_patterns(keep, names)
    patterns, code = (*keep, *_kept_before(folder)), _code(folder, config)
    copied: list[str] = []
    left: list[str] = []
    outside: list[str] = []
    for name in names:
        known = name in code or any(fnmatch(name.lower(), pattern) for pattern in _PATTERNS)
        wanted = any(fnmatch(name, pattern) for pattern in patterns)
        if not (known or wanted):
            if not _is_weight(name):
                (outside if _leads_out(folder, name) else left).append(name)
        elif _leads_out(folder, name) and (folder / name).exists():
            outside.append(name)
        else:
            _check_readable(folder / name)
            copied.append(name)
    for name in _PARSED:
        if name in copied:
            read_json(folder / name)
    return SideFiles(folder, tuple(copied), tuple(left), tuple(outside))


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder whose tokenizer's files are not there although their names are.

    Raises:
        CheckpointError: One is a dangling link, a Git LFS pointer, or no regular file.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name.lower(), pattern) for pattern in KNOWN["tokenizer"]):
            _check_readable(path)


def copy_side_files(files: SideFiles, out: Path) -> None:
    """Copy them byte for byte.

    Raises:
        CheckpointError: One cannot be read. (Where it cannot be written the error is the system's.)
    """
    for name in files.copied:
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as written:
            for piece in _pieces(files.folder / name):
                written.write(piece)
            written.flush()
            os.fsync(written.fileno())


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                yield piece
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror})", where=path, fix="check its rights"
        ) from error


def _names(folder: Path) -> Iterator[str]:
    """Relative names of what is neither hidden nor a folder of other weights, sorted."""
    found: list[str] = []
    for root, folders, files in os.walk(folder):
        below = Path(root).relative_to(folder)
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        folders[:] = [
            n
            for n in folders
            if not (n.startswith(".") or n in _WEIGHT_FOLDERS or n in links or n == "__pycache__")
        ]
        found += [str(PurePosixPath(below / name)) for name in (*files, *links) if not name.startswith(".")]
        if len(found) > MOST:
            raise CheckpointError(
                f"more than {MOST:,} files", where=folder, fix="give a folder that holds the model alone"
            )
    return iter(sorted(name for name in found if name not in _OURS and not name.endswith(".index.json")))


def _is_weight(name: str) -> bool:
    return name.lower().endswith(_WEIGHT_SUFFIXES)


def _leads_out(folder: Path, name: str) -> bool:
    """Whether a name stands for something outside the source; the Hub's cache keeps its own files as blobs."""
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    target = (folder / name).resolve()
    return not any(target.is_relative_to(home) for home in homes)


def _check_readable(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"a link to {quoted(str(path.readlink()))}, which does not exist",
            where=path,
            fix="download the file again",
        )
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror})", where=path, fix="check its rights"
        ) from error
    if not regular:
        raise CheckpointError("not a regular file", where=path, fix="remove it, or restore the original")
    for piece in _pieces(path):
        check_pointer(piece[: len(LFS_POINTER)], path)
        break


def _code(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """Python files that a config names, and those that they import from beside them."""
    waiting = list(_named_modules(config))
    for name in _NAMES_CODE:
        if (folder / name).is_file() and not _leads_out(folder, name):
            waiting += _named_modules(read_json(folder / name))
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in found or not (folder / name).is_file() or _leads_out(folder, name):
            continue
        found.add(name)
        text = b"".join(_pieces(folder / name)).decode("utf-8", "replace")
        waiting += [first or second for first, second in _RELATIVE_IMPORT.findall(text)]
    return found


def _named_modules(config: Mapping[str, Any]) -> Iterator[str]:
    """Modules of `auto_map`: values are `module.Class`, or lists of such."""
    named = config.get("auto_map")
    for value in named.values() if isinstance(named, Mapping) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference:  # else of another repository
                module = reference.partition(".")[0]
                if module.isidentifier():
                    yield module


def _check_patterns(keep: Sequence[str], names: Sequence[str]) -> None:
    for pattern in keep:
        found = [name for name in names if fnmatch(name, pattern)]
        if not found:
            raise UsageError(
                "names no file of the source", where=f"--keep {quoted(pattern)}", fix="check the pattern"
            )
        if weights := [name for name in found if _is_weight(name) and "/" not in name]:
            raise UsageError(
                f"names weights ({quoted(weights[0])}), which loaders would take for the result's",
                where=f"--keep {quoted(pattern)}",
                fix="copy them yourself",
            )


def _kept_before(folder: Path) -> tuple[str, ...]:
    """The patterns that a source made by us was converted with (`--keep`): they apply again."""
    if not (folder / MANIFEST).is_file():
        return ()
    kept = read_manifest(folder).get("keep")
    return tuple(map(str, kept)) if isinstance(kept, list) else ()

"""`mha2gqa.json`: where a checkpoint comes from. What it says of this machine lies in a file that is never uploaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError
from .atomic import write_text
from .json_files import read_json

MANIFEST = "mha2gqa.json"
# Beside the notes that the Hub's client keeps of a local folder: it uploads nothing that lies there.
LOCAL_PARTS = (".cache", "huggingface", "mha2gqa.json")
SOURCE_PATH = "source_path"
DIGESTS = "digests"  # name of each tensor that is not as in the source -> SHA-256 of its bytes

# An absolute path, or one from the home folder, in a longer text. Not part of a URL or of a relative path.
_PATH = re.compile(r"(?<![\w/:.~-])(?:~|/)(?:/?[\w.@%+=~-]+/)+[\w.@%+=~-]*")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that we made, with what is known of it on this machine: paths are absolute.

    Raises:
        CheckpointError: There is none, or it is broken.
    """
    manifest = read_json(folder / MANIFEST, fix="convert again from the source")
    local = folder.joinpath(*LOCAL_PARTS)
    for path, value in _patches(read_json(local, fix="remove it")) if local.is_file() else ():
        _set(manifest, path, value)
    if isinstance(place := manifest.get(SOURCE_PATH), str):
        manifest[SOURCE_PATH] = str((folder / place).resolve())
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any], out: Path) -> None:
    """Write the manifest, and beside it what says where things lie on this machine.

    Args:
        folder: The folder that is being made.
        manifest: As data; `source_path` is the absolute path of the original, where that is a local folder.
        out: Where the folder will be: an original beside it is named relative to it.
    """
    public = dict(manifest)
    place = public.pop(SOURCE_PATH, None)
    if place is not None:
        public[SOURCE_PATH] = _beside(Path(place), out)
    changes: list[tuple[list[str | int], Any]] = []
    public = _without_paths(public, [], changes)
    if place is not None:
        changes.append(([SOURCE_PATH], place))
    write_text(folder / MANIFEST, json.dumps(public, indent=2, ensure_ascii=False) + "\n")
    if changes:
        local = folder.joinpath(*LOCAL_PARTS)
        local.parent.mkdir(parents=True, exist_ok=True)
        write_text(local.with_name(".gitignore"), "*\n")
        private = {"local": [{"key": path, "value": value} for path, value in changes]}
        write_text(local, json.dumps(private, indent=2, ensure_ascii=False) + "\n")


def original_place(manifest: Mapping[str, Any]) -> str | None:
    """Where the original of a checkpoint is: a folder that exists, or the name it has on the Hub.

    Args:
        manifest: From `read_manifest`.

    Returns:
        None where the manifest names none.

    Raises:
        CheckpointError: It names one that is not there.
    """
    place, name = (manifest.get(key) for key in (SOURCE_PATH, "source"))
    if isinstance(place, str) and (Path(place) / "config.json").is_file():
        return place
    if not isinstance(name, str) or not name:
        return None
    if isinstance(manifest.get("source_revision"), str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    if SOURCE_PATH not in manifest and (Path(name) / "config.json").is_file():
        return name  # uptrained from a model that nobody recorded the original of
    raise CheckpointError("is not here", where=place or name)


def without_paths(text: str) -> str:
    """`text` with absolute paths cut down to their last part.

    Example:
        >>> without_paths("statistics in /srv/x/s.safetensors are used")
        'statistics in s.safetensors are used'
    """
    if (
        re.match(r"~?/", text)
        and "\n" not in text
        and "://" not in text
        and " " not in text.partition("/")[0]
    ):
        whole = PurePosixPath(text)
        if len(whole.parts) > 1 and not re.search(r"[:;,] ", text):
            return whole.name
    return _PATH.sub(lambda found: PurePosixPath(found[0]).name, text)


def _without_paths(value: Any, path: list[str | int], changes: list[tuple[list[str | int], Any]]) -> Any:
    if isinstance(value, Mapping):
        return {
            without_paths(key): _without_paths(item, [*path, key], changes) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_paths(item, [*path, i], changes) for i, item in enumerate(value)]
    if isinstance(value, str) and (public := without_paths(value)) != value:
        changes.append((path, value))
        return public
    return value


def _beside(source: Path, out: Path) -> str | None:
    """The way from `out` to a source that lies in the same folder, or below it; None to any other."""
    here = out.resolve().parent
    if not source.is_relative_to(here) or here == Path(here.anchor):
        return None
    return PurePosixPath(os.path.relpath(source, out.resolve())).as_posix()


def _patches(local: Mapping[str, Any]) -> list[tuple[list[str | int], Any]]:
    entries = local.get("local")
    found = []
    for entry in entries if isinstance(entries, list) else []:
        path = entry.get("key") if isinstance(entry, dict) else None
        if isinstance(path, list) and path and all(isinstance(part, str | int) for part in path):
            found.append((path, entry.get("value")))
    return found


def _set(node: Any, path: list[str | int], value: Any) -> None:
    """Set a value deep inside, where the way to it is still there."""
    for part in path[:-1]:
        if (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        ):
            node = node[part]  # type: ignore[index]
        else:
            return
    last = path[-1]
    if (isinstance(node, dict) and isinstance(last, str)) or (
        isinstance(node, list) and isinstance(last, int) and last < len(node)
    ):
        node[last] = value  # type: ignore[index]

"""The embedded tiny model, its training text and its held-out text, and recipes."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError

# Left out: what some distributions package apart, what a machine generates, tables of characters.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
SKIPPED_FOLDERS |= {"turtledemo", "ensurepip", "encodings"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
HELDOUT_SHARE = 40  # one file in forty is held out


def tiny_model_path() -> Path:
    """Folder of the embedded tiny MHA Llama (model, tokenizer, `train.json`, `heldout.jsonl`).

    Returns:
        The folder; `examples/pretrain_tiny.py` makes it.
    """
    return Path(__file__).parent / "tiny-llama"


def heldout_path() -> Path:
    """The embedded held-out text: JSONL, one standard-library file a line, never trained on."""
    return tiny_model_path() / "heldout.jsonl"


def recipe_paths() -> dict[str, Path]:
    """The recipes that come along, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def is_heldout(source: str) -> bool:
    """Whether a standard-library file belongs to the held-out split.

    The rule looks at the file's name, not its content, so that the next Python's slightly edited copy
    of a held-out file is held out as well.

    Args:
        source: Path below the standard library, with forward slashes (`json/decoder.py`).
    """
    digest = hashlib.sha256(source.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELDOUT_SHARE == 0


def stdlib_documents(folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """The sources of the running Python's standard library, in sorted order.

    Args:
        folder: Another standard library to read.

    Returns:
        Pairs of path below the library (forward slashes) and text. Tests, tools, generated and
        third-party files are left out, so that every distribution of a version gives the same text.

    Raises:
        DataError: There are no sources (an embedded Python that carries only bytecode).
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    paths = []
    for parent, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)
        ]
        paths += [
            Path(parent, name)
            for name in files
            if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES)
        ]
    if not paths:
        raise DataError(
            "no Python sources", where=root, fix="use a Python that carries its standard library as source"
        )
    for source, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        text = path.read_bytes().decode("utf-8", errors="replace")
        if text.strip():
            yield source, text


def demo_texts(folder: Path, limit_bytes: int = 4_000_000) -> tuple[Path, Path]:
    """Text for the demo: training text of the running Python, and the embedded held-out text.

    Args:
        folder: Where `train.jsonl` is written.
        limit_bytes: About how much training text to write. Files come in an order scrambled by their
            names, so that a part is as varied as the whole.

    Returns:
        The training file (for calibration and uptraining) and the held-out file. No held-out file is in
        the training file, neither by name nor by content.

    Raises:
        DataError: The running Python carries no sources.

    Example:
        >>> train, heldout = demo_texts(Path("work"))  # doctest: +SKIP
    """
    with heldout_path().open(encoding="utf-8") as lines:
        heldout = {json.loads(line)["text"] for line in lines}
    documents = [(s, t) for s, t in stdlib_documents() if not is_heldout(s) and t not in heldout]
    documents.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    train, written = folder / "train.jsonl", 0
    with train.open("w", encoding="utf-8") as out:
        for source, text in documents:
            if written >= limit_bytes:
                break
            out.write(json.dumps({"source": source, "text": text}) + "\n")
            written += len(text.encode())
    return train, heldout_path()

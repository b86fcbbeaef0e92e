"""Text that the original never saw, cut into disjoint parts: calibration, tuning, uptraining."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha2gqa.data import encode_documents, read_documents

NAMES = ("calibration", "tuning", "uptraining")


@dataclass(frozen=True)
class Parts:
    """The three parts, as JSONL files.

    Args:
        folder: Where they are.
        facts: Documents, tokens and SHA-256 of each, by name.
    """

    folder: Path
    facts: dict[str, dict[str, Any]]

    def path(self, name: str) -> str:
        """The file of a part."""
        return str(self.folder / f"{name}.jsonl")

    def first(self, name: str, tokens: int, tokenizer: Any) -> str:
        """A file with the first documents of a part, up to so many tokens; made once for a folder.

        Args:
            name: The part.
            tokens: Of the documents together, at most.
            tokenizer: Counts them.
        """
        path = self.folder / f"{name}-{tokens}.jsonl"
        if not path.exists():
            documents, kept, count = list(read_documents([self.path(name)])), list[str](), 0
            for text, ids in zip(documents, encode_documents(tokenizer, documents), strict=True):
                count += len(ids)
                if count > tokens:
                    break
                kept.append(text)
            _write(path, kept)
        return str(path)


def split_parts(
    text: Sequence[str], tokenizer: Any, folder: Path, tokens: tuple[int, int] = (600_000, 600_000)
) -> Parts:
    """Cut `text` into parts, once for a folder.

    Documents are ordered by their hash, so that every part holds every source; the first ones up to the
    wanted tokens are for calibration, the next for tuning, all others for uptraining.

    Args:
        text: Files or folders.
        tokenizer: Counts the tokens (the end of each document included).
        folder: Receives the files.
        tokens: Of the calibration and of the tuning part, at least.
    """
    facts_file = folder / "parts.json"
    if not facts_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        documents = sorted(set(read_documents(text)), key=lambda x: hashlib.sha256(x.encode()).digest())
        lengths = [len(ids) for ids in encode_documents(tokenizer, documents)]
        facts, start = {}, 0
        for name, wanted in zip(NAMES, (*tokens, sum(lengths)), strict=True):
            end, count = start, 0
            while end < len(documents) and count < wanted:
                count += lengths[end]
                end += 1
            facts[name] = _write(folder / f"{name}.jsonl", documents[start:end]) | {"tokens": count}
            start = end
        facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    return Parts(folder, json.loads(facts_file.read_text()))


def _write(path: Path, documents: Sequence[str]) -> dict[str, Any]:
    data = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    path.write_bytes(data)
    return {"documents": len(documents), "sha256": hashlib.sha256(data).hexdigest()}

"""A ledger that several processes write to and that resumes: one JSON line per finished row."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _common import PACKAGE

# The rooms whose code decides the numbers.
DECISIVE = ("arch_conversion", "architectures", "calibration", "config", "conversion", "data", "heads.py")
DECISIVE += ("merging", "reconstruct", "uptraining")


def numbers_digest() -> str:
    """The start of a SHA-256 over the code that decides what a row measures."""
    digest = hashlib.sha256()
    for name in DECISIVE:
        root = PACKAGE / name
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Ledger:
    """Rows by key and code version.

    Args:
        path: The file that rows are appended to.
        claims: Folder in which a process marks the row it works on.
        resume: Further files whose rows count as done.
        copy: Where the file is copied after each row.
        any_code: Rows of other versions of the code count as done too.
        tuned: Ledgers whose tuning rows count, and whose FLOPs are known, whichever code measured them.
    """

    def __init__(
        self,
        path: Path,
        claims: Path,
        resume: Sequence[Path] = (),
        copy: Path | None = None,
        any_code: bool = False,
        tuned: Sequence[Path] = (),
    ) -> None:
        self.path, self.claims, self.copy = path, claims, copy
        self.resume, self.any_code, self.code = list(resume), any_code, numbers_digest()
        self.before = {e["key"]: e for path in tuned for e in read_lines(path) if "error" not in e}

    def failed(self) -> set[str]:
        """Keys of rows that broke off in this call."""
        return {
            e["key"] for e in read_lines(self.path) if "error" in e and self._claim_file(e["key"]).exists()
        }

    def entries(self) -> dict[str, dict[str, Any]]:
        """Finished rows by key; of several with one key the last."""
        found = {key: e for key, e in self.before.items() if e.get("tunes")}
        for path in [*self.resume, self.path]:
            for entry in read_lines(path):
                if "error" not in entry and (self.any_code or entry.get("code") == self.code):
                    found[entry["key"]] = entry
        return found

    def flops(self) -> dict[str, float]:
        """What each row cost, of those that are known from before too: the count depends on no rate."""
        known = self.before | self.entries()
        return {key: e["flops"] for key, e in known.items() if "flops" in e}

    def add(self, entry: dict[str, Any]) -> None:
        """Append a row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(entry | {"code": self.code}) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if self.copy:
                shutil.copyfile(self.path, self.copy)

    def _claim_file(self, key: str) -> Path:
        return self.claims / hashlib.sha256(key.encode()).hexdigest()[:24]

    def claim(self, key: str) -> bool:
        """Mark a row as being worked on; False where another process has it."""
        self.claims.mkdir(parents=True, exist_ok=True)
        try:
            with self._claim_file(key).open("x") as file:
                file.write(key)
        except FileExistsError:
            return False
        return True

    def claimed(self, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that some process of this call has taken."""
        return {key for key in keys if self._claim_file(key).exists()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a ledger; a last line that was cut off does not count."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows

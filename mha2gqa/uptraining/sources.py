"""Whether the text of a run is still the text it began with."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from ..data.reading import local_files
from ..errors import UsageError
from .budget import UptrainConfig
from .run_dir import RunDirectory, file_fingerprint, write_json

logger = logging.getLogger(__name__)

SOURCES = "sources.json"


def stamp_sources(paths: Sequence[str]) -> dict[str, str]:
    """Size and a digest of samples of each local file that some names of data stand for.

    Args:
        paths: Files, folders, globs; a data set of the Hub has no files here and is left out.
    """
    files = {str(file): file for path in paths for file in local_files(path) or ()}
    return {name: f"{file.stat().st_size} {file_fingerprint(file)}" for name, file in files.items()}


def check_sources(config: UptrainConfig, folder: Path, first: bool) -> list[str]:
    """Note the files of a new run; of a resumed one, see that they are the same.

    A run that streams reads on in them at the place where its checkpoint was. One that does not goes on with
    the blocks that it cut; where it has no checkpoint yet, they are cut anew.

    Args:
        config: The run.
        folder: Its workspace.
        first: Whether this is the process that writes.

    Returns:
        What the user should know.

    Raises:
        UsageError: A file of a stream has changed, is gone or is new; it is named.
    """
    path, now = folder / SOURCES, stamp_sources([*config.data, *(config.eval_data or ())])
    if not path.exists():
        if first:
            write_json(path, now)
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if not changed:
        return []
    name = changed[0]
    what = "is gone" if name not in now else "is new" if name not in before else "has changed"
    others = f" (and {len(changed) - 1} other files)" if len(changed) > 1 else ""
    checkpoint = RunDirectory.at(folder).last()
    if checkpoint is None:
        if first:
            for cut in (*folder.glob("*.npy"), *folder.glob("held_out.none")):
                cut.unlink()
            write_json(path, now)
        return []
    if config.streaming:
        raise UsageError(
            f"{what} since {checkpoint} was saved{others}, so that the run cannot read on where it was",
            where=name,
            fix=f"bring the old text back, choose another OUT, or delete {folder} to start over",
        )
    return [f"{name} {what}{others} since this run began: it goes on with the text that was read then"]

"""Upload a finished folder to the Hub: an explicit step of its own."""

from __future__ import annotations

import glob
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..checkpoints.hub import local_path
from ..checkpoints.reader import INDEX, MANIFEST, open_checkpoint
from ..checkpoints.side_files import find_side_files
from ..errors import CheckpointError, UsageError, hub_refusals, reason
from ..results import Result
from ..verification.checks import failed, verify

ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/README.md")


@dataclass
class PushResult(Result):
    """What `push` did.

    Args:
        folder: The folder.
        repo: `ORG/NAME`.
        files: What was (or would be) uploaded, relative to the folder.
        bytes: Their size.
        left: What else lies in the folder and is not uploaded.
        url: Of the commit; None for a dry run.
    """

    command: ClassVar[str] = "push"
    folder: str
    repo: str
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    left: list[str] = field(default_factory=list)
    url: str | None = None


def push(
    folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, message: str | None = None
) -> PushResult:
    """Verify a folder that we made and upload it: weights, config, manifest, known side files, an adapter of ours.

    Args:
        folder: A converted or uptrained checkpoint.
        repo: `ORG/NAME` on the Hub.
        private: Make a private repository, where it does not exist yet.
        dry_run: Verify and list only.
        message: Commit message.

    Returns:
        What was uploaded. The Hub's token comes from `hf auth login` or `HF_TOKEN`; it is never stored.

    Raises:
        UsageError: No folder of ours, or no repository name.
        CheckpointError: A check or the upload failed.
    """
    folder = local_path(folder)
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"no {MANIFEST} there", where=folder, fix="give a folder made by convert or uptrain")
    if len([part for part in repo.split("/") if part]) != 2:
        raise UsageError("is not ORG/NAME", where=repo)
    _check_name(repo)
    if broken := failed(verify(folder).checks):
        raise CheckpointError(f"check failed: {broken}", where=folder, fix="nothing was uploaded")
    files = _belonging(folder)
    result = PushResult(str(folder), repo, files, left=_others(folder, files))
    result.bytes = sum((folder / name).stat().st_size for name in files)
    if not dry_run:
        result.url = _upload(result, private, message or f"Add {folder.name}, made with mha2gqa")
    return result


def _belonging(folder: Path) -> list[str]:
    """Relative names of what belongs to a result of ours, sorted."""
    checkpoint = open_checkpoint(folder)
    wanted = [*checkpoint.files, INDEX, "config.json", MANIFEST, *ADAPTER]
    sides = find_side_files(folder, checkpoint.config)
    return sorted({*(name for name in wanted if (folder / name).is_file()), *sides.copied})


def _others(folder: Path, files: list[str]) -> list[str]:
    """Relative names of all other files that are not hidden: logs, checkpoints of a run, notes."""
    found = (str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
    return sorted(name for name in found if name not in files and not _hidden(Path(name)))


def _check_name(repo: str) -> None:
    """Refuse a name that the Hub does not take, also in a dry run."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(f"is not a valid name on the Hub ({reason(error)})", where=repo) from error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _upload(result: PushResult, private: bool, message: str) -> str:
    from huggingface_hub import HfApi

    api, repo = HfApi(), result.repo
    named = [glob.escape(name) for name in result.files]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(
            folder_path=result.folder, repo_id=repo, commit_message=message, allow_patterns=named
        )
    except hub_refusals() as error:
        raise CheckpointError(
            f"the upload failed ({reason(error)})",
            where=repo,
            fix="`hf auth login`, or check HF_TOKEN, the name and the network",
        ) from error
    return str(done.commit_url)

"""Upload a finished folder to the Hub: an explicit step of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..checkpoints.reader import MANIFEST
from ..errors import CheckpointError, UsageError, hub_refusals, reason
from ..results import Result
from ..verification.checks import failed, verify


@dataclass
class PushResult(Result):
    """What `push` did.

    Args:
        folder: The folder.
        repo: `ORG/NAME`.
        files: What was (or would be) uploaded, relative to the folder.
        bytes: Their size.
        url: Of the commit; None for a dry run.
    """

    command: ClassVar[str] = "push"
    folder: str
    repo: str
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    url: str | None = None


def push(
    folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, message: str | None = None
) -> PushResult:
    """Verify a folder that we made and upload it.

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
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"no {MANIFEST} there", where=folder, fix="give a folder made by convert or uptrain")
    if len([part for part in repo.split("/") if part]) != 2:
        raise UsageError("is not ORG/NAME", where=repo)
    _check_name(repo)
    if broken := failed(verify(folder).checks):
        raise CheckpointError(f"check failed: {broken}", where=folder, fix="nothing was uploaded")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not _hidden(p.relative_to(folder)))
    result = PushResult(str(folder), repo, [str(p.relative_to(folder)) for p in files])
    result.bytes = sum(p.stat().st_size for p in files)
    if not dry_run:
        result.url = _upload(folder, repo, private, message or f"Add {folder.name}, made with mha2gqa")
    return result


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


def _upload(folder: Path, repo: str, private: bool, message: str) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(
            folder_path=str(folder), repo_id=repo, commit_message=message, ignore_patterns=[".*", "**/.*"]
        )
    except hub_refusals() as error:
        raise CheckpointError(
            f"the upload failed ({reason(error)})",
            where=repo,
            fix="`hf auth login`, or check HF_TOKEN, the name and the network",
        ) from error
    return str(done.commit_url)

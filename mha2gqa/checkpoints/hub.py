"""Whether a name can be a model of the Hub and the Hub can be reached, without minutes of retries."""

from __future__ import annotations

import errno
import os
import re
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import CheckpointError

SECONDS = 3.0  # for one connection; the client itself retries for half a minute
_REPOSITORY = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def local_path(source: str | Path) -> Path:
    """What was given as a path, whether or not anything is there.

    Raises:
        CheckpointError: The system cannot even look: a name that is too long, a folder that may not be searched.
    """
    path = Path(source)
    try:
        path.stat()
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EIO, errno.ESTALE):
            raise CheckpointError(
                f"cannot be read ({error.strerror})",
                where=source,
                fix="give a checkpoint folder or a Hub id ORG/NAME",
            ) from error
    except ValueError:  # a name that no file can have
        pass
    return path


def check_hub_name(source: str | Path) -> None:
    """Refuse a name that is none of the Hub, or that the Hub cannot be asked about.

    Args:
        source: What was given; there is no such file or folder.

    Raises:
        CheckpointError: It looks like a path; or there is no network and it is not in the local cache.
    """
    text = str(source)
    looks_local = text.startswith((".", "/", "~", "\\")) or text.endswith(
        ("/", ".json", ".safetensors", ".bin")
    )
    if looks_local or not _REPOSITORY.match(text):
        raise CheckpointError(
            "no such folder", where=source, fix="give a checkpoint folder or a Hub id ORG/NAME"
        )
    if is_cached(text) or reachable():
        return
    from huggingface_hub.constants import HF_HUB_OFFLINE

    why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the Hub cannot be reached"
    raise CheckpointError(
        f"neither a local folder nor a Hub model in the cache, and {why}",
        where=source,
        fix="check the spelling, or download it first",
    )


def is_cached(repository: str) -> bool:
    """Whether anything of a repository lies in the Hub cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}").is_dir()


@cache
def reachable() -> bool:
    """Whether the Hub answers; assumed behind a proxy, and False where offline was asked for."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    place = urlsplit(ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), SECONDS).close()
    except OSError:
        return False
    return True

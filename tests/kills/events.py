"""Events of the file system in a process, each of which can be its last: killed, out of space, or met by a signal."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Audit events of Python that change a file system, and which of their arguments is the path.
AUDITED = {
    "os.mkdir": 0, "os.rename": 0, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.link": 1, "os.symlink": 1,
    "shutil.rmtree": 0, "shutil.copyfile": 1, "shutil.move": 1,
}  # fmt: skip
FREEING = ("os.remove", "os.rmdir", "shutil.rmtree")  # these work on a full disk, too
# Calls that Python does not audit, or that libraries make in native code.
SILENT = (("os", "fsync"), ("os", "pwrite"), ("os", "copy_file_range"), ("os", "ftruncate"))
NATIVE = (("safetensors.torch", "save_file"), ("torch", "save"))


class Events:
    """Counts the events below a folder, and acts at one of them.

    Args:
        folder: What lies elsewhere does not count.
        act: What to do at `at`: `kill`, `full` (from then on the disk is), or a signal's name.
        at: Number of an event, from 0; -1 for none.
        seen: Called with the name of each event.

    Example:
        >>> Events(Path("work"), "kill", 7).install()  # doctest: +SKIP
    """

    def __init__(self, folder: Path, act: str, at: int, seen: Callable[[str], None] | None = None) -> None:
        self.folder, self.act, self.at, self.seen = str(folder), act, at, seen
        self.count = 0

    def install(self) -> None:
        """Watch this process from now on; there is no way back."""
        sys.addaudithook(self._audit)
        for module, name in (*SILENT, *NATIVE, ("mha2gqa.checkpoints.output", "_exchange")):
            self._wrap(sys.modules[module], name)
        saved = sys.modules["safetensors.torch"].__dict__["save_file"]
        for user in list(sys.modules.values()):  # those that have imported it by name
            if str(getattr(user, "__name__", "")).startswith(("mha2gqa", "transformers")):
                vars(user).update({"save_file": saved} if "save_file" in vars(user) else {})

    def _wrap(self, module: Any, name: str) -> None:
        inner = getattr(module, name, None)
        if inner is None:
            return

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            self._event(f"{module.__name__}.{name}")
            return inner(*args, **kwargs)

        setattr(module, name, outer)

    def _audit(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "open":
            if isinstance(args[2], int) and args[2] & WRITES and self._below(args[0]):
                self._event(name)
        elif name in AUDITED and self._below(args[AUDITED[name]]):
            self._event(name)

    def _below(self, path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.folder)

    def _event(self, name: str) -> None:
        number, self.count = self.count, self.count + 1
        if self.seen is not None:
            self.seen(name)
        if self.act == "full":
            if 0 <= self.at <= number and name not in FREEING:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif number == self.at:
            os.kill(os.getpid(), signal.SIGKILL if self.act == "kill" else getattr(signal, self.act))

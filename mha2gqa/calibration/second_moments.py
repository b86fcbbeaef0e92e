"""Moments of the attention modules of a model, and the file that keeps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures import AttentionModule
from ..checkpoints.atomic import replacing, touch
from ..errors import UsageError

FIELDS = ("inputs", "mixed", "queries")
CLIPPED = "clipped"


@dataclass(frozen=True)
class SecondMoments:
    """Moments of one attention module; float64, n = D + 1.

    Args:
        inputs: `[n, n]` second moment of [x; 1], what keys and values are made of; a token weighs
            (1 + attention received from a query, relative to the mean) / 2.
        mixed: `[n, n]` mean over heads of the second moment of the attention-averaged [x; 1]; None where
            the model's class does not let its attention be observed.
        queries: `[H, d, d]` second moment of each head's queries (a rotation of RoPE planes keeps plane
            energies); None where not observed.
        tokens: How many tokens were seen.
        cross: Keys and values come from another sequence than queries.
        clipped: `[3, 2]` of q, k and v: entries beyond the model's bound (`clip_qkv`), and all entries; None where it has
            none, or they were not counted.
    """

    inputs: Tensor
    mixed: Tensor | None
    queries: Tensor | None
    tokens: int
    cross: bool = False
    clipped: Tensor | None = None

    @property
    def clip_shares(self) -> tuple[float, float, float] | None:
        """Share of the entries of q, k and v beyond the model's bound; None where they were not counted."""
        if self.clipped is None:
            return None
        q, k, v = (beyond / max(1, count) for beyond, count in self.clipped.tolist())
        return q, k, v

    def cpu(self) -> SecondMoments:
        """These moments in host memory."""
        mixed, queries = (None if x is None else x.cpu() for x in (self.mixed, self.queries))
        return replace(self, inputs=self.inputs.cpu(), mixed=mixed, queries=queries)

    def tensors(self, key: str) -> dict[str, Tensor]:
        """These moments as named tensors of a file (symmetric matrices as triangles).

        Args:
            key: From `module_key`.
        """
        found = {name: getattr(self, name) for name in FIELDS}
        packed = {f"{key}.{name}": _packed(x.cpu()) for name, x in found.items() if x is not None}
        packed |= {} if self.clipped is None else {f"{key}.{CLIPPED}": self.clipped}
        return packed | {f"{key}.tokens": torch.tensor([self.tokens, int(self.cross)])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, SecondMoments]:
        """By key, what `tensors` made of some modules."""
        keys = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
        out = {}
        for key in keys:
            found = {n: _unpacked(tensors[f"{key}.{n}"]) for n in FIELDS if f"{key}.{n}" in tensors}
            tokens, cross = tensors[f"{key}.tokens"].tolist()
            known = (found["inputs"], found.get("mixed"), found.get("queries"))
            out[key] = cls(*known, tokens, bool(cross), tensors.get(f"{key}.{CLIPPED}"))
        return out

    @property
    def query_inputs(self) -> Tensor | None:
        """Second moment of what queries are made of, where it is known."""
        return None if self.cross else self.inputs


@dataclass(frozen=True)
class Statistics:
    """Moments of every attention module of a model.

    Args:
        modules: By `module_key`: `self.3`, `cross.0`.
        about: What they were measured on: `tokens`, `window`, `data_sha256`, `model`, `notes`;
            `stored`, the model as its files have it, where they are laid out otherwise.
    """

    modules: Mapping[str, SecondMoments]
    about: dict[str, Any] = field(default_factory=dict)

    def of(self, module: AttentionModule) -> SecondMoments:
        """The moments of one module.

        Raises:
            UsageError: These statistics have none for it.
        """
        try:
            return self.modules[module_key(module)]
        except KeyError:
            raise UsageError(
                f"no statistics for {module.path}", where="--statistics", fix="they belong to another model"
            ) from None

    def save(self, path: str | Path) -> Path:
        """Write as safetensors (symmetric matrices as triangles), metadata inside.

        Raises:
            UsageError: Nothing can be written there.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        flags = {}
        for key, module in self.modules.items():
            flags[key] = {"tokens": module.tokens, "cross": module.cross}
            for name in ("inputs", "mixed", "queries"):
                x = getattr(module, name)
                if x is not None:
                    tensors[f"{key}.{name}"] = _packed(x.cpu())
            if module.clipped is not None:
                tensors[f"{key}.{CLIPPED}"] = module.clipped
        path = Path(path)
        writable(path)
        metadata = {"mha2gqa": json.dumps({"schema_version": 1, "about": self.about, "sites": flags})}
        try:
            with replacing(path) as partial:
                partial.touch()
                mode = partial.stat().st_mode  # as the user's umask has it: safetensors would keep others out
                save_file(tensors, partial, metadata)
                partial.chmod(mode)
        except (OSError, SafetensorError) as error:
            fix = "free space, or name another file, and run the same command again"
            raise _unwritable(path, error, fix) from error
        return path


def writable(path: str | Path) -> None:
    """See that `path` can be written.

    Raises:
        UsageError: Nothing can be written there.
    """
    path = Path(path)
    try:
        touch(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception, fix: str = "name a file in a folder of yours") -> UsageError:
    return UsageError(f"cannot be written ({error})", where=f"--statistics {path}", fix=fix)


def load_statistics(path: str | Path) -> Statistics:
    """Read what `Statistics.save` wrote.

    Raises:
        UsageError: Not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            head = json.loads((file.metadata() or {})["mha2gqa"])
            about, modules = _about(head["about"]), {}
            for key, flags in head["sites"].items():
                names = {f"{key}.{name}" for name in ("inputs", "mixed", "queries")} & set(file.keys())
                found = {name.rsplit(".", 1)[1]: _unpacked(file.get_tensor(name)) for name in names}
                counts = f"{key}.{CLIPPED}"
                modules[key] = SecondMoments(
                    found["inputs"],
                    found.get("mixed"),
                    found.get("queries"),
                    flags["tokens"],
                    flags["cross"],
                    _counts(file.get_tensor(counts)) if counts in file.keys() else None,  # noqa: SIM118
                )
    except (
        OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError
    ) as error:  # fmt: skip  # whatever its header holds
        raise UsageError(
            f"not a statistics file of ours ({str(error) or type(error).__name__})",
            where=f"--statistics {path}",
            fix="make it with --calibration TEXT --statistics FILE",
        ) from error
    return Statistics(modules, about)


def _about(about: Any) -> dict[str, Any]:
    """What a file says of its text.

    Raises:
        TypeError: It is nothing that `Statistics.save` writes.
    """
    notes = about.get("notes", []) if isinstance(about, dict) else None
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise TypeError("no usable description of its text")
    return dict(about)


def _counts(x: Tensor) -> Tensor:
    """Counts of a file, as they must be.

    Raises:
        ValueError: Of another shape.
    """
    if x.shape != (3, 2):
        raise ValueError(f"counts of shape {tuple(x.shape)}")
    return x


def _packed(x: Tensor) -> Tensor:
    """Symmetric `[…, n, n]` -> its lower triangle `[…, n (n + 1) / 2]`."""
    rows, columns = torch.tril_indices(x.shape[-1], x.shape[-1])
    return x[..., rows, columns].contiguous()


def _unpacked(packed: Tensor) -> Tensor:
    n = int(((8 * packed.shape[-1] + 1) ** 0.5 - 1) / 2 + 0.5)
    rows, columns = torch.tril_indices(n, n)
    out = packed.new_empty(*packed.shape[:-1], n, n)
    out[..., rows, columns] = packed
    out[..., columns, rows] = packed
    return out


def module_key(module: AttentionModule) -> str:
    """Name of a module that does not depend on how a checkpoint or a class prefixes it."""
    return f"{module.kind}.{module.layer}"


def fingerprint(modules: Sequence[AttentionModule], read: Callable[[str], Tensor]) -> str:
    """A short digest of the attention weights, to tell whether statistics belong to a model.

    Two rows of every projection are read, so that a large checkpoint costs little.
    """
    digest = hashlib.sha256()
    for module in modules:
        digest.update(module_key(module).encode())
        for role, name in sorted(module.names.items()):
            if role.endswith(".weight"):
                rows = read(name).detach()[:2].to("cpu", torch.float32)
                digest.update(rows.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]

"""What an architecture conversion is, and how the maps of tensors are built and checked for completeness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.ignored_keys import without_ignored
from ..errors import CheckpointError


@dataclass(frozen=True)
class TensorMap:
    """How one tensor of the result is made.

    Args:
        sources: Names of source tensors.
        make: Those tensors -> the tensor to store; works on the meta device, so shapes come from it too.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class ArchConversion:
    """A checkpoint written as another architecture that computes the same, with as many KV heads as before.

    Args:
        source_type, target_type: Model types.
        config: The raw config of the result.
        recipes: Name of each tensor of the result -> how it is made; the key set is complete.
        notes: What the user should know.
    """

    source_type: str
    target_type: str
    config: dict[str, Any]
    recipes: Mapping[str, TensorMap] = field(hash=False)
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> dict[str, str]:
        """Both types, for results and manifests."""
        return {"source_type": self.source_type, "target_type": self.target_type}

    @property
    def sentence(self) -> str:
        """What happens, for the user."""
        if self.source_type == self.target_type:
            return f"written in the form of {self.target_type} that holds fewer KV heads"
        return (
            f"{self.source_type} has no KV-head count in transformers: written as {self.target_type}, a stock class "
            "that computes the same"
        )


def copied(x: Tensor) -> Tensor:
    """The tensor as it is."""
    return x


def wide(x: Tensor) -> Tensor:
    """In a dtype in which a product of two stored numbers is exact (half) or as good as it gets."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.double()


class TensorMapBuilder:
    """Collects recipes; refuses a source that lacks a tensor or has one that nothing uses.

    Args:
        names: All tensor names of the source.
        prefix: What may stand before every name but those of the head (a base model has none).
        probe: Name behind the prefix whose presence decides whether it is there.
    """

    def __init__(self, names: Iterable[str], prefix: str, probe: str) -> None:
        self.names = set(names)
        self.prefix = prefix if prefix + probe in self.names else ""
        self.recipes: dict[str, TensorMap] = {}
        self._used: set[str] = set()

    def add(self, target: str, make: Callable[..., Tensor], *sources: str) -> None:
        """Make `target` from tensors named without the prefix."""
        full = tuple(self.prefix + source for source in sources)
        self._add(target, make, full)

    def copy(self, pairs: Mapping[str, str]) -> None:
        """Copy tensors: target -> source without the prefix."""
        for target, source in pairs.items():
            self.add(target, copied, source)

    def head(self, target: str, source: str, tied: bool) -> None:
        """The output embedding, which has no prefix and is absent where tied."""
        if source in self.names or not tied:
            self._add(target, copied, (source,))

    def has(self, source: str) -> bool:
        return self.prefix + source in self.names

    def _add(self, target: str, make: Callable[..., Tensor], sources: tuple[str, ...]) -> None:
        if missing := sorted(set(sources) - self.names):
            raise CheckpointError(f"no tensor {', '.join(missing)}", fix="the checkpoint is incomplete")
        self.recipes[target] = TensorMap(sources, make)
        self._used |= set(sources)

    def finish(self) -> dict[str, TensorMap]:
        """All recipes.

        Raises:
            CheckpointError: A tensor is left over: the source is not what its config says.
        """
        left = without_ignored(self.names - self._used)
        if left:
            more = "" if len(left) <= 5 else f" and {len(left) - 5} more"
            raise CheckpointError(
                f"tensors that this architecture does not have: {', '.join(left[:5])}{more}",
                fix="config.json and the weights must belong together",
            )
        return self.recipes


def rope(config: Mapping[str, Any], theta: float, partial: float | None = None) -> dict[str, Any]:
    """RoPE keys of a new config, in the spelling (old or new) of the source.

    Args:
        config: The source's raw config.
        theta: Base, where the source does not state one.
        partial: Rotary share of a head, where the target's class may take another for granted.
    """
    if isinstance(config.get("rope_parameters"), Mapping):
        parameters = {"rope_theta": theta, **config["rope_parameters"]}
        share = {} if partial is None else {"partial_rotary_factor": partial}
        return {"rope_parameters": parameters | share}
    keys: dict[str, Any] = {"rope_theta": theta}
    if partial is not None:
        keys["partial_rotary_factor"] = partial
    if config.get("rope_scaling"):
        keys["rope_scaling"] = config["rope_scaling"]
    return keys


def carried(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Keys that mean the same in both configs: those of `names`, and those of every model."""
    common = (
        "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "dtype",
        "torch_dtype",
    )  # fmt: skip
    return {key: config[key] for key in (*common, *names) if key in config}


def number(config: Mapping[str, Any], key: str) -> int:
    """A size that the config must state."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"no usable {key}", where="config.json", fix="it must be a whole number")
    return value


def zero_rows(x: Tensor) -> Tensor:
    """A zero bias for a weight `[R, D]`."""
    return x.new_zeros(x.shape[0])


def copy_or_zero_bias(book: TensorMapBuilder, target: str, source: str) -> None:
    """A layer whose target has a bias in any case."""
    book.copy({f"{target}.weight": f"{source}.weight"})
    if book.has(f"{source}.bias"):
        book.copy({f"{target}.bias": f"{source}.bias"})
    else:
        book.add(f"{target}.bias", zero_rows, f"{source}.weight")

"""A model whose weights are read from its checkpoint as they are needed, one decoder block at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..errors import CheckpointError, reason
from .loading import check_consent, loading_class, quiet
from .reader import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Layers(Protocol):
    """A model, and how to bring the weights of one of its blocks to the device and let go of them.

    Attributes:
        model: In eval mode; what lies outside the blocks is there whenever a forward pass needs it.
        device: Where it runs.
        resident: Whether all weights are in memory at once.
    """

    model: Any
    device: torch.device
    resident: bool

    def load(self, block: str) -> None:
        """Bring the weights of the block at this path to the device."""

    def free(self, block: str) -> None:
        """Let go of them."""

    def prefetch(self, block: str) -> None:
        """Say that this block will be loaded soon."""


class ResidentLayers:
    """A model that is in memory as a whole.

    Args:
        model: In eval mode, on one device.
    """

    resident = True

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, next(model.parameters()).device

    def load(self, block: str) -> None:
        """Nothing is to be done."""

    def free(self, block: str) -> None:
        """Nothing is to be done."""

    def prefetch(self, block: str) -> None:
        """Nothing is to be done."""


class CheckpointLayers:
    """A model of a checkpoint whose blocks are read one at a time.

    The class is built without weights; transformers' own renaming and fusing of stored tensors (experts,
    prefixes) is applied to those of one block. What lies outside the blocks is read when the part of the model
    that holds it first runs, so that a vision tower that text does not reach is never read.

    Args:
        checkpoint: The source.
        dtype: Of the weights in memory.
        device: Where the model runs.
        trust_remote_code: Consent to code that the source brings along.
        attn_implementation: As in `load_model`.

    Raises:
        CheckpointError: The class cannot be built from the config.

    Example:
        >>> layers = CheckpointLayers(open_checkpoint("llama-2-70b"), torch.bfloat16, device)  # doctest: +SKIP
        >>> layers.split([f"model.layers.{i}" for i in range(80)])  # doctest: +SKIP
        >>> layers.load("model.layers.0")  # doctest: +SKIP
    """

    resident = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
    ) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.model = _without_weights(checkpoint, dtype, trust_remote_code, attn_implementation)
        for name, buffer in self.model.named_buffers():
            _owner(self.model, name)._buffers[name.rpartition(".")[2]] = buffer.to(device)
        place(self.model, device)
        self._transforms, self._stored = _targets(self.model, checkpoint)
        self._blocks: tuple[str, ...] = ()

    def split(self, blocks: Sequence[str]) -> None:
        """Say which modules are the blocks; all other parts are read when they first run.

        Args:
            blocks: Paths of modules.
        """
        self._blocks = tuple(f"{block}." for block in blocks)
        from transformers import PreTrainedModel

        for path, module in self.model.named_modules():
            if isinstance(module, PreTrainedModel):
                module.register_forward_pre_hook(self._reader(path))
            elif module._parameters and not f"{path}.".startswith(self._blocks):
                module.register_forward_pre_hook(self._reader(path))  # wrappers call some parts of others

    def _reader(self, path: str) -> Any:
        """A hook that reads what a part of the model needs beside its blocks and the parts inside it."""
        from transformers import PreTrainedModel

        part = self.model.get_submodule(path)
        inner = [name for name, m in part.named_modules() if name and isinstance(m, PreTrainedModel)]
        prefix = f"{path}." if path else ""
        beyond = (*self._blocks, *(f"{prefix}{name}." for name in inner))
        read = False

        def hook(*_: Any) -> None:
            nonlocal read
            if not read:
                read = True
                self._read([name for name in self._unread(path) if not name.startswith(beyond)])

        return hook

    def load(self, block: str) -> None:
        """Read the weights of a block to the device.

        Raises:
            CheckpointError: The checkpoint lacks some of them.
        """
        self._read(self._unread(block))

    def _unread(self, path: str) -> list[str]:
        """Parameters below a module that are absent, and its buffers that the checkpoint holds."""
        prefix, module = f"{path}." if path else "", self.model.get_submodule(path)
        absent = [f"{prefix}{n}" for n, p in module.named_parameters(remove_duplicate=False) if p.is_meta]
        buffers = [f"{prefix}{name}" for name, _ in module.named_buffers()]
        return absent + [name for name in buffers if name in self._stored]

    def free(self, block: str) -> None:
        """Let go of the weights of a block."""
        module = self.model.get_submodule(block)
        for name, p in list(module.named_parameters()):
            absent = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
            setattr(_owner(module, name), name.rpartition(".")[2], absent)

    def prefetch(self, block: str) -> None:
        """Let the system read the files of a block ahead."""
        if self.checkpoint.is_bin or not hasattr(os, "posix_fadvise"):
            return
        for target, names in self._stored.items():
            for name in names if target.startswith(f"{block}.") else ():
                info = self.checkpoint.tensors[name]
                if info.plain:
                    with (self.checkpoint.path / info.file).open("rb") as file:
                        os.posix_fadvise(
                            file.fileno(), info.begin, info.end - info.begin, os.POSIX_FADV_WILLNEED
                        )

    def _read(self, names: Sequence[str]) -> None:
        """Read parameters and buffers of the model by name, and parameters that they share their storage with."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        if not names:
            return
        for name in (computed := [name for name in names if self._is_computed(name)]):
            self._compute(name)
        names = [name for name in names if name not in computed]
        tied = {name: self._source_of(name) for name in names if name not in self._stored}
        own = [name for name in dict.fromkeys([*names, *tied.values()]) if name not in tied]
        sources = dict.fromkeys(source for name in own for source in self._stored[name])
        config = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=self._transforms,
        )
        with quiet():
            convert_and_load_state_dict_in_model(
                self.model, {name: self.checkpoint.read(name) for name in sources}, config
            )
        for name, source in tied.items():
            setattr(_owner(self.model, name), name.rpartition(".")[2], self.model.get_parameter(source))
        present = dict(self.model.named_parameters(remove_duplicate=False))
        if lost := sorted(name for name in (*own, *tied) if name in present and present[name].is_meta):
            raise CheckpointError(
                f"{len(lost)} tensors could not be read, first {lost[0]}",
                where=self.checkpoint.path,
                fix="download the checkpoint again",
            )
        self.model.requires_grad_(False)

    def _is_computed(self, name: str) -> bool:
        """Whether the class makes a parameter itself where no file has it (Marian's sinusoids)."""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()
        tied = name in getattr(self.model, "all_tied_weights_keys", {})
        return name not in self._stored and not tied and any(re.search(p, name) for p in patterns)

    def _compute(self, name: str) -> None:
        owner, leaf = _owner(self.model, name), name.rpartition(".")[2]
        empty = torch.empty_like(getattr(owner, leaf), device=self.device)
        setattr(owner, leaf, nn.Parameter(empty, requires_grad=False))
        self.model._init_weights(owner)

    def _source_of(self, name: str) -> str:
        """The stored parameter whose storage one that is not stored shares.

        Raises:
            CheckpointError: There is none.
        """
        source = getattr(self.model, "all_tied_weights_keys", {}).get(name)
        if source is None or source not in self._stored:
            raise CheckpointError(
                f"no tensor for {name}",
                where=self.checkpoint.path,
                fix="the checkpoint is incomplete: download it again",
            )
        return str(source)


def place(model: nn.Module, device: torch.device) -> None:
    """Let a model say that it is where it runs, whichever of its weights are absent.

    `PreTrainedModel.device` is that of the first parameter, which may belong to a vision tower that is never read, or
    to a block that is not loaded; a forward pass that moves tensors there (Idefics3) would lose them.

    Args:
        model: Some of its parameters on the meta device.
        device: Where it runs.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and (stock := type(module)).device != device:
            # Named as the stock class, by whose name transformers looks things up; a property needs a class.
            own = {"device": device, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
            module.__class__ = type(stock.__name__, (stock,), own)


def stored_names(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """For each tensor of a model the names of the stored ones that it is made of.

    Args:
        model: Perhaps without weights.
        checkpoint: Where it is stored.
    """
    return _targets(model, checkpoint)[1]


def _targets(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[list[Any], dict[str, list[str]]]:
    """How stored tensors become the model's, and `stored_names`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
    converters = [x for x in transforms if isinstance(x, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    stored: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        first = by_pattern[pattern].target_patterns[0] if pattern is not None else ""
        others = by_pattern[pattern].target_patterns if pattern is not None else [""]
        for other in others:
            stored.setdefault(target.replace(first, other) if first else target, []).append(name)
    return transforms, stored


def _without_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool, attn_implementation: str | None
) -> PreTrainedModel:
    """The class of a checkpoint with parameters on the meta device; buffers are real."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    from ..modeling import refuse_encoder, register

    raw, path = checkpoint.config, checkpoint.path
    refuse_encoder(raw)
    register(raw)
    check_consent(raw, path, trust_remote_code)
    chosen = loading_class(raw)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    with quiet():
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            with init_empty_weights(include_buffers=False):
                if hasattr(chosen, "from_config"):
                    model = chosen.from_config(config, trust_remote_code=trust_remote_code, **options)
                else:
                    model = chosen._from_config(config, **options)
        except Exception as error:  # whatever a class raises, it is this folder that it refuses
            raise CheckpointError(
                f"its class cannot be built ({reason(error)})", where=path, fix="check config.json"
            ) from error
    model.tie_weights()  # what is shared has been made anew for each place
    return model.eval().requires_grad_(False)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])

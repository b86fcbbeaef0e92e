"""How far two models differ: the output of each attention module on the same text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..architectures.locate import find_attention_modules
from ..architectures.registry import find_spec
from ..errors import CheckpointError, UnsupportedModelError
from .batching import Batch
from .scoring import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attention_outputs(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The output projection of every attention module by its path; empty if the class is not known."""
    try:
        spec = find_spec(model.config.to_dict())
        modules = find_attention_modules(spec, model.state_dict())
    except (UnsupportedModelError, CheckpointError):
        return {}
    instances = dict(model.named_modules())
    paths = {module.path: f"{module.path}.{spec.o}" for module in modules}
    return {path: instances[name] for path, name in paths.items() if name in instances}


@contextlib.contextmanager
def _captured(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[path] = output.detach()

        return hook

    handles = [module.register_forward_hook(keep(path)) for path, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def attention_error(head: Scorer, reference: Scorer, batches: Sequence[Batch]) -> dict[str, float]:
    """Relative squared deviation of each attention module's output in the two running models.

    Args:
        head: The model.
        reference: The original.
        batches: A little text (every window of a batch is run alone).

    Returns:
        Path -> `sum |o - o'|² / sum |o|²`; empty where the modules cannot be located or do not correspond.
    """
    own, other = attention_outputs(head.model), attention_outputs(reference.model)
    if not own or own.keys() != other.keys():
        return {}
    sums = {path: [0.0, 0.0] for path in own}
    for batch in batches:
        with _captured(own) as found, _captured(other) as expected:
            head.model(**head.inputs(batch), use_cache=False)
            reference.model(**reference.inputs(batch), use_cache=False)
        for path, pair in sums.items():
            o = expected[path].double()
            pair[0] += float((o - found[path].to(o.device).double()).square().sum())
            pair[1] += float(o.square().sum())
    return {path: part / whole if whole else 0.0 for path, (part, whole) in sums.items()}

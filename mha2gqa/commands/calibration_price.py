"""What a calibrated conversion costs: time and memory of the layer walk, from shapes and measured constants.

The constants come from `benchmarks/results/calibrate_speed.json`; a test holds the estimate within a factor of
1.5 of every row there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoints.hf_config import text_config
from ..config import ConvertConfig, ReconstructConfig
from ..conversion.calibration_options import FLOAT32_PARAMETERS
from ..conversion.plan import ModulePlan, Plan
from ..conversion.result_tensors import ADAM_BYTES, end_to_end_bytes
from ..data.windows import LONGEST_WINDOW
from ..merging.grouping import evaluations
from ..reconstruct.row_store import STREAMS, pinned_bytes

# Sustained by the measured cards (H100 and H200, bf16) in each stage, operations per second.
FIT_FLOPS = 3.7e14  # forward and backward of a layer
STATISTICS_FLOPS = 1.3e14  # forward of a layer and its second moments
REFIT_FLOPS = 3.2e13  # second moments in float64
SEARCH_RATE = 3.7e10  # eigenproblem sizes cubed per second, 16 cores for each GPU
# What PyTorch's allocator keeps beside what is in use, and CUDA's context: what nvidia-smi shows.
CACHED, CONTEXT_BYTES = 2.2, 1.5e9
GPUS_SHARE = 0.9  # of a further GPU that is used
LOAD_BYTES_PER_SECOND = 1.5e9  # of a layer from disk and back
START_SECONDS = 30  # imports, tokenising


@dataclass(frozen=True)
class Layer:
    """The largest decoder layer, in numbers.

    Args:
        parameters: Of the original's.
        kept: Of the converted model's.
        trained: Of those, what the fits train.
        hidden: Width D of the hidden states.
        widest: Largest dimension of a weight, usually that of the feed-forward part.
        outside: Parameters of embeddings and output head.
        search: Sum of cubed sizes of the eigenproblems of its grouping search.
    """

    parameters: int
    kept: int
    trained: int
    hidden: int
    widest: int
    outside: int
    search: float


def calibration_price(
    shapes: Mapping[str, tuple[int, ...]],
    changed: Mapping[str, tuple[int, ...]],
    decided: Plan,
    *,
    gpu_memory: float,
    gpus: int = 1,
    tokens: int = ConvertConfig.calibration_tokens,
    window: int = LONGEST_WINDOW,
    fit: ReconstructConfig | None = None,
    itemsize: int = 2,
) -> dict[str, Any]:
    """Time, memory and disk of calibrating and fitting, layer by layer.

    Args:
        shapes: Of the original, by tensor name.
        changed: Of the result.
        decided: The conversion.
        gpu_memory: Bytes of one device.
        gpus: Processes that share the text.
        tokens: Calibration tokens.
        window: Tokens of a block.
        fit: How the stages after merging work; their defaults where None.
        itemsize: Bytes of an element as stored.

    Returns:
        `tokens`, `gpus`, `steps` a layer, what is `trained` of it, `host_bytes` of the hidden states, `disk_bytes` of
        the work folder, and for `regression` (with every step; modules that stop early take less) and `closed_form`
        (without it) `seconds`, `device_bytes` in use at the peak, `device_bytes_cached` as nvidia-smi shows them, and
        `fits`; for `distillation` `steps`, `seconds` and `device_bytes` of both models and the optimiser, and `fits`;
        empty where it is not asked for.

    Example:
        >>> calibration_price(shapes, changed, decided, gpu_memory=24e9)["regression"]["fits"]  # doctest: +SKIP
        True
    """
    fit = fit or ReconstructConfig()
    layer, count = _largest(shapes, changed, decided)
    if fit.trains_layer:
        layer = replace(layer, trained=layer.kept)
    if sum(map(math.prod, shapes.values())) <= FLOAT32_PARAMETERS:
        itemsize = 4
    share = 1 if gpus == 1 else 1 / (gpus * GPUS_SHARE)
    statistics = 2 * layer.parameters * tokens / STATISTICS_FLOPS
    refit = 4 * layer.hidden**2 * tokens / REFIT_FLOPS
    batch_tokens = _batch_tokens(fit, tokens, window)
    # What is frozen has no gradient of its own.
    regression = fit.steps * (4 * layer.kept + 2 * layer.trained) * batch_tokens / FIT_FLOPS
    serial = 2 * layer.parameters * itemsize / LOAD_BYTES_PER_SECOND
    search = share * layer.search / SEARCH_RATE
    closed = serial + share * (statistics + refit)
    prefetched = layer.parameters if count > 1 else 0
    weights = (layer.parameters + prefetched + layer.kept + layer.outside) * itemsize
    # Activations of a layer: of its forward, and for its backward.
    batch = batch_tokens * share * itemsize / 2
    forward = weights + batch * (6 * layer.widest + 12 * layer.hidden)
    following = prefetched * itemsize  # the next layer's, whose groupings are searched meanwhile
    backward = (
        weights + following + ADAM_BYTES * layer.trained + batch * (8 * layer.widest + 32 * layer.hidden)
    )
    distillation = _distillation(shapes, changed, decided, fit, batch_tokens, itemsize, gpu_memory)
    return {
        "tokens": tokens,
        "gpus": gpus,
        "steps": fit.steps if fit.regress else 0,
        "trained": fit.train,
        "host_bytes": gpus * pinned_bytes(STREAMS * tokens * layer.hidden * itemsize // gpus),
        # A walk that ends in distillation keeps all in memory.
        "disk_bytes": 0 if distillation else count * layer.trained * itemsize,
        "regression": _stage(count * (closed + max(search, share * regression)), backward, gpu_memory),
        "closed_form": _stage(count * (closed + search), forward, gpu_memory),
        "distillation": distillation,
    }


def _batch_tokens(fit: ReconstructConfig, tokens: int, window: int) -> int:
    """Tokens of a step: as many as are asked for, of which the text has several times as many."""
    blocks = min(fit.for_window(window).batch_size, max(1, tokens // window // 8))
    return blocks * min(window, tokens)


def _distillation(
    shapes: Mapping[str, tuple[int, ...]],
    changed: Mapping[str, tuple[int, ...]],
    decided: Plan,
    fit: ReconstructConfig,
    batch_tokens: int,
    itemsize: int,
    gpu_memory: float,
) -> dict[str, Any]:
    """Time and memory of training all projections together; empty where that is not asked for."""
    if not (fit.regress and fit.distill_steps):
        return {}
    before, after = (sum(map(math.prod, tensors.values())) for tensors in (shapes, changed))
    trained = sum(math.prod(changed[n]) for m in decided.modules for n in m.names.values() if n in changed)
    step = (2 * before + 4 * after + 2 * trained) * batch_tokens
    needed = end_to_end_bytes(decided, shapes, itemsize)
    return {
        "steps": fit.distill_steps,
        "seconds": round(fit.distill_steps * step / FIT_FLOPS, 1),
        "device_bytes": needed,
        "fits": needed <= gpu_memory,
    }


def _stage(seconds: float, used: float, gpu_memory: float) -> dict[str, Any]:
    return {
        "seconds": round(START_SECONDS + seconds, 1),
        "device_bytes": round(used + CONTEXT_BYTES),
        "device_bytes_cached": round(CACHED * used + CONTEXT_BYTES),
        "fits": used + CONTEXT_BYTES <= gpu_memory,
    }


def _largest(
    shapes: Mapping[str, tuple[int, ...]], changed: Mapping[str, tuple[int, ...]], decided: Plan
) -> tuple[Layer, int]:
    """The layer with most parameters, and how many layers there are."""
    blocks: dict[str, list[ModulePlan]] = {}
    for module in decided.modules:
        blocks.setdefault(module.module.block, []).append(module)
    counts = {block: _parameters(shapes, block) for block in blocks}
    block = max(counts, key=lambda name: counts[name])
    modules = [m for m in blocks[block] if not m.unchanged]
    inside = {name: shape for name, shape in shapes.items() if name.startswith(f"{block}.")}
    hidden = int(text_config(decided.config).get("hidden_size") or min(max(s) for s in inside.values()))
    layer = Layer(
        counts[block],
        _parameters(changed, block),
        sum(math.prod(changed[name]) for m in modules for name in m.names.values() if name in changed),
        hidden,
        max(max(shape) for shape in inside.values() if shape),
        sum(map(math.prod, shapes.values())) - sum(counts.values()),
        sum(map(_search, modules)),
    )
    return layer, len(blocks)


def _parameters(shapes: Mapping[str, tuple[int, ...]], block: str) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(f"{block}."))


def _search(module: ModulePlan) -> float:
    """Cubed sizes of the eigenproblems of one module's search: exact costs, and those of all pairs."""
    heads, groups, width = module.geometry.num_kv_heads, len(module.grouping), module.geometry.head_dim
    if groups in (1, heads):
        return 0.0
    size = heads // groups * width
    exact = max(evaluations(size), 3 * groups) if heads != 2 * groups else 0
    return exact * size**3 + heads * (heads - 1) / 2 * (2 * width) ** 3

"""One pass over the text."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architectures import AttentionModule, AttentionSpec, find_attention_modules
from ..errors import CheckpointError, DataError, UnsupportedModelError
from .clipping import find_clip
from .hooks import mark_padding, observing
from .second_moments import Statistics, fingerprint, module_key

SCORE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}  # attention scores of one batch take about this much
Batch = Mapping[str, Tensor]
Progress = Callable[[int, int], None]


def batches(inputs: Batch | Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive batches of `size` rows; a tensor of ids stands for `input_ids`."""
    rows = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    count = len(next(iter(rows.values())))
    for start in range(0, count, size):
        yield {name: x[start : start + size] for name, x in rows.items()}


def model_device(model: Any) -> torch.device:
    """Where a model runs: the device of its first parameter that has been loaded."""
    found = (p.device for p in model.parameters() if not p.is_meta)
    return next(found, torch.device("cpu"))


def run(model: Any, batch: Batch, device: torch.device | None = None) -> None:
    """One forward pass for the sake of its hooks: no cache, logits of the last position only.

    Args:
        model: The model.
        batch: Keyword tensors of its forward.
        device: Where the batch goes; by default where the model is.
    """
    device = device or model_device(model)
    extra: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extra["logits_to_keep"] = 1
    model(**{name: x.to(device) for name, x in batch.items()}, **extra)


def moment_rows(model: Any, width: int) -> int:
    """Rows per pass that keep attention scores within a fixed budget."""
    text = model.config.get_text_config()
    budget = SCORE_BYTES.get(model_device(model).type, SCORE_BYTES["cpu"])
    return max(1, budget // (4 * 4 * text.num_attention_heads * width * width))


def attention_instances(model: Any, modules: Sequence[AttentionModule]) -> dict[str, torch.nn.Module]:
    """Path -> module of every path.

    Raises:
        UnsupportedModelError: Several layers run one module (Zamba): calibration measures each module on its own.
    """
    instances = {module.path: model.get_submodule(module.path) for module in modules}
    first: dict[int, str] = {}
    for path, module in instances.items():
        if (known := first.setdefault(id(next(module.parameters())), path)) != path:
            raise UnsupportedModelError(
                f"is the same module as {known}, and calibration measures each module on its own",
                where=path,
                fix="convert with --method mean and without --calibration",
            )
    return instances


@torch.no_grad()
def collect(
    model: Any,
    spec: AttentionSpec,
    inputs: Batch | Tensor,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Measure the moments of every attention module in one pass over token blocks.

    Args:
        model: A transformers model in eval mode.
        spec: Its architecture.
        inputs: `[N, T]` token ids, or keyword tensors of the model's forward with N rows each. Where they hold
            `attention_mask` or `decoder_attention_mask`, padding does not count.
        batch_size: Rows per pass; by default as many as keep attention scores within a fixed budget.
        progress: Called with `(rows done, rows)`.

    Returns:
        The statistics; `about["notes"]` says what could not be observed.

    Raises:
        DataError: No block was given.
        CheckpointError: Activations are not finite (the module is named).

    Example:
        >>> statistics = collect(model, find_spec(model.config.to_dict()), blocks[:, :-1])  # doctest: +SKIP
        >>> statistics.save("model.statistics")  # doctest: +SKIP
    """
    rows = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    if not len(rows):
        raise DataError(
            "no text to calibrate on", where="--calibration", fix="give at least one block of text"
        )
    modules = find_attention_modules(spec, model.state_dict().keys())
    instances = attention_instances(model, modules)
    size = batch_size or moment_rows(model, rows.shape[1])
    with observing(model, instances, find_clip(model, spec, modules)) as found:
        for done, batch in enumerate(batches(inputs, size), 1):
            mark_padding(found, batch)
            run(model, batch)
            check_finite_moments(found.values())
            if progress:
                progress(min(done * size, len(rows)), len(rows))
    out = {module_key(module): found[module.path].finish() for module in modules}
    parameters = model.state_dict()
    about = {
        "tokens": rows.numel(),
        "window": rows.shape[1],
        "data_sha256": data_digest(inputs),
        "model": fingerprint(modules, parameters.__getitem__),
        "notes": moment_warnings(
            [(m.mixed is not None, m.tokens, len(m.inputs) - 1) for m in out.values()], model
        ),
    }
    return Statistics(out, about)


def check_finite_moments(accumulators: Any) -> None:
    """Name the first module whose sums are no longer finite."""
    sums = []
    for a in accumulators:
        moments = [x for x in (a.inputs, a.queries, a.mixed) if x is not None]
        sums += [(a.path, x.diagonal(dim1=-2, dim2=-1).sum()) for x in moments]
    if sums and not bool(torch.stack([x for _, x in sums]).isfinite().all()):
        path = next(path for path, x in sums if not bool(x.isfinite()))
        raise CheckpointError(
            "activations are not finite on the calibration text",
            where=path,
            fix="float16 may overflow: load the model in bfloat16 or float32; or the weights hold NaN",
        )


def data_digest(inputs: Batch | Tensor) -> str:
    """SHA-256 of what a model reads: says whether second moments were measured on it."""
    digest = hashlib.sha256()
    for name, x in sorted({"input_ids": inputs}.items() if isinstance(inputs, Tensor) else inputs.items()):
        digest.update(name.encode())
        digest.update(x.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def moment_warnings(seen: Sequence[tuple[bool, int, int]], model: Any) -> list[str]:
    """Warnings about the second moments of a model's attention modules.

    Args:
        seen: For each module, whether its attention was observed, the tokens seen, and the dims of its input.
        model: The model.
    """
    notes = []
    unseen = sum(not observed for observed, _, _ in seen)
    if unseen:
        notes.append(
            f"{type(model).__name__} does not let its attention be observed ({unseen} of {len(seen)} modules): "
            "second moments of plain inputs stand in for attention-averaged ones"
        )
    short = [(tokens, dims) for _, tokens, dims in seen if tokens < dims + 1]
    if short:
        tokens, dims = short[0]
        notes.append(
            f"{tokens} calibration tokens cannot fill a moment of {dims} dims: at least "
            f"{dims + 1} are needed, 100 times as many are good; unseen directions are judged by weights"
        )
    return notes

"""Decode speed, measured: the one-token step that servers run, beside the bytes that it must move.

FLOPs per token are the same before and after a conversion. What changes is the cache: its size, and the
traffic of reading it. Figures here are wall times of this machine and this attention backend only; the
bandwidth that they are held against is that of a copy on the very device.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch

from ..checkpoints.hf_config import is_encoder_decoder, load_config_json, stored_dtype
from ..checkpoints.loading import free_memory, load_model, resolve_device, resolve_dtype
from ..config.commands import BenchConfig
from ..config.keywords import BenchKeywords
from ..config.option import build
from ..config.signature import takes_options
from ..errors import UnsupportedModelError, UsageError
from ..evaluation.setup import context_length
from ..kv_cache import decode_step_bytes, kv_bytes, max_batch, step_weight_bytes
from ..results import Result
from .bench_engines import ENGINE_OPTIONS, VLLM, Engine, LlamaCpp, check_options
from .decode import fixed_step
from .fixed_cache import NotServed
from .growing_cache import growing_cache
from .step_times import DecodeTimes, copy_bandwidth

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEW_TOKENS = BenchConfig.new_tokens


@dataclass
class BenchResult(Result):
    """Decode speed of models under the same conditions.

    Args:
        batch, context, new_tokens: Sequences, tokens that a step attends to, steps timed.
        dtype, device: Of every model.
        engine: What decoded, and its version where it is not transformers.
        copy_bandwidth: Bytes per second that a copy on the device moves, measured.
        warnings: What the user should know.
        models: For each model `path, tokens_per_second, milliseconds_per_step, first_token_milliseconds,
            prefill_tokens_per_second, kv_bytes, weight_bytes, step_bytes, bytes_per_second, share_of_bandwidth,
            floor_milliseconds` (the step at full bandwidth), `step` (what was timed), `attention, native_gqa,
            cuda_graph, compiled, kernel_seconds` (of one layer's attention), `variant_seconds` (of a step, by the way its
            layers run), `warnings`, and `budgets`: per memory budget the batch that fits
            and its speed. Of another engine those that it tells.
    """

    command: ClassVar[str] = "bench"
    table: ClassVar[str] = "models"
    batch: int
    context: int
    new_tokens: int
    dtype: str
    device: str
    engine: str = "transformers"
    copy_bandwidth: float | None = None
    warnings: list[str] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)


@takes_options(BenchConfig)
def bench(models: str | Path | Sequence[str | Path], **options: Unpack[BenchKeywords]) -> BenchResult:
    """Time decoding as a server does it: full cache, no mask, and on a GPU compiled layers in a CUDA graph.

    Another engine is called where it is installed, and measures by its own means.

    Args:
        models: Folders or hub ids; all run in the dtype that the first resolves to. For llama.cpp folders or .gguf files.
        **options: See `BenchConfig`.

    Returns:
        Measured figures of each model.

    Raises:
        UsageError: A number below 1, an option that the engine lacks, no such engine here, or the cache does not fit
            into the device.
        UnsupportedModelError: An encoder-decoder, or the engine lacks an architecture.
        CheckpointError: A model cannot be loaded.

    Example:
        >>> bench(["llama", "llama-gqa8"], batch=16, context=4096).models[1]["tokens_per_second"]  # doctest: +SKIP
        1912.0
    """
    config = build(BenchConfig, "bench", {"models": models} | options)  # type: ignore[operator]
    paths = list(config.models)
    given = {name: value for name, value in config.changed().items() if name in ENGINE_OPTIONS}
    check_options(config.engine, given, paths)
    if config.engine != "transformers":
        caller = {"llama.cpp": LlamaCpp, "vllm": VLLM}[config.engine](paths, **given)
        return _in_engine(config, caller, paths)
    configs = {path: load_config_json(path) for path in paths}
    _check_decoders(configs)
    context, warnings = _within(configs, config.context)
    where = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, where, stored_dtype(configs[paths[0]]))
    measured = copy_bandwidth(where)
    result = BenchResult(
        batch=config.batch,
        context=context,
        new_tokens=config.new_tokens,
        dtype=str(dtype).removeprefix("torch."),
        device=str(where),
        engine=config.engine,
        copy_bandwidth=measured,
        warnings=warnings,
    )
    how: dict[str, Any] = {
        "context": context,
        "steps": config.new_tokens,
        "bandwidth": config.bandwidth or measured,
        "compiled": config.compile,
    }
    for path in paths:
        gc.collect()
        model = load_model(path, dtype=dtype, device=where, trust_remote_code=config.trust_remote_code)
        row = decode_row(path, model, configs[path], batch=config.batch, **how)
        row["budgets"] = [budget_row(model, configs[path], nbytes, **how) for nbytes in config.memory]
        result.models.append(row)
        del model
    return result


def _in_engine(config: BenchConfig, engine: Engine, paths: Sequence[str]) -> BenchResult:
    """The same table from an engine that measures itself."""
    _check_decoders(engine.configs)
    batch, steps = config.batch, config.new_tokens
    context, warnings = _within(engine.configs, config.context)
    if context < 2:
        raise UsageError("must be at least 2: a prompt and a token", where=f"--context {context}")
    on_cpu = torch.device("cpu") if engine.device == "cpu" else None
    for path in paths:
        cache = engine.cache_size(path, batch, context)
        if on_cpu is not None and cache:
            _check_fits(path, int(cache), batch, context, on_cpu)
    measured = copy_bandwidth(on_cpu) if on_cpu is not None else None
    result = BenchResult(
        batch=batch,
        context=context,
        new_tokens=steps,
        dtype=engine.dtype,
        device=engine.device,
        engine=f"{config.engine} {engine.version}",
        copy_bandwidth=measured,
        warnings=warnings,
    )
    ceiling = config.bandwidth or measured
    for path in paths:
        row = engine.row(path, batch, context, steps)
        moved = row.get("step_bytes")
        row["bytes_per_second"] = moved and moved / row["milliseconds_per_step"] * 1e3
        row["share_of_bandwidth"] = moved and ceiling and row["bytes_per_second"] / ceiling
        row["floor_milliseconds"] = moved and ceiling and moved / ceiling * 1e3
        result.models.append(row | {"budgets": []})
    return result


def _check_decoders(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse encoder-decoders."""
    for path, config in configs.items():
        if is_encoder_decoder(config):
            raise UnsupportedModelError(
                f"{config.get('model_type')} is an encoder-decoder, and only decoders are timed",
                where=path,
                fix="plan says what a decoding step moves",
            )


def longest_context(config: Mapping[str, Any]) -> int | None:
    """The longest `context` that `bench` can time a model with; None where its positions have no end.

    Args:
        config: Raw `config.json`.
    """
    return context_length(config)


def decode_row(
    path: str,
    model: PreTrainedModel,
    config: Mapping[str, Any],
    *,
    batch: int,
    context: int,
    steps: int = NEW_TOKENS,
    bandwidth: float | None = None,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """Times of one model in memory at one batch and context, with the bytes that a step moves.

    Args:
        path: Its name in the result.
        model: In eval mode, on its device.
        config: Its raw config.
        batch, context, steps: Sequences, tokens that a step attends to, steps timed.
        bandwidth: Bytes per second to hold the step against.
        compiled: Whether to compile the layers; None for yes on a GPU.

    Raises:
        UsageError: The cache, or what else a step needs, does not fit beside the model.
    """
    itemsize = next(model.parameters()).element_size()
    sizes: dict[str, Any] = {"context": context, "batch": batch, "dtype_bytes": itemsize}
    cache = kv_bytes(config, **sizes)
    _check_fits(path, cache, batch, context, model.device)
    try:
        times = time_decoding(model, config, batch, context, steps, compiled)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"out of memory beside a cache of {cache / 1e9:.1f} GB",
            where=path or None,
            fix="use a smaller --batch",
        ) from error
    stored = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    step = decode_step_bytes(config, weight_bytes=step_weight_bytes(config, stored, batch), **sizes)
    return {
        "path": path,
        "batch": batch,
        "context": times.context,
        "tokens_per_second": batch / times.seconds,
        "milliseconds_per_step": times.seconds * 1e3,
        "first_token_milliseconds": times.first_token_seconds * 1e3,
        "prefill_tokens_per_second": times.context / times.first_token_seconds,
        "kv_bytes": cache,
        "weight_bytes": sum(stored.values()),
        "step_bytes": step,
        "bytes_per_second": step / times.seconds,
        "share_of_bandwidth": None if bandwidth is None else step / times.seconds / bandwidth,
        "floor_milliseconds": None if bandwidth is None else step / bandwidth * 1e3,
        "step": times.path,
        "attention": times.attention,
        "native_gqa": times.native_gqa,
        "cuda_graph": times.cuda_graph,
        "compiled": times.compiled,
        "kernel_seconds": times.kernels,
        "variant_seconds": times.variants,
        "warnings": list(times.warnings),
    }


def budget_row(
    model: PreTrainedModel,
    config: Mapping[str, Any],
    memory_bytes: float,
    *,
    context: int,
    steps: int = NEW_TOKENS,
    bandwidth: float | None = None,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """The largest batch of a memory budget and its measured speed: `memory_bytes` and the keys of `decode_row`.

    Args:
        model, config, context, steps, bandwidth, compiled: As in `decode_row`.
        memory_bytes: Weights, cache and a tenth for everything else.
    """
    itemsize = next(model.parameters()).element_size()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = max_batch(
        config, memory_bytes=memory_bytes, context=context, weight_bytes=weights, dtype_bytes=itemsize
    )
    row: dict[str, Any] = {"memory_bytes": memory_bytes, "batch": batch, "tokens_per_second": None}
    if batch < 1:
        return row | {"reason": "not one sequence fits beside the weights"}
    free = _freed_memory(model.device)
    cache = kv_bytes(config, context=context, batch=batch, dtype_bytes=itemsize)
    if free is not None and cache > free:
        return row | {"reason": f"{cache / 1e9:.1f} GB of cache, and the device has {free / 1e9:.1f} GB free"}
    try:
        timed = decode_row(
            "",
            model,
            config,
            batch=batch,
            context=context,
            steps=steps,
            bandwidth=bandwidth,
            compiled=compiled,
        )
    except UsageError as error:
        return row | {"reason": error.what}
    del timed["path"]
    return row | timed


def time_decoding(
    model: PreTrainedModel,
    config: Mapping[str, Any],
    batch: int,
    context: int,
    steps: int,
    compiled: bool | None = None,
) -> DecodeTimes:
    """The step that servers run; where the model's attention is of another kind, transformers' own loop."""
    try:
        return fixed_step(model, config, batch, context, steps, compiled)
    except NotServed as error:
        return growing_cache(model, batch, context, steps, str(error))


def _within(configs: Mapping[str, Mapping[str, Any]], context: int) -> tuple[int, list[str]]:
    """`(context, warnings)`: the context shortened to what every model was built for."""
    limits = {path: limit for path, config in configs.items() if (limit := longest_context(config))}
    shortest = min(limits, key=limits.__getitem__, default=None)
    if shortest is None or limits[shortest] >= context:
        return context, []
    limit = limits[shortest]
    return limit, [f"context is {limit:,}, not {context:,}: {shortest} was built for no more"]


def _freed_memory(device: torch.device) -> int | None:
    """`free_memory` without the cache and the graph of an earlier measurement."""
    gc.collect()
    return free_memory(device)


def _check_fits(path: str, cache: int, batch: int, context: int, device: torch.device) -> None:
    free = _freed_memory(device)
    if free is None or cache <= free:
        return
    sequence = cache / batch
    fits = int(free / sequence)
    shorter = int(free / cache * context)
    raise UsageError(
        f"a cache of {cache / 1e9:.1f} GB does not fit: {free / 1e9:.1f} GB are free on {device}",
        where=path,
        fix=f"use --batch {fits}" if fits else f"use --batch 1 and --context {max(1, shorter * batch)}",
    )

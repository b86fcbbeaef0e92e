"""Decode speed, measured: cached one-token steps of a model, beside the bytes that a step must move.

FLOPs per token are the same before and after a conversion. What changes is the cache: its size, and the
traffic of reading it. Figures here are wall times of this machine and this attention backend only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..checkpoints.hf_config import is_encoder_decoder, load_config_json, stored_dtype
from ..checkpoints.loading import load_model, resolve_device, resolve_dtype
from ..errors import UnsupportedModelError, UsageError
from ..evaluation.setup import context_length
from ..kv_cache import decode_step_bytes, kv_bytes, step_weight_bytes
from ..results import Result

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEW_TOKENS, WARM_UP = 64, 3  # steps that are timed, and before the clock starts
# Without cuDNN's attention, which torch prefers on Hopper and later: it plans anew for every length (tens of
# milliseconds), and a cache is longer at every step.
ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class BenchResult(Result):
    """Decode speed of models under the same conditions.

    Args:
        batch, context, new_tokens: Sequences, tokens in the cache at the start, steps timed.
        dtype, device: Of every model.
        models: `path, tokens_per_second, milliseconds_per_step, kv_bytes, weight_bytes, step_bytes,
            bytes_per_second, attention, share_of_bandwidth` (the last where the bandwidth was given).
    """

    command: ClassVar[str] = "bench"
    batch: int
    context: int
    new_tokens: int
    dtype: str
    device: str
    models: list[dict[str, Any]] = field(default_factory=list)


def bench(
    models: str | Path | Sequence[str | Path],
    *,
    batch: int = 1,
    context: int = 1024,
    new_tokens: int = NEW_TOKENS,
    dtype: str = "auto",
    device: str = "auto",
    bandwidth: float | None = None,
    trust_remote_code: bool = False,
) -> BenchResult:
    """Time cached greedy decoding.

    Args:
        models: Folders or hub ids; all run in the dtype that the first resolves to.
        batch: Sequences decoded at once.
        context: Tokens already in the cache when the clock starts.
        new_tokens: Steps timed; the median is reported.
        dtype, device: As in `evaluate`.
        bandwidth: Memory bytes per second of the device, to state the share that is used.
        trust_remote_code: Run code that comes with a model.

    Returns:
        Measured figures of each model.

    Raises:
        UsageError: More tokens than a model was built for.
        UnsupportedModelError: An encoder-decoder.
        CheckpointError: A model cannot be loaded.
    """
    for name, value in (("batch", batch), ("context", context), ("new-tokens", new_tokens)):
        if value < 1:
            raise UsageError("must be at least 1", where=f"--{name} {value}")
    paths = [str(models)] if isinstance(models, (str, Path)) else [str(path) for path in models]
    for path in paths:
        config = load_config_json(path)
        if is_encoder_decoder(config):
            raise UnsupportedModelError(
                f"{config.get('model_type')} is an encoder-decoder, and only decoders are timed",
                where=path,
                fix="plan says what a decoding step moves",
            )
    where = resolve_device(device)
    number = resolve_dtype(dtype, where, stored_dtype(load_config_json(paths[0])))
    result = BenchResult(batch, context, new_tokens, str(number).removeprefix("torch."), str(where))
    for path in paths:
        config = load_config_json(path)
        gc.collect()
        model = load_model(path, dtype=number, device=where, trust_remote_code=trust_remote_code)
        limit = context_length(config)
        if limit is not None and context + new_tokens + WARM_UP > limit:
            raise UsageError(
                f"{context} + {new_tokens + WARM_UP} tokens are more than the {limit} it was built for",
                where=path,
                fix="lower --context or --new-tokens",
            )
        seconds = decode_seconds(model, batch, context, new_tokens)
        result.models.append(_row(path, config, model, seconds, batch, context, bandwidth, number.itemsize))
        del model
    return result


def longest_context(config: Mapping[str, Any], new_tokens: int = NEW_TOKENS) -> int | None:
    """The longest `context` that `bench` can time a model with; None where its positions have no end.

    Args:
        config: Raw `config.json`.
        new_tokens: As in `bench`.
    """
    limit = context_length(config)
    return None if limit is None else max(1, limit - new_tokens - WARM_UP)


@torch.inference_mode()
def decode_seconds(model: PreTrainedModel, batch: int, context: int, steps: int) -> float:
    """Median wall seconds of one decode step after a prefill of `context` random tokens.

    Args:
        model: In eval mode, on its device.
        batch, context, steps: Sequences, tokens of prefill, steps timed.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
    ids = torch.randint(vocabulary, (batch, context), generator=generator).to(model.device)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    times = []
    with sdpa_kernel(ANY_LENGTH):
        for _ in range(WARM_UP + steps):
            _wait(model.device)
            began = time.perf_counter()
            out = model(input_ids=token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            _wait(model.device)
            times.append(time.perf_counter() - began)
    return sorted(times[WARM_UP:])[steps // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    path: str,
    config: dict[str, Any],
    model: PreTrainedModel,
    seconds: float,
    batch: int,
    context: int,
    bandwidth: float | None,
    itemsize: int,
) -> dict[str, Any]:
    sizes: dict[str, Any] = {"context": context, "batch": batch, "dtype_bytes": itemsize}
    stored = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    read = step_weight_bytes(config, stored, batch)
    step = decode_step_bytes(config, weight_bytes=read, **sizes)
    return {
        "path": path,
        "tokens_per_second": batch / seconds,
        "milliseconds_per_step": seconds * 1e3,
        "kv_bytes": kv_bytes(config, **sizes),
        "weight_bytes": sum(stored.values()),
        "step_bytes": step,
        "bytes_per_second": step / seconds,
        "share_of_bandwidth": None if bandwidth is None else step / seconds / bandwidth,
        "attention": str(model.config._attn_implementation),
    }

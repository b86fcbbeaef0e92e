"""transformers' own decode loop with a growing cache, timed for models that cannot run on a fixed one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import sdpa_kernel

from .fixed_cache import BACKENDS
from .step_times import WARM_UP, DecodeTimes, wait

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


@torch.inference_mode()
def growing_cache(
    model: PreTrainedModel,
    batch: int,
    context: int,
    steps: int,
    why: str | None = None,
    cache: Callable[[], Cache | None] = lambda: None,
) -> DecodeTimes:
    """Time transformers' own loop with its growing cache, for models that the fixed step does not stand for.

    Args:
        model, batch, context, steps: As in `fixed_step`; the last step attends to `context` tokens.
        why: Why the fixed step is not timed.
        cache: Makes an empty cache; None from it for transformers' usual one.
    """
    prompt = max(1, context - steps - WARM_UP)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
    ids = torch.randint(vocabulary, (batch, prompt), generator=generator).to(model.device)
    model(input_ids=ids[:1], past_key_values=cache(), use_cache=True, logits_to_keep=1)
    wait(model.device)
    began = time.perf_counter()
    model(input_ids=ids[:1], past_key_values=cache(), use_cache=True, logits_to_keep=1).logits.argmax()
    wait(model.device)
    first = time.perf_counter() - began
    out = model(input_ids=ids, past_key_values=cache(), use_cache=True, logits_to_keep=1)
    filled, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    times = []
    with sdpa_kernel(BACKENDS):
        for _ in range(WARM_UP + steps):
            wait(model.device)
            began = time.perf_counter()
            out = model(input_ids=token, past_key_values=filled, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            wait(model.device)
            times.append(time.perf_counter() - began)
    name = str(model.config._attn_implementation)
    warning = f"timed in transformers' own loop: {why}; it may repeat keys and values for every query head"
    return DecodeTimes(
        statistics.median(times[WARM_UP:]), first, min(context, prompt + WARM_UP + steps), "growing cache", name,
        False, warnings=(warning,) if why else (),
    )  # fmt: skip

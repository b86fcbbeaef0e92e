"""What runs in the process that has vLLM: one job on standard input, one line of JSON as the answer.

It imports nothing of this package, which the engine's environment need not have.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import time
from typing import Any

GIB = 2**30


def about(asked: list[list[str]]) -> dict[str, Any]:
    """vLLM's version, where it runs, and whether it has one of the classes that each model names."""
    import vllm
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    known = set(ModelRegistry.get_supported_archs())
    found = [not names or bool(known & set(names)) for names in asked]
    return {
        "version": vllm.__version__,
        "device": str(current_platform.device_type),
        "asked": asked,
        "known": found,
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step and of a first token.

    A step is what `generate` takes longer for many tokens than for one, over prompts that are in the prefix cache. Every
    sequence has a prompt of its own, so that no block of the cache is shared.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(math.ceil(job["cache_bytes"] * 1.2 / GIB) + 1))
    from vllm import LLM, SamplingParams

    batch, prompt, steps = job["batch"], job["prompt"], job["steps"]
    engine = LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=prompt + steps + 1, max_num_seqs=batch,
        enable_prefix_caching=True, trust_remote_code=job["trust_remote_code"], skip_tokenizer_init=True,
    )  # fmt: skip
    config = engine.llm_engine.vllm_config
    holds = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    if holds < batch * (prompt + steps):
        return {
            "usage": f"vLLM's cache holds {holds:,} tokens, and batch times context are {batch * (prompt + steps):,}",
            "fix": f"use --batch {holds // (prompt + steps)}"
            if holds >= prompt + steps
            else "use a shorter --context",
        }
    random.seed(0)
    vocabulary = config.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [random.randrange(vocabulary) for _ in range(prompt)]} for _ in range(batch + 1)
    ]

    def timed(some: list[Any], tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate(some, sampling, use_tqdm=False)
        return time.perf_counter() - began

    timed(prompts[:batch], 2)  # fills the cache, and compiles what is compiled
    first = timed(prompts[batch:], 1)
    timed(prompts[:batch], 1)  # what the single prompt displaced
    one, many = (min(timed(prompts[:batch], n) for _ in range(2)) for n in (1, 1 + steps))
    sizes = engine.apply_model(_sizes)[0]
    model = config.model_config
    return {
        "seconds": (many - one) / steps,
        "first_token_seconds": first,
        "itemsize": model.dtype.itemsize,
        "tensors": sizes,
        "weight_bytes": sum(sizes.values()),
        "attention": f"paged, {str(model.dtype).removeprefix('torch.')} cache",
        "warnings": [],
    }


def _sizes(model: Any) -> dict[str, int]:
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters()}


def main() -> None:
    """Answer the job, and end without waiting for the engine's threads."""
    job = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        answer = about(job["about"]) if "about" in job else measure(job)
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

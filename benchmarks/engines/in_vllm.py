"""Results in vLLM on the CPU: tokens, logits, and the size of its KV cache.    python in_vllm.py RESULTS NAME..."""

from __future__ import annotations

import gc
import os
import sys

for key, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():  # fmt: skip
    os.environ.setdefault(key, value)

import numpy as np  # noqa: E402
import vllm  # noqa: E402
from common import TOKENS, failed, load_reference, record, verdict, work  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

ENGINE = f"vllm {vllm.__version__} (CPU)"


def run(name: str, results: str) -> None:
    """Greedy tokens of one result, logits of its first step, tokens that the cache holds."""
    engine = LLM(
        model=str(work() / "models" / name), dtype="float32", enforce_eager=True, max_model_len=512, max_logprobs=-1,
        logprobs_mode="raw_logits", trust_remote_code=True,
    )  # fmt: skip
    references = load_reference(name)
    prompts = [{"prompt_token_ids": reference["ids"].tolist()} for reference in references]
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    one = engine.generate(prompts, SamplingParams(max_tokens=1, logprobs=-1, **greedy))
    many = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, **greedy))
    first = []
    for answer, reference in zip(one, references, strict=True):
        known = np.full(reference["logits"].shape[1], np.nan)
        for token, entry in answer.outputs[0].logprobs[0].items():
            if token < len(known):
                known[token] = entry.logprob
        first.append(known)
    cache = engine.llm_engine.vllm_config.cache_config
    row = verdict(name, [answer.outputs[0].token_ids for answer in many], first)
    record(
        results,
        ENGINE,
        name,
        {"way": "float32", **row, "cache_tokens": cache.num_gpu_blocks * cache.block_size},
    )
    del engine


def main() -> None:
    results, *names = sys.argv[1:]
    for name in names:
        try:
            run(name, results)
        except Exception as error:
            record(results, ENGINE, name, {"way": "float32", **failed(error)})
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()

"""Results in CTranslate2: float32, single and batch; int8 must run.    python in_ctranslate2.py RESULTS NAME..."""

from __future__ import annotations

import sys

import ctranslate2
import numpy as np
from common import TOKENS, failed, load_reference, record, verdict, work
from transformers import AutoTokenizer

ENGINE = f"ctranslate2 {ctranslate2.__version__}"


def run(name: str, compute_type: str, results: str) -> None:
    """Greedy tokens of one result."""
    exact = compute_type == "float32"
    generator = ctranslate2.Generator(
        str(work() / "exports" / f"{name}-ct2"), device="cpu", compute_type=compute_type, intra_threads=1
    )
    tokenizer = AutoTokenizer.from_pretrained(work() / "models" / name)
    prompts = [tokenizer.convert_ids_to_tokens(r["ids"].tolist()) for r in load_reference(name)]
    options = {"max_length": TOKENS, "sampling_topk": 1, "include_prompt_in_result": False}
    single = [generator.generate_batch([p], **options)[0].sequences_ids[0] for p in prompts]
    first = [
        np.array(generator.forward_batch([r["ids"].tolist()], return_log_probs=False))[0, -1]
        for r in load_reference(name)
    ]
    record(results, ENGINE, name, {"way": compute_type, **verdict(name, single, first, exact=exact)})
    batch = [found.sequences_ids[0] for found in generator.generate_batch(prompts, **options)]
    record(results, ENGINE, name, {"way": f"{compute_type}, batch", **verdict(name, batch, exact=exact)})


def main() -> None:
    results, *names = sys.argv[1:]
    for name in names:
        for compute_type in ("float32", "int8"):
            try:
                run(name, compute_type, results)
            except Exception as error:
                record(results, ENGINE, name, {"way": compute_type, **failed(error)})


main()

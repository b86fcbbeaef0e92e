"""Results in onnxruntime-genai, float32.    python in_onnxruntime.py RESULTS NAME..."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime_genai as engine
from common import TOKENS, failed, load_reference, record, verdict, work

ENGINE = f"onnxruntime-genai {engine.__version__}"


def run(name: str, results: str) -> None:
    """Greedy tokens of one result."""
    model = engine.Model(str(work() / "exports" / f"{name}-onnx"))
    outputs, first = [], []
    for reference in load_reference(name):
        ids = reference["ids"]
        parameters = engine.GeneratorParams(model)
        parameters.set_search_options(max_length=len(ids) + TOKENS, do_sample=False)
        generator = engine.Generator(model, parameters)
        generator.append_tokens(ids.astype(np.int32))
        first.append(np.array(generator.get_logits()).reshape(-1)[-reference["logits"].shape[1] :])
        for _ in range(TOKENS):
            if generator.is_done():
                break
            generator.generate_next_token()
        outputs.append([int(token) for token in generator.get_sequence(0)][len(ids) :])
    record(results, ENGINE, name, {"way": "float32", **verdict(name, outputs, first)})


def main() -> None:
    results, *names = sys.argv[1:]
    for name in names:
        try:
            run(name, results)
        except Exception as error:
            record(results, ENGINE, name, {"way": "float32", **failed(error)})


main()

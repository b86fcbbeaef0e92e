"""One result in llama.cpp's server, in the process of its own that a server needs.

python in_llama_cpp.py RESULTS NAME PRECISION TOLERANCE
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import urllib.request
from typing import Any

import numpy as np
import xllamacpp
from common import TOKENS, failed, load_reference, record, verdict, work

ENGINE = f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"


def serve(file: str) -> xllamacpp.Server:
    """A server with a float32 cache and one thread."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 512, 1, 1
    parameters.warmup = False
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(parameters)


def ask(server: xllamacpp.Server, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a completion."""
    request = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return json.loads(urllib.request.urlopen(request, timeout=300).read())


def run(name: str, precision: str, tolerance: float) -> dict[str, Any]:
    """Greedy tokens of one result, and the twenty best logits of the first step."""
    server = serve(str(next((work() / "exports" / f"{name}-gguf-{precision}").glob("*.gguf"))))
    outputs, first = [], []
    for reference in load_reference(name):
        answer = ask(
            server,
            {
                "prompt": reference["ids"].tolist(), "n_predict": TOKENS, "temperature": 0, "top_k": 1,
                "ignore_eos": True, "return_tokens": True, "cache_prompt": False, "n_probs": 20,
                "post_sampling_probs": False,
            },
        )  # fmt: skip
        outputs.append(answer["tokens"])
        right = reference["logits"][0].astype(np.float64)
        norm = np.log(np.exp(right - right.max()).sum()) + right.max()
        known = np.full(len(right), np.nan)
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            known[entry["id"]] = entry["logprob"] + norm
        first.append(known)
    return verdict(name, outputs, first, tolerance, exact=precision == "f32")


def main() -> None:
    results, name, precision, tolerance = sys.argv[1:]
    try:
        row = run(name, precision, float(tolerance))
    except Exception as error:
        row = failed(error)
    record(results, ENGINE, name, {"way": precision, "tolerance": float(tolerance), **row})
    sys.stdout.flush()
    os._exit(0)  # the server's threads do not end


main()

"""What sharing heads gains where transformers generates: tokens per second and memory of an encoder-decoder.

    python benchmarks/real/decode.py WORK whisper-tiny.en MODEL … [--batch 16 64] [--device cuda]

MODEL: folders of conversions. Every model writes the same number of tokens for the same recordings (silence and tone mixed
by a seed: what is heard does not change the time). On a CPU one thread's processor time is taken, which other work on the
machine hardly changes: run it with OMP_NUM_THREADS=1. Written to benchmarks/results/real_decode_NAME.json, a row a model and
batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin

sys.path.insert(0, str(Path(__file__).parents[1]))
from _common import RESULTS, provenance, write_json

from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.kv_cache import kv_bytes


@torch.inference_mode()
def timed(model: Any, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Median seconds of writing `tokens` for `batch` recordings at once, without the encoder's; peak memory."""
    generator, device = torch.Generator().manual_seed(0), model.device
    config = model.config
    features = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    heard = model.get_encoder()(features.to(device, model.dtype))
    start = torch.full((batch, 1), config.decoder_start_token_id, device=device)

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter

    def write(count: int) -> float:
        wait(device)
        began = clock()
        GenerationMixin.generate(
            model,
            encoder_outputs=heard,
            decoder_input_ids=start,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            max_length=None,
            forced_decoder_ids=None,
        )
        wait(device)
        return clock() - began

    write(4)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = statistics.median(write(tokens) for _ in range(repeats))
    found: dict[str, Any] = {"seconds": seconds, "tokens_per_second": batch * tokens / seconds}
    found |= {"clock": "processor" if alone else "wall"}
    if device.type == "cuda":
        found["generation_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    return found


def wait(device: torch.device) -> None:
    """Until everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure every model at every batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("name")
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=128, help="that each writes")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    path, source = given.results / f"real_decode_{given.name}.json", given.work / "models" / given.name
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record = {"command": "benchmarks/real/decode.py", "model": given.name, "rows": [], "runs": []} | record
    run = provenance(given.device, seed=0)
    if run not in record["runs"]:
        record["runs"].append(run)
    for folder in (source, *given.models):
        config = load_config_json(folder)
        model = load_model(folder, device=given.device, dtype=given.dtype, trust_remote_code=True).eval()
        for batch in given.batch:
            cache = kv_bytes(config, context=given.tokens, batch=batch, dtype_bytes=model.dtype.itemsize)
            line = {"name": "original" if folder == source else folder.name, "batch": batch}
            line |= {"tokens": given.tokens, "device": given.device, "dtype": str(model.dtype)[6:]}
            line |= {"cache_bytes": cache, "run": record["runs"].index(run)}
            line |= timed(model, batch, given.tokens, given.repeats)
            record["rows"].append(line)
            write_json(path, record)
            print(json.dumps(line), flush=True)
        del model


if __name__ == "__main__":
    main()

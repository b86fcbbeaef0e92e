"""Loss as served: original and result with quantised weights, and with quantised KV caches.

    python benchmarks/engines/served_quality.py --original MODEL --result GQA [GQA …] --text VALID.jsonl \\
        --llama-cpp SOURCES --llama-cpp-bin FOLDER --work SCRATCH --out benchmarks/results/served_quality.json

`mha2gqa export` hands each model to llama.cpp and CTranslate2; `llama-quantize` and `llama-perplexity` are llama.cpp's own
(FOLDER has both), torchao quantises a model in transformers, hqq its caches. Everywhere the same text is cut into chunks of `--context`
tokens, of which the second half is scored, as llama-perplexity does: losses of all engines are comparable, and each row has
those of its chunks, so that differences have paired errors. A row that is there is not made again. `--engines` names those that
have the model's class, `--weights-only` leaves quantised caches out.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _common import RESULTS, provenance, write_json

from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.data import read_documents
from mha2gqa.kv_cache import kv_bytes_per_token, kv_layers

WEIGHTS = ("f32", "q8_0", "q4_k_m")  # of llama.cpp
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # bits of a cached number, scales included
ATTEMPTS = 3
RUNNING = re.compile(r"\[(\d+)\]([\d.]+),")  # perplexity of all chunks so far
ENGINES = ("llama.cpp", "transformers", "ctranslate2")


class Models:
    """What is measured, in the formats of the engines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.text = args, args.work / "text.txt"
        self.folders = {"original": args.original} | {folder.name: folder for folder in args.result}
        args.work.mkdir(parents=True, exist_ok=True)
        self.text.write_text(self._enough_text(), encoding="utf-8")

    def _enough_text(self) -> str:
        """Documents for the chunks that are asked for: engines tokenise all that they are given."""
        enough, found, size = (self.args.chunks + 1) * self.args.context * 6, [], 0
        for document in read_documents([str(self.args.text)]):
            found.append(document)
            size += len(document)
            if size > enough:
                break
        return "\n\n".join(found)

    def run(self, *words: Any) -> str:
        """A command's output, both streams."""
        done = subprocess.run(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise SystemExit(f"{words[0]}: exit {done.returncode}\n{done.stdout[-2000:]}")
        return done.stdout

    def export(self, name: str, to: str, precision: str) -> Path:
        """A model in an engine's format, by `mha2gqa export`."""
        out = self.args.work / f"{name}-{to}-{precision}"
        if not out.exists():
            words = ["export", self.folders[name], out, "--to", to, "--precision", precision]
            if to == "gguf":
                words += ["--llama-cpp", self.args.llama_cpp, "--pre-tokenizer", self.args.pre_tokenizer]
            self.run(sys.executable, "-m", "mha2gqa", *words)
        return out

    def gguf(self, name: str, weights: str) -> tuple[Path, dict[str, int]]:
        """A model's GGUF file of some precision, and how many tensors are stored in which kind."""
        whole = next(self.export(name, "gguf", "f32").glob("*.gguf"))
        if weights == "f32":
            return whole, {}
        file, log = whole.with_name(f"{weights}.quantised"), whole.with_name(f"{weights}.log")
        if not file.exists():
            log.write_text(self.run(self.args.llama_cpp_bin / "llama-quantize", whole, file, weights.upper()))
        kinds: dict[str, int] = {}
        for kind in re.findall(r"(?:converting|quantizing) to +(\w+)", log.read_text()):
            kinds[kind] = kinds.get(kind, 0) + 1
        return file, kinds

    def chunks(self) -> list[list[int]]:
        """Token ids of the text in chunks of the context, as llama-perplexity cuts it."""
        from mha2gqa.checkpoints.loading import load_tokenizer

        tokenizer = load_tokenizer(self.args.original)
        ids = tokenizer(self.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        size = self.args.context
        return [ids[i * size : (i + 1) * size] for i in range(min(len(ids) // size, self.args.chunks))]


# --- engines -------------------------------------------------------------------------------------------


def of_chunks(losses: Sequence[float]) -> dict[str, Any]:
    """A row of the mean losses of chunks, all of which score as many tokens."""
    return {"loss": statistics.fmean(losses), "chunk_losses": list(losses)}


def in_llama_cpp(models: Models, name: str, weights: str, cache: str) -> dict[str, Any]:
    """Loss by llama-perplexity, which is asked for one chunk more: its last words can be lost where the machine is busy."""
    args = models.args
    file, kinds = models.gguf(name, weights)
    words = [args.llama_cpp_bin / "llama-perplexity", "-m", file, "-f", models.text, "-c", args.context]
    words += [
        "-b",
        args.context,
        "--chunks",
        args.chunks + 1,
        "-t",
        args.threads,
        "-ctk",
        cache,
        "-ctv",
        cache,
    ]
    words += ["-fa", "on"]
    for _ in range(ATTEMPTS):
        said = models.run(*words)
        sums = [0.0] + [int(i) * math.log(float(perplexity)) for i, perplexity in RUNNING.findall(said)]
        if len(sums) > args.chunks:
            losses = [after - before for before, after in itertools.pairwise(sums)]
            return of_chunks(losses[: args.chunks]) | {"stored_as": kinds}
    raise SystemExit(f"llama-perplexity scored {len(sums) - 1} chunks of {args.chunks}\n{said[-2000:]}")


def in_transformers(models: Models, name: str, bits: str) -> dict[str, Any]:
    """Loss in transformers, in float32 or with torchao's 8-bit weights."""
    import torch

    from mha2gqa.checkpoints.loading import load_model

    model = load_model(models.folders[name], dtype="float32", device="cpu")
    if bits == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    found = []
    for chunk in models.chunks():
        ids = torch.tensor([chunk])
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        found.append(float(losses[len(chunk) // 2 :].double().mean()))
    return of_chunks(found)


def in_quantised_cache(models: Models, name: str, bits: str) -> dict[str, Any]:
    """Loss in transformers, in float32: the second half of each chunk reads the first from a quantised cache."""
    import torch
    from transformers import QuantizedCache

    from mha2gqa.checkpoints.loading import load_model

    model = load_model(models.folders[name], dtype="float32", device="cpu")
    found = []
    for chunk in models.chunks():
        ids, half = torch.tensor([chunk]), len(chunk) // 2
        cache = QuantizedCache("hqq", model.config, nbits=int(bits), axis_key=1, axis_value=1)
        with torch.inference_mode():
            model(input_ids=ids[:, :half], past_key_values=cache)
            logits = model(input_ids=ids[:, half:], past_key_values=cache).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, half + 1 :], reduction="none")
        found.append(float(losses.double().mean()))
    return of_chunks(found)


def in_ctranslate2(models: Models, name: str, bits: str) -> dict[str, Any]:
    """Loss in CTranslate2, weights and activations in 8 bits or float32."""
    import ctranslate2

    from mha2gqa.checkpoints.loading import load_tokenizer

    folder = models.export(name, "ct2", bits)
    generator = ctranslate2.Generator(str(folder), compute_type=bits, intra_threads=models.args.threads)
    tokenizer = load_tokenizer(models.args.original)
    found = []
    for chunk in models.chunks():
        (scored,) = generator.score_batch([tokenizer.convert_ids_to_tokens(chunk)])
        found.append(-statistics.fmean(scored.log_probs[len(chunk) // 2 :]))  # of tokens 1, 2, …
    return of_chunks(found)


def rows(models: Models) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every row's key, and what makes it, of the engines that are asked."""
    names, engines = list(models.folders), models.args.engines
    caches = not models.args.weights_only
    if "llama.cpp" in engines:
        kinds = [(weights, "f16") for weights in WEIGHTS]
        kinds += [("f32", cache) for cache in CACHES if cache != "f16" and caches]
        for weights, cache in kinds:
            for name in names:
                key = {"model": name, "engine": "llama.cpp", "weights": weights, "cache": cache}
                yield key, (in_llama_cpp, name, weights, cache)
    for engine, call in (("transformers", in_transformers), ("ctranslate2", in_ctranslate2)):
        for bits in ("float32", "int8") if engine in engines else ():
            for name in names:
                yield {"model": name, "engine": engine, "weights": bits, "cache": "f32"}, (call, name, bits)
    for bits in ("8", "4") if caches and "transformers" in engines else ():
        for name in names:
            key = {"model": name, "engine": "transformers", "weights": "float32", "cache": f"hqq-{bits}"}
            yield key, (in_quantised_cache, name, bits)


def about(models: Models) -> dict[str, Any]:
    """What holds for all rows."""
    args, found = models.args, {}
    for name, folder in models.folders.items():
        config = load_config_json(folder)
        layer = kv_layers(config)[0]
        numbers = kv_bytes_per_token(config, 1)
        found[name] = {
            "class": config["architectures"][0],
            "kv_heads": layer.heads,
            "head_dim": layer.key_dim,
            "cache_bytes_per_token": {cache: numbers * bits / 8 for cache, bits in CACHES.items()},
        }
        manifest = Path(folder) / "mha2gqa.json"
        if manifest.exists():
            known = json.loads(manifest.read_text(encoding="utf-8"))
            found[name]["calibration"] = {
                key: known.get("calibration", {}).get(key)
                for key in ("unique_tokens", "token_visits", "losses")
            }
    packages = {
        name: importlib.metadata.version(name)
        for name in ("ctranslate2", "torchao", "hqq")
        if any(importlib.metadata.packages_distributions().get(name, []))
    }
    of_engines = {"packages": packages}
    if "llama.cpp" in args.engines:
        said = models.run(args.llama_cpp_bin / "llama-perplexity", "--version").splitlines()
        of_engines["llama_cpp"] = next(line for line in said if line.startswith("version"))
    digest = hashlib.sha256(models.text.read_bytes()).hexdigest()[:16]
    return {
        "command": "benchmarks/engines/served_quality.py",
        **provenance(seed=0),
        **of_engines,
        "protocol": {"context": args.context, "chunks": args.chunks, "scored": "second half of each chunk"},
        "text": {"name": args.text.name, "sha256": digest},
        "original": Path(args.original).name,
        "models": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--result", type=Path, nargs="*", default=[], help="folders, named as their rows are")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pre-tokenizer", default="gpt-2")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--weights-only", action="store_true", help="quantised weights, no quantised caches")
    parser.add_argument("--llama-cpp", type=Path, help="sources, for the converter")
    parser.add_argument("--llama-cpp-bin", type=Path, help="folder of llama-perplexity and llama-quantize")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "served_quality.json")
    args = parser.parse_args()
    if "llama.cpp" in args.engines and not (args.llama_cpp and args.llama_cpp_bin):
        parser.error("llama.cpp needs --llama-cpp and --llama-cpp-bin")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    models = Models(args)
    record = about(models)
    known = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    done: list[dict[str, Any]] = []
    for key, (call, *words) in rows(models):
        row = next((r for r in known if all(r.get(k) == v for k, v in key.items())), None)
        row = row or key | call(models, *words)
        done.append(row)
        write_json(args.out, record | {"rows": done})
        print(f"{key}: {row['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()

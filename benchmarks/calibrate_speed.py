"""Time and memory of a calibrated conversion of a large model, by the product's own command.

    python benchmarks/calibrate_speed.py --shape 7b --layers 4 --work DIR --out benchmarks/results/calibrate_speed.json

A Llama of any shape with random bf16 weights is written to disk with random text beside it; `mha2gqa convert` runs
on it in a process of its own, which is watched: seconds a stage, peak GPU memory, peak anonymous host memory. Where
not all layers are built, figures of the whole are extrapolated from seconds a layer, and the row says so. A run that
is cut off goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _common import RESULTS, hardware, provenance, write_json

SHAPES = {  # hidden, feed-forward, heads, layers of the whole model, vocabulary
    "7b": (4096, 11008, 32, 32, 32000),
    "72b": (8192, 29568, 64, 80, 32000),
    "tiny": (128, 256, 8, 4, 2048),
}

WINDOW = "512"  # tokens of a block: of every row, so that they can be compared


def write_model(folder: Path, shape: str, layers: int) -> None:
    """A checkpoint of random weights, one shard a layer, and the tokenizer of the embedded model."""
    import torch
    from safetensors.torch import save_file

    from mha2gqa.assets import tiny_model_path

    hidden, feed, heads, _, vocab = SHAPES[shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def noise(*size: int) -> Any:
        return (torch.randn(size, device=device) * 0.02).bfloat16().cpu()

    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}

    def shard(name: str, tensors: dict[str, Any]) -> None:
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    ends = {"model.embed_tokens.weight": noise(vocab, hidden), "lm_head.weight": noise(vocab, hidden)}
    shard("ends.safetensors", ends | {"model.norm.weight": torch.ones(hidden).bfloat16()})
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors = {f"{at}self_attn.{p}_proj.weight": noise(hidden, hidden) for p in "qkvo"}
        tensors |= {f"{at}mlp.{p}_proj.weight": noise(feed, hidden) for p in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = noise(hidden, feed)
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{at}{norm}.weight": torch.ones(hidden).bfloat16() for norm in norms}
        shard(f"layer-{i:03}.safetensors", tensors)
    size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "dtype": "bfloat16",
        "intermediate_size": feed, "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "hidden_act": "silu",
        "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model_path() / name, folder / name)


def write_text(path: Path, tokens: int) -> None:
    """Random words, enough for `tokens`."""
    random.seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random.choices(letters, k=random.randint(2, 8))) for _ in range(4000)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(tokens // 400):
            file.write(json.dumps({"text": " ".join(random.choices(words, k=400))}) + "\n")


class Watch:
    """Peak memory of a process and its descendants, GiB: on each GPU that they may use, and on the host.

    `gpus` is what nvidia-smi shows, one for each; `host` the anonymous part, `shared` the shared one, `locked` what is
    pinned, as far as the kernel counts it.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.gpus, self._ended = pid, list[float](), threading.Event()
        self.host = self.shared = self.locked = 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def gpu(self) -> float:
        return max(self.gpus, default=0.0)

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        if os.environ.get("CUDA_VISIBLE_DEVICES"):
            query += ["-i", os.environ["CUDA_VISIBLE_DEVICES"]]
        while not self._ended.wait(0.5):
            if shutil.which(query[0]):
                used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
                now = [float(x) / 1024 for x in used if x.isdigit()]
                self.gpus = [max(pair) for pair in zip(now, self.gpus or now, strict=True)]
            family = _family(self.pid)
            self.host = max(self.host, sum(_status(pid, "RssAnon") for pid in family) / 2**20)
            self.shared = max(self.shared, sum(_status(pid, "RssShmem") for pid in family) / 2**20)
            self.locked = max(
                self.locked, sum(_status(p, "VmPin") + _status(p, "VmLck") for p in family) / 2**20
            )

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found, parents = [pid], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def _status(pid: int, field: str) -> int:
    """A field of a process's memory, KiB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and those that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def convert(args: argparse.Namespace, source: Path, text: Path) -> dict[str, Any]:
    """Run the command and watch it; {} where its time was up (what is finished is kept)."""
    out = args.work / f"out-{args.name}"
    words = ["convert", str(source), str(out), "--groups", str(args.groups), "--calibration", str(text)]
    words += ["--calibration-tokens", str(args.tokens), "--calibration-window", WINDOW]
    words += ["--device", args.device, "--json", *args.more]
    launch = [sys.executable, "-m"]
    if args.processes > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}", "-m"]
    began = time.monotonic()
    with (args.work / f"{args.name}.log").open("a") as log:
        process = subprocess.Popen(
            [*launch, "mha2gqa", *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        watch = Watch(process.pid)
        try:
            printed, _ = process.communicate(timeout=args.seconds)
        except subprocess.TimeoutExpired:
            return {}
        finally:
            stop(process)
            watch.close()
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}; see {args.work}/{args.name}.log")
    result = json.loads(printed.strip().splitlines()[-1])
    shutil.rmtree(out)
    return {
        "wall_seconds": round(time.monotonic() - began, 1),
        "stage_seconds": result["calibration"]["seconds"],
        "stage_device_gib": {
            stage: round(peak / 2**30, 2)
            for stage, peak in result["calibration"].get("peak_device_bytes", {}).items()
        },
        "stage_seconds_by_rank": result["calibration"].get("seconds_by_rank", []),
        "gpu_gib": round(watch.gpu, 2),
        "gpus_gib": [round(x, 2) for x in watch.gpus],
        "host_anonymous_gib": round(watch.host, 2),
        "host_shared_gib": round(watch.shared, 2),
        "host_locked_gib": round(watch.locked, 2),
        "host_pinned_gib": round(result["calibration"].get("peak_pinned_bytes", 0) / 2**30, 2),
        "losses": result["calibration"]["losses"],
        "steps": [row.get("steps") for row in result["layers"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--layers", type=int, default=4, help="how many are built (default 4)")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=1, help="processes under torchrun")
    parser.add_argument(
        "--seconds", type=float, default=560, help="stop after so long; give the command again to go on"
    )
    parser.add_argument("--name", default="default", help="of the row")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "calibrate_speed.json")
    parser.add_argument("more", nargs="*", help="further options of convert, after --")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    source, text = args.work / f"{args.shape}-{args.layers}", args.work / f"text-{args.tokens}.jsonl"
    if not (source / "config.json").exists():
        shutil.rmtree(source, ignore_errors=True)
        write_model(source, args.shape, args.layers)
    if not text.exists():
        write_text(text, args.tokens)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.device == "cuda":  # threads are the product's to choose, not the shell's
        os.environ.pop("OMP_NUM_THREADS", None)
    before, began = args.work / f"{args.name}.seconds", time.monotonic()
    spent = json.loads(before.read_text(encoding="utf-8")) if before.exists() else []
    measured = convert(args, source, text)
    if not measured:
        before.write_text(json.dumps([*spent, time.monotonic() - began]), encoding="utf-8")
        print(f"{args.name}: time is up; give the command again")
        return
    before.unlink(missing_ok=True)
    measured["wall_seconds"] = round(measured["wall_seconds"] + sum(spent), 1)
    whole = SHAPES[args.shape][3]
    in_layers = sum(seconds for stage, seconds in measured["stage_seconds"].items() if stage != "losses")
    row = {
        "name": args.name, "shape": args.shape, "layers": args.layers, "groups": args.groups,
        "calibration_tokens": args.tokens, "processes": args.processes, "options": args.more, "gpu": hardware(args.device).get("gpu"), "commands": len(spent) + 1, **measured,
        "seconds_per_layer": round(in_layers / args.layers, 2),
        "whole_model_minutes": round((measured["wall_seconds"] + in_layers / args.layers * (whole - args.layers)) / 60, 1),
        "extrapolated": args.layers != whole,
    }  # fmt: skip
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"rows": []}
    rows = [r for r in known["rows"] if r["name"] != args.name] + [row]
    write_json(args.out, {**provenance(args.device, 0), "rows": rows})
    print(json.dumps(row))


if __name__ == "__main__":
    main()

"""The floor: models with G key/value heads trained from scratch, with the recipe and the text of the original.

    python benchmarks/quality_floor.py --model MODEL --train CORPUS --valid VALID.jsonl --groups 4 \\
        --work /scratch --ledger ledger.jsonl --seconds 540

A larger original, of its own shape and budget, for the same bench:

    python benchmarks/quality_floor.py --model MODEL --train CORPUS --valid VALID.jsonl --groups 16 --passes 2 --lr 1e-3 \\
        --shape hidden_size=1024 head_dim=64 intermediate_size=2816 --work /scratch --save /scratch/llama-111m

How much of a conversion's gap is fewer heads, and how much is conversion. Same config but for the KV heads,
same tokens in the same order, same optimiser and schedule as the original's `train.json` says: AdamW
(0.9, 0.95), weight decay 0.1 on matrices, gradient norm 1, bf16 autocast over float32 weights, warm-up of 200
steps, constant, a linear decay to 5 % over the last 30 %. State is saved before `--seconds` are over and the next
call goes on from there, bit for bit the same batches. Several `--groups` are trained at once, one process each.
`--save` keeps the models; with `--shape` nothing is written to the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import gpu_names, hardware, write_json
from _quality_ledger import Ledger
from _quality_rows import model_shape
from _quality_scores import scores
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mha2gqa.checkpoints.loading import load_tokenizer, resolve_device
from mha2gqa.data import encode_documents, read_documents, token_blocks
from mha2gqa.data.encoding import eos_id

WARMUP, DECAY, FLOOR = 200, 0.3, 0.05
CAUSAL = "causal_only"  # the attention function is registered under this


def rate_at(step: int, steps: int, peak: float) -> float:
    """Warm-up, constant, linear decay."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    decays = int(steps * (1 - DECAY))
    if step < decays:
        return peak
    return peak * (FLOOR + (1 - FLOOR) * (1 - (step - decays) / (steps - decays)))


def token_stream(args: argparse.Namespace) -> np.ndarray:
    """All training tokens, each document followed by the end of text; kept in the work folder."""
    path = args.work / "train.bin"
    if not path.exists():
        tokenizer = load_tokenizer(args.model)
        end = np.array([eos_id(tokenizer)], dtype=np.uint16)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as file:
            for ids in encode_documents(tokenizer, read_documents(args.train)):
                whole = ids.astype(np.uint16)
                (whole if len(whole) and whole[-1] == end[0] else np.concatenate([whole, end])).tofile(file)
        partial.replace(path)
    return np.memmap(path, dtype=np.uint16, mode="r")


def batches(tokens: np.ndarray, size: int, window: int, first: int) -> Iterator[torch.Tensor]:
    """Ids `[size, window + 1]` from step `first` on: blocks in a new order each pass."""
    count = (len(tokens) - 1) // window
    rng, step = np.random.default_rng(0), 0
    while True:
        order = rng.permutation(count)
        for start in range(0, count - size + 1, size):
            if step >= first:
                rows = [tokens[i * window : i * window + window + 1] for i in order[start : start + size]]
                yield torch.from_numpy(np.stack(rows).astype(np.int64))
            step += 1


def build(args: argparse.Namespace, groups: int) -> Any:
    """The untrained model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_causal()
    changes = args.shape | {"num_key_value_heads": groups}
    config = AutoConfig.from_pretrained(args.model, dtype="float32", **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation(CAUSAL)
    return model


def register_causal() -> None:
    """Attention without a mask tensor: compiled, transformers would write one, which flash attention does not take."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        **kw: Any,
    ) -> tuple[Tensor, None]:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(CAUSAL, attention)
    AttentionMaskInterface.register(CAUSAL, lambda *words, **kw: None)


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean cross-entropy of `ids[:, 1:]`; compiled as a whole, so that float32 logits are never stored."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def optimiser(model: Any, rate: float, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, weight decay on matrices."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def recipe_of(args: argparse.Namespace) -> tuple[int, float, int, int]:
    """Steps, peak rate, blocks a step and window: the original's, where no option says otherwise."""
    stored = json.loads((args.model / "train.json").read_text())
    size, window, steps = args.batch or stored["batch"], args.window or stored["T"], args.steps
    if args.passes and not steps:
        steps = round(args.passes * len(token_stream(args)) / (size * window))
    return steps or stored["steps"], args.lr or stored["lr"], size, window


def train(args: argparse.Namespace, groups: int) -> Any | None:
    """Train to the end, or save where time ran out and return None."""
    device = resolve_device(args.device)
    torch.set_float32_matmul_precision("high")
    steps, rate, size, window = recipe_of(args)
    model = build(args, groups).to(device)
    optimizer, first, state_file = optimiser(model, rate, device), 0, args.work / f"floor-G{groups}.pt"
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    run = torch.compile(next_token_loss) if device.type == "cuda" else next_token_loss
    stream, began = batches(token_stream(args), size, window, first), time.monotonic()
    for step in range(first, steps):
        if time.time() > args.until:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, state_file.with_suffix(".partial"))
            state_file.with_suffix(".partial").replace(state_file)
            print(f"G{groups}: step {step} of {steps} saved", file=sys.stderr, flush=True)
            return None
        ids = next(stream).to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, rate)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = run(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step + 1 == steps:
            said = f"step {step} of {steps}, loss {loss.item():.3f}, {time.monotonic() - began:.0f} s"
            print(f"G{groups}: {said}", file=sys.stderr, flush=True)
    return model


def floor(args: argparse.Namespace, groups: int, ledger: Ledger) -> None:
    """One row."""
    key = f"scratch/G{groups}/seed0"
    if key in ledger.entries():
        return
    began = time.monotonic()
    model = train(args, groups)
    if model is None:
        return
    steps, rate, size, window = recipe_of(args)
    model = model.to(torch.bfloat16).float().eval()  # as it is stored
    blocks = token_blocks(load_tokenizer(args.model), read_documents([args.valid]), window)
    if args.eval_blocks:
        blocks = blocks[: args.eval_blocks]
    visits = steps * size * window
    row = {
        "key": key,
        "start": "scratch",
        "groups": groups,
        "seed": 0,
        "part": "valid",
        **scores(model, None, blocks),
        "unique_tokens": min(visits, len(token_stream(args))),
        "token_visits": visits,
        "flops": visits * 3 * model_shape(model).forward(window),
        "wall_seconds": round(time.monotonic() - began, 1),
        "model": args.model.name,
        "window": window,
        "blocks": len(blocks),
        "gpu": hardware(str(resolve_device(args.device))).get("gpu", "cpu"),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.save:
        recipe = {
            "steps": steps,
            "tokens": visits,
            "batch": size,
            "T": window,
            "lr": rate,
            "valid_loss": row["loss"],
        }
        save(args, model, groups, recipe)
    if not args.shape:
        ledger.add(row)
    print(json.dumps(row), flush=True)


def save(args: argparse.Namespace, model: Any, groups: int, recipe: dict[str, Any]) -> None:
    """Write a model as it would be published: bfloat16 weights, tokenizer, and the recipe in `train.json`."""
    folder = args.save if args.shape else args.save / f"G{groups}"
    model.set_attn_implementation("sdpa")  # the registered one is nobody else's
    model.to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(args.model).save_pretrained(folder)
    write_json(folder / "train.json", recipe)


def change(word: str) -> tuple[str, Any]:
    """`hidden_size=1024` as a key of the config and its value."""
    name, _, value = word.partition("=")
    return name, json.loads(value)


def parse_args() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        type=Path,
        help="the original: its config, tokenizer and train.json are read",
    )
    add("--train", nargs="+", default=[], help="the text that the original was trained on")
    add("--valid", required=True)
    add(
        "--groups",
        type=int,
        nargs="+",
        default=[8, 4, 2, 1],
        help="as many KV heads as the original: control",
    )
    add("--work", type=Path, default=Path("out/quality-floor"))
    add("--ledger", type=Path, default=Path("out/quality-ledger.jsonl"))
    add("--copy", type=Path, help="the ledger is copied there after each row")
    add("--any-code", action="store_true")
    add("--seconds", type=float, default=3600.0, help="save and stop after this")
    add(
        "--save",
        type=Path,
        help="folder of the trained models, one in it for each G; with `--shape` of the model",
    )
    add(
        "--shape",
        type=change,
        nargs="+",
        default=[],
        help="other sizes than the original's, KEY=VALUE of its config",
    )
    add("--passes", type=float, help="over the text, instead of the original's steps")
    add("--steps", type=int, help="instead of the original's")
    add("--lr", type=float)
    add("--batch", type=int, help="blocks a step, instead of the original's")
    add("--window", type=int)
    add("--eval-blocks", type=int)
    add("--device", default="auto")
    add("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.until, args.shape = args.until or time.time() + args.seconds, dict(args.shape)
    return args


def main() -> None:
    """One process for each G, spread over the GPUs."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(args.ledger, args.work / "claims", copy=args.copy, any_code=args.any_code)
    if len(args.groups) == 1:
        floor(args, args.groups[0], ledger)
        return
    token_stream(args)
    gpus = gpu_names()
    children = []
    for i, groups in enumerate(args.groups):
        words = [*_without_groups(sys.argv[1:]), "--groups", str(groups), "--until", str(args.until)]
        visible = {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}
        children.append(subprocess.Popen([sys.executable, __file__, *words], env=os.environ | visible))
    codes = [child.wait() for child in children]
    sys.exit(1 if any(codes) else 0)


def _without_groups(words: list[str]) -> list[str]:
    """Command-line words less `--groups` and its numbers."""
    kept, skipping = [], False
    for word in words:
        skipping = word == "--groups" or (skipping and word.isdigit())
        if not skipping:
            kept.append(word)
    return kept


if __name__ == "__main__":
    main()

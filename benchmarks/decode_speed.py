"""Decode speed of a Llama of any shape and of its grouped forms, in one run on one device, by the product's bench.

Weights are random and made on the device, tensor by tensor: no checkpoint is needed, and speed does not depend on
what they are. Every finished row is written at once; a run that was cut off goes on where it stopped, and with a row that
ended the process after that row.

    python benchmarks/decode_speed.py --wide --out decode_speed.json   # Llama-2-7B, on the GPU
    python benchmarks/decode_speed.py --tiny --device cpu --out build/decode_speed.json

Where the bytes that a step moves are counted otherwise than when it was timed, `--derive` counts them again in a file and
keeps every time: `python benchmarks/decode_speed.py --wide --derive --out benchmarks/results/decode_speed.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import provenance
from transformers import LlamaConfig, LlamaForCausalLM

import mha2gqa
from mha2gqa.architectures import AttentionSpec, Geometry
from mha2gqa.architectures.wide import wide_changes
from mha2gqa.commands.bench import budget_row, decode_row
from mha2gqa.commands.step_times import copy_bandwidth
from mha2gqa.errors import Mha2gqaError
from mha2gqa.kv_cache import step_weight_bytes

TINY = {
    "layers": 2, "hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": [8, 2, 1], "vocab": 512,
    "points": ["2x64", "3x64"], "budgets": [0.01], "budget_context": 64, "steps": 3, "dtype": "float32",
}  # fmt: skip
WIDE = 2  # R of the wide forms
Form = tuple[int, int]  # G, whose cache the form has, and R


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file of the rows; OUT.log holds the log"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument(
        "--kv-heads", type=int, nargs="+", default=[32, 8, 4], help="the first is the original"
    )
    parser.add_argument(
        "--wide", action="store_true", help=f"wide forms (R = {WIDE}) of the grouped ones too"
    )
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--points", nargs="+", default=["16x4096", "32x4096"], help="BATCHxCONTEXT")
    parser.add_argument("--budgets", type=float, nargs="*", default=[24, 40, 80], help="GB of device memory")
    parser.add_argument("--budget-context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false", default=None)
    parser.add_argument("--deadline", type=float, default=400, help="seconds after which no row is begun")
    parser.add_argument("--tiny", action="store_true", help="a model for a laptop")
    parser.add_argument(
        "--derive", action="store_true", help="count the bytes of OUT's rows again, time nothing"
    )
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    return args


def forms(args: argparse.Namespace) -> list[Form]:
    """The original, its grouped forms, and wide ones of the same caches."""
    original, *grouped = args.kv_heads
    plain = [(original, 1), *((groups, 1) for groups in grouped)]
    return plain + [(groups, WIDE) for groups in grouped if args.wide and groups % WIDE == 0]


def llama(args: argparse.Namespace, kv_heads: int, positions: int, dtype: str) -> dict[str, Any]:
    """The raw config of a Llama of the shape that a command line names."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": args.hidden // args.heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_theta": 10000.0,
    }


def config_of(args: argparse.Namespace, form: Form) -> dict[str, Any]:
    """The raw config of one form."""
    (groups, wide), width = form, args.hidden // args.heads
    positions = max(args.budget_context, *(context for _, context in points(args)))
    raw = llama(args, groups // wide, positions, args.dtype)
    if wide > 1:
        geometry = Geometry(args.heads, args.heads, width, width)
        raw |= {path[-1]: x for path, x in wide_changes(AttentionSpec(), raw, geometry, wide).items()}
    return raw


def points(args: argparse.Namespace) -> list[tuple[int, int]]:
    """`(batch, context)` of every point."""
    return [(int(batch), int(context)) for batch, _, context in (p.partition("x") for p in args.points)]


def random_model(raw: dict[str, Any], device: str) -> LlamaForCausalLM:
    """The model on the device, its tensors made one by one."""
    model, dtype = empty_model(raw), getattr(torch, raw["dtype"])
    torch.manual_seed(0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=dtype, device=device)
                made = made.fill_(1.0) if parameter.dim() == 1 else made.normal_(0, 0.02)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    return model


def empty_model(raw: dict[str, Any]) -> LlamaForCausalLM:
    """The model without numbers."""
    config = LlamaConfig(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")})
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(getattr(torch, raw["dtype"])).eval()


class Rows:
    """Rows on disk: read at the start, written after each."""

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self.path, self.log = path, path.with_name(f"{path.name}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {"setup": setup, "rows": []}
        if path.exists():
            before = json.loads(path.read_text())
            if all(
                before["setup"].get(k) == v
                for k, v in setup.items()
                if k not in ("copy_bandwidth", "command")
            ):
                self.data = before
            else:
                self.say("the file holds rows of another setup, which are replaced")

    def done(self, **key: Any) -> bool:
        """Whether there is a row of that key."""
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.data["rows"])

    def save(self) -> None:
        """Write all, in one step."""
        beside = self.path.with_name(f"{self.path.name}.partial")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        beside.replace(self.path)

    def say(self, text: str) -> None:
        """One line, on the terminal and in the log."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")


def setup_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the rows depend on: shape, device, versions."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    keys = ("layers", "hidden", "intermediate", "heads", "vocab", "dtype", "steps", "compile")
    return {
        **{key: getattr(args, key) for key in keys},
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "versions": {
            "mha2gqa": mha2gqa.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": provenance()["command_line"],
        "copy_bandwidth": copy_bandwidth(device, None if cuda else 0.05),
    }


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every measurement of a form: points, then budgets."""
    found: list[dict[str, Any]] = [
        {"kind": "point", "asked_batch": batch, "context": context} for batch, context in points(args)
    ]
    return found + [
        {"kind": "budget", "memory_bytes": gigabytes * 1e9, "context": args.budget_context}
        for gigabytes in args.budgets
    ]


def measure(
    job: dict[str, Any], model: Any, raw: dict[str, Any], form: Form, args: argparse.Namespace, rows: Rows
) -> bool:
    """Make one row; what does not run is a row with a reason. False where the process may be broken."""
    bandwidth, usable = rows.data["setup"]["copy_bandwidth"], True
    more: dict[str, Any] = {"steps": args.steps, "bandwidth": bandwidth, "compiled": args.compile}
    began = time.perf_counter()
    try:
        if job["kind"] == "point":
            row = decode_row("llama", model, raw, batch=job["asked_batch"], context=job["context"], **more)
        else:
            row = budget_row(model, raw, job["memory_bytes"], context=job["context"], **more)
    except (Mha2gqaError, RuntimeError) as error:  # out of memory is a RuntimeError
        row = {"reason": str(error).splitlines()[0], "tokens_per_second": None}
        usable = isinstance(error, (Mha2gqaError, torch.OutOfMemoryError))
        rows.say(traceback.format_exc())
    gc.collect()
    kv_heads, width = raw["num_key_value_heads"], raw["head_dim"]
    name = f"{kv_heads} KV heads of {width}"
    row |= {**job, "groups": form[0], "wide": form[1], "kv_heads": kv_heads, "head_dim": width}
    rows.data["rows"].append(row | {"seconds": time.perf_counter() - began})
    rows.save()
    result = row.get("reason") or (
        f"batch {row['batch']}: {row['milliseconds_per_step']:.2f} ms, {row['tokens_per_second']:.0f} tokens/s, "
        f"{row['share_of_bandwidth']:.0%} of the copy bandwidth; {row['step']}; {row['attention']}; "
        + "; ".join(row["warnings"])
    )
    rows.say(f"{job} {name}: {result} [{time.perf_counter() - began:.0f} s]")
    return usable


def summary(args: argparse.Namespace, rows: Rows) -> list[dict[str, Any]]:
    """Speed-ups over the original beside the ratio that bytes predict, and wide forms beside plain ones."""
    found = []
    for job in jobs(args):
        mine = {
            (row["groups"], row["wide"]): row
            for row in rows.data["rows"]
            if row.get("tokens_per_second") and all(row.get(k) == v for k, v in job.items())
        }
        original = mine.pop((args.kv_heads[0], 1), None)
        for (groups, wide), row in mine.items() if original else ():
            speed_up = row["tokens_per_second"] / original["tokens_per_second"]
            predicted = row["batch"] / row["step_bytes"] * original["step_bytes"] / original["batch"]
            made = {"groups": groups, "wide": wide, "kv_heads": row["kv_heads"], "head_dim": row["head_dim"]}
            made |= {"speed_up": speed_up, "predicted": predicted, "of_predicted": speed_up / predicted}
            made |= {"original_share_of_bandwidth": original["share_of_bandwidth"]}
            if wide > 1 and (plain := mine.get((groups, 1))):
                seconds = [x["batch"] / x["tokens_per_second"] for x in (row, plain)]
                made |= {"step_over_plain": seconds[0] / seconds[1]}
                made |= {"tokens_over_plain": row["tokens_per_second"] / plain["tokens_per_second"]}
            found.append(job | made)
    return found


def derive(args: argparse.Namespace) -> None:
    """Count the bytes of a file's rows again, and what follows from them."""
    data = json.loads(args.out.read_text())
    bandwidth = data["setup"]["copy_bandwidth"]
    for row in data["rows"]:
        if not row.get("tokens_per_second"):
            continue
        raw = config_of(args, (row["groups"], row["wide"]))
        sizes = {name: p.numel() * p.element_size() for name, p in empty_model(raw).named_parameters()}
        assert sum(sizes.values()) == row["weight_bytes"], "the file is of another shape"
        step, seconds = (
            step_weight_bytes(raw, sizes, row["batch"]) + row["kv_bytes"],
            row["milliseconds_per_step"] / 1e3,
        )
        row |= {"step_bytes": step, "bytes_per_second": step / seconds}
        row |= {
            "share_of_bandwidth": step / seconds / bandwidth,
            "floor_milliseconds": step / bandwidth * 1e3,
        }
    rows = Rows(args.out, data["setup"])
    rows.data = data
    data["summary"] = summary(args, rows)
    rows.save()


def visit(form: Form, left: list[dict[str, Any]], args: argparse.Namespace, rows: Rows, began: float) -> None:
    """Every measurement of one form that is left."""
    raw = config_of(args, form)
    model = random_model(raw, args.device)
    rows.say(f"cache of {form[0]} KV heads, R = {form[1]}: model made, {time.perf_counter() - began:.0f} s")
    for job in left:
        if time.perf_counter() - began > args.deadline:
            rows.say("out of time: run the same command again for the rest")
            return
        if not measure(job, model, raw, form, args, rows):
            raise SystemExit("a row failed: run the same command again for the rest")


def main() -> None:
    args = arguments()
    if args.derive:
        derive(args)
        return
    began = time.perf_counter()
    rows = Rows(args.out, setup_of(args))
    setup = rows.data["setup"]
    rows.say(f"{setup['device']}: a copy moves {setup['copy_bandwidth'] / 1e9:.0f} GB/s")
    for kind in ("point", "budget"):
        for form in forms(args):
            key = {"groups": form[0], "wide": form[1]}
            left = [job for job in jobs(args) if job["kind"] == kind and not rows.done(**key, **job)]
            if left and time.perf_counter() - began < args.deadline:
                visit(form, left, args, rows, began)
                gc.collect()
                rows.data["summary"] = summary(args, rows)
                rows.save()
    for row in rows.data["summary"]:
        where = (
            f"batch {row['asked_batch']}" if row["kind"] == "point" else f"{row['memory_bytes'] / 1e9:g} GB"
        )
        beside = f", x{row['step_over_plain']:.2f} of plain" if "step_over_plain" in row else ""
        rows.say(
            f"{args.kv_heads[0]} -> {row['kv_heads']} KV heads of {row['head_dim']}, {where}, context "
            f"{row['context']}: x{row['speed_up']:.2f}, bytes predict x{row['predicted']:.2f} "
            f"({row['of_predicted']:.0%}){beside}; the original uses {row['original_share_of_bandwidth']:.0%} of the copy"
        )


if __name__ == "__main__":
    main()

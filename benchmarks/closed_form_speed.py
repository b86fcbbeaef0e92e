"""Seconds of the closed-form stages on layers of a 7B model: statistics, grouping, merging, refit.

    python benchmarks/closed_form_speed.py --device cuda --output benchmarks/results/closed_form_speed.json

A Llama of a few full-size layers with random weights is calibrated on random tokens; every stage costs the
same in every layer, so seconds per layer times 32 are those of the whole model (the embedding and the head
are measured with the layers and counted once for each of them: the figure errs on the slow side). Random heads are
the worst case of the search: nothing is alike, swaps go on for long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, provenance, write_json

from mha2gqa.architectures import AttentionSpec
from mha2gqa.calibration import collect
from mha2gqa.conversion.calibration_options import CalibrationOptions
from mha2gqa.conversion.in_memory import assemble, plan_model
from mha2gqa.conversion.rewrite import ModuleConverter
from mha2gqa.conversion.search import grouped
from mha2gqa.reconstruct import ReconstructConfig, reconstruct


def build(args: argparse.Namespace) -> Any:
    """A random Llama in bf16 (float32 on a CPU)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 43 // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=max(4096, args.window),
        tie_word_embeddings=False,
    )
    with torch.device(args.device):
        model = LlamaForCausalLM(config)
    return model.to(torch.float32 if args.device == "cpu" else torch.bfloat16).eval()


class Clock:
    """Seconds and peak GPU memory of each stage."""

    def __init__(self, device: str) -> None:
        self.device, self.stages = device, dict[str, dict[str, float]]()

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one stage."""
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        out = work()
        if cuda:
            torch.cuda.synchronize()
        self.stages[name] = {"seconds": time.monotonic() - began}
        if cuda:
            self.stages[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name}: {self.stages[name]}", flush=True)
        return out


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All stages once."""
    clock, spec = Clock(args.device), AttentionSpec()
    model = build(args)
    ids = torch.randint(args.vocab, (args.tokens // args.window, args.window), device=args.device)
    collect(model, spec, ids[:1])  # warm-up
    statistics = clock("statistics", lambda: collect(model, spec, ids))
    plan = plan_model(model, args.groups, "joint", None, 0)
    state = model.state_dict()
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    options = CalibrationOptions(device=args.device)
    plan, facts = clock("grouping", lambda: grouped(plan, state.__getitem__, statistics, options))
    converters = [ModuleConverter(plan, s, shapes, state.__getitem__, statistics) for s in plan.modules]
    student = clock("merge", lambda: assemble(model, plan, converters, state))
    config = ReconstructConfig(regress=False, batch_size=args.batch)
    fits = clock("refit", lambda: reconstruct(model, student, spec, ids, config))
    gains = [{"residual": r.report["residual"], **facts.get(r.module.path, {})} for r in converters]
    return {"stages": clock.stages, "layers": gains, "errors": [vars(fit) for fit in fits]}


def main() -> None:
    """Measure, extrapolate, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--hidden", type=int, default=4096)
    add("--heads", type=int, default=32)
    add("--layers", type=int, default=2, help="full-size layers that are really built")
    add("--of", type=int, default=32, help="layers of the model that is meant")
    add("--groups", type=int, default=8)
    add("--tokens", type=int, default=262_144)
    add("--window", type=int, default=2048)
    add("--batch", type=int, default=4, help="blocks per pass of the refit")
    add("--vocab", type=int, default=32_000)
    add("--output", type=Path, default=RESULTS / "closed_form_speed.json")
    args = parser.parse_args()
    found = measure(args)
    per_layer = {name: stage["seconds"] / args.layers for name, stage in found["stages"].items()}
    total = sum(per_layer.values()) * args.of
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    record = {
        "command": "benchmarks/closed_form_speed.py",
        **provenance(args.device, seed=0),
        "settings": settings,
        **found,
        "seconds_per_layer": per_layer,
        "extrapolated_seconds": {name: x * args.of for name, x in per_layer.items()} | {"all": total},
        "extrapolated_to_layers": args.of,
    }
    write_json(args.output, record)
    print(f"{args.of} layers: {total:.0f} s ({total / 60:.1f} min)")


if __name__ == "__main__":
    main()

"""One process of several that search groupings: search_worker.py; prints what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from pico_models import model_class, pico_config

from mha2gqa import distributed
from mha2gqa.conversion import CalibrationOptions, workers
from mha2gqa.conversion.in_memory import plan_model
from mha2gqa.conversion.search import grouped
from mha2gqa.reconstruct.ranks import Ranks

HEADS = 12
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 5},
    "t5": {"num_heads": HEADS, "num_decoder_layers": 3},  # its layers keep one order of heads
}


def found(threads: int, count: int | None, name: str, method: str) -> Any:
    """Which heads share and what neighbours would lose, in the first `count` modules."""
    workers._threads = lambda own, ranks: threads  # type: ignore[assignment]
    torch.manual_seed(0)
    model = model_class(name)(pico_config(name, hidden_size=96, d_model=96, **SHAPES[name])).eval()
    plan = plan_model(model, 4, method, None, 0)
    options = CalibrationOptions(grouping="search", device="cpu")
    chosen = None if count is None else plan.modules[:count]
    plan, fields = grouped(plan, model.state_dict().__getitem__, None, options, chosen, Ranks.here())
    return {m.path: m.grouping for m in plan.modules}, fields


def everything() -> list[Any]:
    """A search whose costs are shared, searches that are, several that keep one order, and the baseline's."""
    return [
        found(3, 1, "llama", "joint"),
        found(2, None, "llama", "joint"),
        found(1, None, "llama", "joint"),
        found(4, None, "t5", "joint"),
        found(1, 1, "llama", "align"),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.initialize()
    print(json.dumps(everything()))
    distributed.destroy()

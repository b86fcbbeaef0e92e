"""What `plan` says of uptraining: memory of each parameter set, and what one and two cards make of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..progress import duration
from .content import Column, Table
from .numbers import box_size, human_bytes, human_count

Data = Mapping[str, Any]


def memory_table(memory: Data) -> Table:
    """Weights, gradients, optimiser and teacher of each parameter set, and on how many cards they fit."""
    columns: list[Column] = [("--train", "<"), ("trained", ">"), ("memory", ">"), ("no teacher", ">")]
    size = box_size(memory["gpu_memory"])
    rows = [
        [
            name,
            human_count(found["trained_parameters"]),
            human_bytes(found["bytes"]),
            human_bytes(found["without_teacher"]),
            f"{found['gpus'] or 'more than ' + str(found['most_gpus'])} x {size}",
        ]
        for name, found in memory["sets"].items()
    ]
    return Table([*columns, ("fits", "<")], rows)


def price_table(memory: Data) -> Table:
    """Memory with activations, speed and time of each way to train that fits."""
    columns: list[Column] = [("--train", "<"), ("with", "<"), ("cards", ">"), ("blocks a pass", ">")]
    columns += [("memory of each", ">"), ("host", ">")]
    columns += [("tokens/s", ">"), (f"{human_count(memory['tokens'])} tokens", ">")]
    rows = [
        [
            name,
            _differs(price),
            str(price["gpus"]),
            str(price["blocks"]),
            human_bytes(price["device_bytes"]),
            human_bytes(price["host_bytes"]),
            human_count(price["tokens_per_second"]),
            duration(price["hours"] * 3600),
        ]
        for name, found in memory["sets"].items()
        for price in found["prices"]
        if price["blocks"]
    ]
    return Table(columns, rows)


def _differs(price: Data) -> str:
    """What a way to train sets beside the defaults."""
    parts = [] if price["optim"] == "adamw_torch_fused" else [price["optim"]]
    parts += [] if price["teacher_dtype"] == "bfloat16" else [f"teacher {price['teacher_dtype']}"]
    return ", ".join([*parts, *(["offload"] if price["offload"] else [])])


def training_sentences(memory: Data) -> list[str]:
    """What the prices stand on."""
    return [
        f"Uptraining on cards like an H100, blocks of {memory['window']:,} tokens, as many a pass as fit "
        f"{box_size(memory['gpu_memory'])} (`--set per_device_train_batch_size=N`). With adamw_torch_8bit: `--set optim=…` "
        "(needs torchao); teacher int8: `--teacher-dtype int8`; offload: weights, gradients and AdamW on the host, under "
        "torchrun `--set fsdp=true --set fsdp_config='{\"cpu_offload\": true}'`.",
        "Measured: all at 1B on one to four cards; at 7B on one, attention (with 8-bit AdamW and under offload too) and lora "
        "(with the int8 teacher too). The rest, qlora and several cards at 7B among it, is estimated; where both are known they "
        "are at most a factor of 1.5 apart.",
    ]

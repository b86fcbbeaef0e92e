"""What `plan` found, as lines and tables."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.reconstruct import EFFORTS
from ..progress import duration
from .cache import cache_sentences
from .content import Column, Table, becomes
from .lines import BLANK, Block, Data, Line, change, next_lines, warning_lines
from .numbers import box_size, human_bytes, human_count, significant
from .training import memory_table, price_table, training_sentences


def plan_view(data: Data) -> Iterable[Block]:
    """The form of a `PlanResult`, from its `to_dict()`."""
    kv, decode = data["num_kv_heads"], data["decode"]
    yield Line(f"{data['source']}: {_result_type(data)}")
    yield Line(
        f"{data['layers']} attention layers to change, "
        f"{data['num_heads']} query heads of {data['head_dim']}, {kv['before']} KV heads -> {kv['after']} "
        f"(groups of {kv['before'] // kv['after']})"
    )
    yield BLANK
    yield _options_table(data)
    yield BLANK
    yield Line(
        f"Decoding at batch {decode['batch']}, context {decode['context']:,}: a step moves "
        f"{change(decode['step_bytes'])}; at {box_size(decode['bandwidth'])}/s at most "
        f"{change(decode['tokens_per_second_ceiling'], human_count)} tokens/s."
    )
    yield from _wide_heads(data)
    parts = data.get("sequence") or {}
    yield from (Line(f"{line}.") for line in cache_sentences([(when, parts[when]) for when in parts]))
    yield Line(
        f"Sequences that fit {box_size(decode['gpu_memory'])} beside the weights, a tenth kept free: "
        f"{change(decode['max_batch'], str)}."
    )
    yield Line(
        f"Converting writes {human_bytes(data['conversion']['disk_bytes'])}, needs about "
        f"{human_bytes(data['conversion']['memory_bytes'])} of memory and, at 500 MB/s of disk, about "
        f"{significant(data['conversion']['seconds'], 2)} s without text."
    )
    yield from _calibration_lines(data.get("calibration") or {})
    yield from _recall(data)
    yield from _shorter_fits(data)
    if data["memory"]["sets"]:
        yield BLANK
        yield Line(
            "Uptraining: weights, gradients, AdamW state and a bf16 teacher (activations come on top):"
        )
        yield memory_table(data["memory"])
        yield BLANK
        yield from _training_prices(data["memory"])
    if not data["exact"]:
        yield from (BLANK, Line("No weights were found: sizes come from the config."))
    yield from warning_lines(data)
    yield from next_lines(data["recommended"])


def _training_prices(memory: Data) -> Iterable[Block]:
    """Speed and time of uptraining, or why there is no estimate."""
    if reason := memory.get("unpriced"):
        yield Line(reason)
        return
    head, *rest = training_sentences(memory)
    yield Line(head)
    yield price_table(memory)
    yield from map(Line, rest)


def _calibration_lines(price: Data) -> Iterable[Block]:
    """What calibration costs: time, memory of the device, of the host, and of the work folder."""
    if not price:
        return
    fits, closed = price["regression"], price["closed_form"]
    on = f" on {price['gpus']} devices" if price["gpus"] > 1 else ""
    text = f"{human_count(price['tokens'])} tokens"
    if recordings := price.get("recordings"):
        text = f"at most {recordings:,} recordings ({human_count(price['tokens'])} encoder positions)"
    whole = ", all parameters of a layer trained" if price.get("trained") == "layer" else ""
    kept = human_bytes(price["disk_bytes"])
    resumed = f", {kept} of disk to go on after an interruption" if price["disk_bytes"] else ""
    yield Line(
        f"Calibrating on {text}{on}, layer by layer{whole}: up to {duration(fits['seconds'])} on "
        f"a card like an H100, {duration(closed['seconds'])} with --no-reconstruct. In use at the peak: "
        f"{human_bytes(fits['device_bytes'])} of GPU memory ({human_bytes(fits['device_bytes_cached'])} with what PyTorch "
        f"caches), {human_bytes(price['host_bytes'])} of host memory or disk{resumed}."
    )
    if last := price.get("distillation"):
        yield Line(
            f"Then {last['steps']:,} steps of all layers together, an estimate: {duration(last['seconds'])} more, "
            f"{human_bytes(last['device_bytes'])} of GPU memory for both models and the optimiser, and activations. "
            "Interrupted, such a run begins afresh."
        )


def _recall(data: Data) -> Iterable[Block]:
    """What a smaller cache of a model of text costs beyond its loss, as `benchmarks/quality_probes.py` found."""
    cache, is_text = data["kv_bytes_per_token"], data["memory"]["sets"] and not data.get("sequence")
    if cache["after"] < cache["before"] and is_text:
        yield Line(
            "Quality: fewer KV heads cost a small reference model more of its recall of earlier text than its loss showed. "
            "Test what you need of it before you ship."
        )


def _shorter_fits(data: Data) -> Iterable[Block]:
    """When fewer steps of fits are the better start, as `benchmarks/quality_ledger.py` found of a model of text."""
    steps = (data.get("calibration") or {}).get("steps", 0)
    if data["memory"]["sets"] and not data.get("sequence") and steps > EFFORTS["quick"]["steps"]:
        yield Line(
            "Effort: for a result that is then distilled on 9M tokens or more, --effort quick is the better start. On a small "
            "reference model it ended lower at every G for the same FLOPs, those that it saves spent on further tokens."
        )


def _wide_heads(data: Data) -> Iterable[Block]:
    """What wide heads cost, and a decode step beside those of plain ones."""
    if not (wide := data.get("wide")):
        return
    groups, weights = data["groups"], wide["weight_bytes"]
    yield Line(
        f"Wide heads: {wide['num_kv_heads']} x {wide['head_dim']} with the cache of GQA-{groups}. Weights "
        f"{human_bytes(weights['wide'])}, of GQA-{groups} {human_bytes(weights['plain'])}; arithmetic of attention "
        f"{wide['wide']} times. A decode step moves, against GQA-{groups}"
        + (f" and GQA-{2 * groups}:" if "double" in weights else ":")
    )
    columns: list[Column] = [("batch", ">"), ("context", ">"), ("bytes", ">"), (f"to GQA-{groups}", ">")]
    columns += [(f"to GQA-{2 * groups}", ">")] if "double" in weights else []
    others = ["plain", *(["double"] if "double" in weights else [])]
    rows = [
        [
            str(step["batch"]),
            f"{step['context']:,}",
            human_bytes(step["wide_bytes"]),
            *(f"{step['wide_bytes'] / step[f'{other}_bytes'] - 1:+.0%}" for other in others),
        ]
        for step in wide["steps"]
    ]
    yield Table(columns, rows)
    if (least := wide["pays_above_cached_tokens"]) is not None:
        yield Line(
            f"Beyond {least:,} cached tokens over the batch a step moves less than with GQA-{2 * groups}."
        )
    yield BLANK


def _result_type(data: Data) -> str:
    """What the model becomes, and what loading the result takes."""
    kinds = becomes(data["model_type"], data["result_type"])
    if data["trust_remote_code"]:
        return f"{kinds}: modelling code travels with the result, which loads with trust_remote_code=True"
    same = ", which computes the same" if data["reexpression"] else ""
    return f"{kinds}{same}; the result loads without trust_remote_code"


def _options_table(data: Data) -> Table:
    columns: list[Column] = [("G", ">"), ("heads/group", ">"), ("parameters", ">"), ("checkpoint", ">")]
    columns += [("KV/token", ">"), ("KV cache", ">"), ("sequences", ">"), ("which", "<")]
    marks = {data["num_kv_heads"]["before"]: "now", data["groups"]: "chosen"}
    several = len({o["model_type"] for o in data["options"]}) > 1
    columns += [("as", "<")] if several else []
    rows = [
        [
            str(o["groups"]),
            str(o["group_size"]),
            human_count(o["parameters"]),
            human_bytes(o["bytes"]),
            human_bytes(o["kv_bytes_per_token"]),
            human_bytes(o["kv_bytes"]),
            str(o["max_batch"]),
            marks.get(o["groups"], ""),
            *([o["model_type"]] if several else []),
        ]
        for o in data["options"]
    ]
    return Table(columns, rows)

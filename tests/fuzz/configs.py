"""Configs, manifests, groupings and statistics: JSON that travels with models."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from .mutations import changed_bytes, changed_json
from .trial import Room, Trial
from .weights import by_safetensors, judge, make_model

CONFIG_KEYS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "model_type", "architectures",
    "num_hidden_layers", "rope_parameters", "rope_scaling", "text_config", "per_layer_config", "quantization_config",
    "auto_map", "tie_word_embeddings", "dtype", "torch_dtype", "layer_types", "sliding_window", "vocab_size",
    "is_encoder_decoder", "attention_bias", "max_position_embeddings", "intermediate_size", "hidden_act", "id2label",
    "num_labels", "attn_implementation", "encoder", "decoder", "n_head", "multi_query", "attn_config", "rms_norm_eps",
)  # fmt: skip
MANIFEST_KEYS = (
    "num_kv_heads",
    "reexpression",
    "method",
    "grouping",
    "uptrain",
    "source",
    "layers",
    "dropped",
    "digests",
)


def config(rng: Random, room: Room) -> Trial:
    """A config that `plan` reads, or `convert`."""
    import mha2gqa
    from mha2gqa.architectures.listing import supported_types

    source = room.made("config", make_model)
    good = json.loads(room.kept(source / "config.json"))
    if rng.random() < 0.15:
        good["model_type"] = rng.choice(supported_types())
    data, said = changed_json(rng, good, CONFIG_KEYS)
    (source / "config.json").write_bytes(data)
    said, files = f"{good['model_type']}: {said}", {"config.json": data}
    if rng.random() < 0.85:
        return Trial("config", said, lambda: _planned(mha2gqa.plan(str(source), groups=2)), files)
    return Trial("config, converted", said, lambda: _converted(source, room, data), files)


def _planned(result: Any) -> str:
    return "" if result.num_kv_heads["after"] == 2 else "another number of KV heads than asked for"


def _converted(source: Path, room: Room, data: bytes) -> str:
    import mha2gqa

    out = room.fresh("out")
    mha2gqa.convert(str(source), str(out), 2, method="mean")
    before = json.loads(data.decode("utf-8-sig", "surrogatepass"))
    after = json.loads((out / "config.json").read_text())
    if lost := [key for key in before if key not in after]:
        return f"the config lost {lost[0]!r}"
    if before.get("model_type") == "llama" and after["num_key_value_heads"] != 2:
        return "the config names another number of KV heads"
    usual = before.get("num_attention_heads") == 4 and before.get("head_dim", 4) == 4
    return judge(by_safetensors(source), out, 2, usual and before.get("model_type") == "llama")


def _make_converted(folder: Path) -> None:
    import mha2gqa

    make_model(folder / "source")
    mha2gqa.convert(str(folder / "source"), str(folder / "out"), 2, method="mean")


def manifest(rng: Random, room: Room) -> Trial:
    """A manifest that `verify --against` reads."""
    import mha2gqa

    folder = room.made("manifest", _make_converted)
    place = folder / "out" / "mha2gqa.json"
    good = json.loads(room.kept(place))
    data, said = changed_json(rng, good, MANIFEST_KEYS)
    place.write_bytes(data)

    def run() -> str:
        found = mha2gqa.verify(str(folder / "out"), against=str(folder / "source"))
        failed = [check for check in found.checks if check.ok is False]
        if any(len(check.detail) > 2000 for check in failed):
            return "a detail without end"
        told = _parsed(data)
        if told is None:
            return "" if failed else "a broken manifest passes"
        if failed and all(
            json.dumps(told.get(key)) == json.dumps(good.get(key))
            for key in MANIFEST_KEYS  # 1, 1.0 and true differ
        ):
            return f"nothing that counts is changed, and it fails: {failed[0].name}"
        changed = told.get("method") == "mean" and told.get("grouping") != good["grouping"]
        return "another grouping passes" if changed and not failed and "uptrain" not in told else ""

    return Trial("manifest", said, run, {place.name: data})


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data.decode("utf-8"))  # a mark of byte order is no JSON
        json.dumps(found, ensure_ascii=False).encode()  # no halves of pairs
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not _deeper(found, 100) else None


def _deeper(value: Any, levels: int) -> bool:
    """Whether JSON has more levels than the product reads; whether Python itself does depends on its version."""
    held = [value]
    for _ in range(levels + 1):
        held = [
            x for v in held if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)
        ]
    return bool(held)


def grouping(rng: Random, room: Room) -> Trial:
    """A file that says which heads share."""
    import mha2gqa

    folder = room.made("manifest", _make_converted)
    path, parts = (
        "model.layers.0.self_attn",
        rng.choice(([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 3], [2, 1]])),
    )
    good = rng.choice(({path: parts}, {"0": parts}, {"grouping": {path: parts}}))
    data, said = (
        changed_json(rng, good, ("grouping", "0", path))
        if rng.random() < 0.9
        else (json.dumps(good).encode(), "")
    )
    file = room.fresh("grouping") / "g.json"
    file.parent.mkdir()
    file.write_bytes(data)

    def run() -> str:
        out = room.fresh("out")
        result = mha2gqa.convert(str(folder / "source"), str(out), 2, grouping=str(file))
        members = sorted(head for group in result.layers[0]["grouping"] for head in group)
        return "" if members == [0, 1, 2, 3] else "heads are lost"

    return Trial("grouping", said, run, {file.name: data})


def statistics(rng: Random, room: Room) -> Trial:
    """Second moments: a safetensors file of ours."""
    import mha2gqa

    folder = room.made("statistics", _make_statistics)
    good = room.kept(folder / "moments.safetensors")
    data, said = changed_bytes(rng, good)
    (folder / "moments.safetensors").write_bytes(data)

    def run() -> str:
        out = room.fresh("out")
        mha2gqa.convert(
            str(folder / "source"),
            str(out),
            2,
            method="joint",
            statistics=str(folder / "moments.safetensors"),
        )
        found = by_safetensors(out)
        finite = not isinstance(found, str) and all(x.isfinite().all() for x in found.values())
        return "" if finite else "the result is not finite"

    return Trial("statistics", said, run, {"moments.safetensors": data})


def _make_statistics(folder: Path) -> None:
    from conftest import word_tokenizer
    from training import write_text

    import mha2gqa

    make_model(folder / "source", vocabulary=64)
    word_tokenizer(folder / "source")
    text = folder / "text.jsonl"
    write_text(text, documents=30)
    options: dict[str, Any] = {"calibration_tokens": 256, "calibration_window": 16, "device": "cpu"}
    mha2gqa.convert(
        str(folder / "source"),
        str(folder / "out"),
        2,
        method="joint",
        calibration=str(text),
        statistics=str(folder / "moments.safetensors"),
        refit=False,
        reconstruct=False,
        **options,
    )

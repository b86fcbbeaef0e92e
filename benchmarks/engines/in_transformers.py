"""Results in transformers, the installed one or an older one put first on the path: every way of decoding.

    python in_transformers.py [--older FOLDER] RESULTS NAME...

The installed version writes the references: greedy tokens and logits of its default path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.argv[1] == "--older":
    sys.path.insert(0, str(Path(sys.argv[2]).resolve()))
    del sys.argv[1:3]
    OLDER = True
else:
    OLDER = False

import numpy as np
import torch
import transformers
from common import TOKENS, failed, record, texts, verdict, work
from transformers import AutoConfig, AutoTokenizer

ENGINE = f"transformers {transformers.__version__}"


def load(name: str, attention: str = "sdpa") -> Any:
    """The model in float32; a class without SDPA in this version comes with eager attention."""
    path = work() / "models" / name
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    elif config.model_type == "llava":
        auto = transformers.AutoModelForImageTextToText
    else:
        auto = transformers.AutoModelForCausalLM
    dtype = {"torch_dtype" if OLDER else "dtype": torch.float32}
    options = {"trust_remote_code": True, **dtype}
    try:
        model = auto.from_pretrained(path, attn_implementation=attention, **options)
    except ValueError:
        if not OLDER:
            raise
        model = auto.from_pretrained(path, attn_implementation="eager", **options)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt_ids(name: str, encoder_decoder: bool) -> list[list[int]]:
    """Ids of the three prompts; an encoder-decoder fills in two gaps."""
    tokenizer = AutoTokenizer.from_pretrained(work() / "models" / name, trust_remote_code=True)
    prompts = texts(work() / "prompts.jsonl")
    if not encoder_decoder:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    found = []
    for text in prompts:
        words = text.split(" ")
        a, b = len(words) // 3, 2 * len(words) // 3
        gaps = [*words[:a], "<extra_id_0>", *words[a + 2 : b], "<extra_id_1>", *words[b + 2 :]]
        found.append(tokenizer(" ".join(gaps))["input_ids"])
    return found


@torch.no_grad()
def greedy(model: Any, rows: list[list[int]], **options: Any) -> tuple[Any, Any]:
    """Greedy tokens and logits of a left-padded batch."""
    length, pad = max(map(len, rows)), model.config.get_text_config(decoder=True).pad_token_id or 0
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    options = {
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": pad,
        "eos_token_id": None,
        **options,
    }
    out = model.generate(
        input_ids=ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options
    )
    start = 1 if model.config.is_encoder_decoder else length
    return out.sequences[:, start:], out.logits


def reference(name: str) -> None:
    """Write what all are held against."""
    model = load(name)
    arrays: dict[str, Any] = {}
    for i, ids in enumerate(prompt_ids(name, model.config.is_encoder_decoder)):
        tokens, logits = greedy(model, [ids])
        arrays[f"ids{i}"], arrays[f"tokens{i}"] = np.array(ids), tokens[0].numpy()
        arrays[f"logits{i}"] = torch.stack([step[0] for step in logits]).float().numpy()
    (work() / "references").mkdir(exist_ok=True)
    np.savez(work() / "references" / f"{name}.npz", **arrays)


def rows_of(name: str) -> list[list[int]]:
    data = np.load(work() / "references" / f"{name}.npz")
    return [data[f"ids{i}"].tolist() for i in range(len(data.files) // 3)]


def single(model: Any, rows: list[list[int]], **options: Any) -> tuple[list[Any], list[Any]]:
    """Each prompt by itself: tokens, and logits of the first step."""
    found = [greedy(model, [row], **options) for row in rows]
    return [tokens[0].tolist() for tokens, _ in found], [logits[0][0].float().numpy() for _, logits in found]


def batch(model: Any, rows: list[list[int]], **options: Any) -> tuple[list[Any], list[Any]]:
    """All prompts in one left-padded batch."""
    tokens, logits = greedy(model, rows, **options)
    return tokens.tolist(), [logits[0][i].float().numpy() for i in range(len(rows))]


def beams(name: str, model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """Beam search with a cache must find what it finds without."""
    options = {"num_beams": 4, "max_new_tokens": 16}
    with_cache, without = (
        [greedy(model, [row], use_cache=cache, **options)[0][0].tolist() for row in rows[:2]]
        for cache in (True, False)
    )
    return {"verdict": "equal" if with_cache == without else "differs"}


def assisted(name: str, model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """Decoding with the original as target and the result as draft: the target's own tokens."""
    original = load(f"{name}.original")
    plain = [
        original.generate(torch.tensor([row]), max_new_tokens=24, do_sample=False)[0].tolist() for row in rows
    ]
    drafted = [
        original.generate(torch.tensor([row]), max_new_tokens=24, do_sample=False, assistant_model=model)[
            0
        ].tolist()
        for row in rows
    ]
    return {"verdict": "equal" if plain == drafted else "differs"}


def cache_heads(name: str, model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """KV heads that the cache holds, layer by layer."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([rows[0]]), use_cache=True)
    cache = getattr(out, "past_key_values", None)
    heads = sorted({layer.keys.shape[1] for layer in cache.layers})
    config = model.config.get_text_config()
    right = getattr(config, "num_key_value_heads", None) or (
        1 if getattr(config, "multi_query", False) else None
    )
    return {"verdict": "equal" if heads == [right] else "differs", "kv_heads": heads}


def control_original(name: str, rows: list[list[int]]) -> dict[str, Any]:
    """Negative control: the original is another function, and the comparison must see it."""
    row = verdict(name, *single(load(f"{name}.original"), rows))
    return {**row, "verdict": "seen" if row["verdict"] == "differs" else "not seen"}


def control_permutation(name: str, rows: list[list[int]]) -> dict[str, Any]:
    """Negative control: key rows interleaved for RoPE with twice the head count, as a careless converter does."""
    model = load(name)
    with torch.no_grad():
        for layer in model.model.layers:
            weight, heads = layer.self_attn.k_proj.weight, model.config.num_key_value_heads
            turned = weight.view(2 * heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            right = turned.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            weight.copy_(right)
    row = verdict(name, *single(model, rows))
    return {**row, "verdict": "seen" if row["verdict"] == "differs" else "not seen"}


def variants(name: str, results: str) -> None:
    """Every way of decoding of one result."""
    rows = rows_of(name)
    try:
        model = load(name)
    except Exception as error:
        record(results, ENGINE, name, {"way": "load", **failed(error)})
        return
    ways: dict[str, Any] = {
        "sdpa": lambda: verdict(name, *single(model, rows)),
        "left-padded batch": lambda: verdict(name, *batch(model, rows)),
        "beams": lambda: beams(name, model, rows),
    }
    if not OLDER:
        ways["no cache"] = lambda: verdict(name, *single(model, rows, use_cache=False))
        ways["static cache"] = lambda: verdict(
            name, *single(model, rows, cache_implementation="static", disable_compile=True)
        )
        ways["left-padded batch, static cache"] = lambda: verdict(
            name, *batch(model, rows, cache_implementation="static", disable_compile=True)
        )
        ways["eager"] = lambda: verdict(name, *single(load(name, "eager"), rows))
        if not model.config.is_encoder_decoder:
            ways["cache holds the shared heads"] = lambda: cache_heads(name, model, rows)
    if (work() / "models" / f"{name}.original").exists() and not OLDER:
        ways["assisted"] = lambda: assisted(name, model, rows)
        ways["control: original"] = lambda: control_original(name, rows)
        ways["control: wrong permutation"] = lambda: control_permutation(name, rows)
    for way, run in ways.items():
        try:
            row = run()
        except Exception as error:
            row = failed(error)
        record(results, ENGINE, name, {"way": way, **row})


def main() -> None:
    results, *names = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in names:
        if not (work() / "references" / f"{name}.npz").exists() and not OLDER:
            reference(name)
        variants(name, results)


main()

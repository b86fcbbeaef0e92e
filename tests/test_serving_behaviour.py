"""Results behave like any stock model: padding, packing, windows, beams, drafts, quantised caches and shared prefixes.

The oracle is the same function with every shared head written out, or the same text read another way.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pico_models import model_class, pico_config
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

from mha2gqa.conversion.checkpoint import convert

WINDOW = 6
KINDS = {"llama": {}, "qwen2": {}, "mistral": {"sliding_window": WINDOW}}
GROUPS = 2


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The original, its result, and the result with its heads written out."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model_class(request.param)(pico_config(request.param, **KINDS[request.param])).save_pretrained(
        folder / "mha"
    )
    convert(folder / "mha", folder / "gqa", GROUPS)
    found = {name: AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("mha", "gqa")}
    wide = copy.deepcopy(found["mha"])
    wide.load_state_dict(written_out(folder / "gqa", found["gqa"]))
    return found | {"written out": wide.eval(), "kind": request.param}


def written_out(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """Tensors of a result as multi-head attention: each shared head once for every query head."""
    config = json.loads((folder / "config.json").read_text())
    copies = config["num_attention_heads"] // GROUPS
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.unflatten(0, (GROUPS, -1))
            tensors[name] = heads.repeat_interleave(copies, 0).flatten(0, 1)
    return tensors


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 90, shape, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@torch.inference_mode()
def test_a_result_is_the_function_of_its_heads_written_out(models: dict[str, Any]) -> None:
    close(models["gqa"](ids(2, 20)).logits, models["written out"](ids(2, 20)).logits)
    assert not torch.allclose(models["gqa"](ids(2, 20)).logits, models["mha"](ids(2, 20)).logits, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_padding_on_either_side_changes_nothing(side: str, models: dict[str, Any]) -> None:
    long, short = ids(1, 12), ids(1, 7, seed=1)
    padding = torch.zeros(1, 5, dtype=torch.long)
    parts = [padding, short] if side == "left" else [short, padding]
    mask = torch.cat([torch.ones(1, 12), torch.cat([(p > 0).float() for p in parts], 1)]).long()
    position = (mask.cumsum(1) - 1).clamp(min=0)
    rows = torch.cat([long, torch.cat(parts, 1)])
    logits = models["gqa"](rows, attention_mask=mask, position_ids=position).logits
    close(logits[:1], models["gqa"](long).logits)
    close(logits[1][mask[1].bool()], models["gqa"](short).logits[0])


@torch.inference_mode()
def test_packed_sequences_do_not_see_each_other(models: dict[str, Any]) -> None:
    first, second = ids(1, 9), ids(1, 14, seed=1)
    position = torch.cat([torch.arange(9), torch.arange(14)])[None]
    packed = models["gqa"](torch.cat([first, second], 1), position_ids=position, use_cache=False).logits
    close(packed[:, :9], models["gqa"](first).logits)
    close(packed[:, 9:], models["gqa"](second).logits)


@torch.inference_mode()
def test_cached_steps_and_a_shared_prefix_compute_what_a_full_pass_does(models: dict[str, Any]) -> None:
    """Also past a sliding window; the cache of a prefix serves two continuations."""
    model, prefix = models["gqa"], ids(1, 3 * WINDOW)
    cache = DynamicCache(config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older name of the argument
        model(prefix, past_key_values=cache)
        for seed in (1, 2):
            own, more = copy.deepcopy(cache), ids(1, 8, seed=seed)
            steps = [model(more[:, i : i + 1], past_key_values=own).logits for i in range(8)]
            close(torch.cat(steps, 1), model(torch.cat([prefix, more], 1)).logits[:, -8:])


def test_beams_and_greedy_tokens_are_those_of_the_heads_written_out(models: dict[str, Any]) -> None:
    for options in ({}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}):
        tokens = generate(models["gqa"], ids(2, 10), **options)
        assert torch.equal(tokens, generate(models["written out"], ids(2, 10), **options))


def test_as_a_draft_a_result_gives_the_tokens_of_the_original(models: dict[str, Any]) -> None:
    prompt = ids(1, 10)
    drafted = generate(models["mha"], prompt, assistant_model=models["gqa"])
    assert torch.equal(drafted, generate(models["mha"], prompt))


@torch.inference_mode()
def test_a_quantised_cache_holds_the_shared_heads_and_gives_the_same(models: dict[str, Any]) -> None:
    """The same scale on the same values: equal to quantising every copy."""
    if models["kind"] == "mistral":
        pytest.skip("transformers quantises caches of full attention only")
    found = {}
    for name in ("gqa", "written out"):
        cache = QuantizedCache("fp8", models[name].config)
        found[name] = generate(models[name], ids(1, 10), past_key_values=cache)
        assert cache.layers[0]._quantized_keys[0].shape[1] == (GROUPS if name == "gqa" else 8)
    assert torch.equal(found["gqa"], found["written out"])

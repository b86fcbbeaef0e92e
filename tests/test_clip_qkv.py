"""`clip_qkv` (OLMo, OLMoE, DBRX, MPT): where it never acts the symmetries hold, where it does heads keep the plain mean."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import word_tokenizer
from pico_models import model_class, pico_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_calibrated_fits import write_text
from walk_worker import OPTIONS, stop_after

from mha2gqa import convert_model
from mha2gqa.architectures import find_spec
from mha2gqa.calibration import collect, load_statistics
from mha2gqa.checkpoints.loading import load_model, load_tokenizer
from mha2gqa.commands.estimate import plan
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.errors import UsageError
from mha2gqa.merging import MERGERS
from mha2gqa.report.terminal import render

MERGE = {"calibration_window": 16, "refit": False, "reconstruct": False, "device": "cpu"}
LAYERS, HUGE = 3, 1e4


def olmo(bound: float | None, quiet: dict[int, str] | None = None) -> Any:
    """An OLMo with `clip_qkv`; `quiet` names projections of a layer that are a hundredth of the others'."""
    from transformers import OlmoConfig, OlmoForCausalLM

    torch.manual_seed(0)
    config = OlmoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=64, initializer_range=0.3, clip_qkv=bound,
    )  # fmt: skip
    model = OlmoForCausalLM(config).eval()
    with torch.no_grad():
        for layer, parts in (quiet or {}).items():
            for part in parts:
                getattr(model.model.layers[layer].self_attn, f"{part}_proj").weight.mul_(0.01)
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return word_tokenizer(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("text") / "text.jsonl"))


def blocks(source: Path, text: str) -> torch.Tensor:
    return token_blocks(load_tokenizer(source), read_documents([text]), 16)


def same_attention(one: Path, other: Path, layer: int, parts: str) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in parts]
    return all(torch.equal(a[name], b[name]) for name in names)


def test_a_bound_that_never_acts_changes_nothing(text: str, tmp_path: Path) -> None:
    """Tensor for tensor what the same model gives without a bound; the result says why."""
    made = {}
    for name, bound in (("bounded", HUGE), ("free", None)):
        source = save(olmo(bound), tmp_path / name)
        made[name] = convert(source, tmp_path / f"{name}-out", 2, calibration=[text], **OPTIONS)
    for layer in range(LAYERS):
        assert same_attention(tmp_path / "bounded-out", tmp_path / "free-out", layer, "qkvo")
    bounded, free = made["bounded"], made["free"]
    assert bounded.calibration["losses"] == free.calibration["losses"]
    assert [row["clipped"] for row in bounded.layers] == [{"q": 0.0, "k": 0.0, "v": 0.0}] * LAYERS
    assert not any("clipped" in row for row in free.layers)
    said = f"clip_qkv 10000 never acts on the calibration text: full symmetries in all {LAYERS} layers"
    assert said in bounded.warnings and said in render(bounded.to_dict())
    assert not any("plain mean" in warning for warning in bounded.warnings)
    manifest = json.loads((tmp_path / "bounded-out" / "mha2gqa.json").read_text())
    assert manifest["layers"] == bounded.layers


def test_symmetric_copies_stay_lossless_under_a_bound_that_never_acts(text: str, tmp_path: Path) -> None:
    """Rotated keys and mixed values that only the full symmetries bring together."""
    model = olmo(HUGE)
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            for part in "kv":
                weight = getattr(attention, f"{part}_proj").weight.view(2, 4, 4, 32)
                weight.copy_(weight[:, :1].expand_as(weight).clone())
            attention.v_proj.weight.view(8, 4, 32)[1::2] *= -2
            attention.o_proj.weight.view(32, 8, 4)[:, 1::2] /= -2
            attention.k_proj.weight.view(8, 4, 32)[1::2] *= -0.5
            attention.q_proj.weight.view(8, 4, 32)[1::2] /= -0.5
    source = save(model, tmp_path / "in")
    ids = blocks(source, text)
    small = convert_model(model, 2, calibration=ids, refit=False, reconstruct=False)
    tight = olmo(1e-3)
    tight.load_state_dict(model.state_dict())
    lossy = convert_model(tight, 2, calibration=ids, refit=False, reconstruct=False)
    with torch.no_grad():
        want, found, mean, cut = (m(input_ids=ids[:4, :-1]).logits for m in (model, small, lossy, tight))
    assert float((found - want).abs().max()) < 1e-4 * float(want.abs().max())
    assert float((mean - cut).abs().max()) > 1e-2 * float(cut.abs().max())


def test_where_it_acts_heads_keep_the_plain_mean_and_the_share_is_said(text: str, tmp_path: Path) -> None:
    """Layer 0 keeps within the bound, layer 1 exceeds it with values alone, layer 2 with everything."""
    quiet = {0: "qkv", 1: "qk"}
    source = save(olmo(2.0, quiet), tmp_path / "in")
    result = convert(source, tmp_path / "out", 2, calibration=[text], grouping="neighbours", **MERGE)
    first, second, third = (row["clipped"] for row in result.layers)
    assert first == {"q": 0.0, "k": 0.0, "v": 0.0}
    assert second["q"] == second["k"] == 0.0 and 0 < second["v"] < 1
    assert all(0 < share < 1 for share in third.values())
    notes = [row["notes"] for row in result.layers]
    assert notes == [
        [], ["values: symmetry none"], ["keys: no symmetry, plain mean", "values: symmetry none"],
    ]  # fmt: skip
    convert(source, tmp_path / "mean", 2, method="mean")
    assert same_attention(tmp_path / "out", tmp_path / "mean", 2, "kv")
    assert same_attention(tmp_path / "out", tmp_path / "mean", 1, "v")
    assert not same_attention(tmp_path / "out", tmp_path / "mean", 1, "k")
    assert not same_attention(tmp_path / "out", tmp_path / "mean", 0, "k")
    (said,) = (warning for warning in result.warnings if warning.startswith("clip_qkv 2 acts"))
    assert "in 2 of 3 layers" in said and "keys of 1 and values of 2 keep the plain mean" in said
    assert f"v {max(second['v'], third['v']):.2g}" in said and said in render(result.to_dict())


def test_without_text_nothing_is_known_and_the_mean_stays(text: str, tmp_path: Path) -> None:
    source = save(olmo(HUGE), tmp_path / "in")
    result = convert(source, tmp_path / "out", 2, grouping="neighbours")
    assert any("how often it changes q, k and v was not counted" in w for w in result.warnings)
    assert [row["clipped"] for row in result.layers] == [{"q": None, "k": None, "v": None}] * LAYERS
    convert(source, tmp_path / "mean", 2, method="mean")
    assert same_attention(tmp_path / "out", tmp_path / "mean", 1, "kv")


def test_in_memory_and_from_disk_are_the_same(text: str, tmp_path: Path) -> None:
    source = save(olmo(2.0, {0: "qkv"}), tmp_path / "in")
    convert(source, tmp_path / "out", 2, calibration=[text], **MERGE)
    small = convert_model(
        load_model(source, device="cpu"), 2, calibration=blocks(source, text), refit=False, reconstruct=False
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    live = small.state_dict()
    assert all(torch.equal(x, live[name]) for name, x in stored.items())


def test_a_conversion_that_was_stopped_goes_on_with_its_counts(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(olmo(2.0, {0: "qkv", 2: "qkv"}), tmp_path / "in")
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    resumed = convert(source, tmp_path / "out", 2, calibration=[text], **OPTIONS)
    whole = convert(source, tmp_path / "whole", 2, calibration=[text], **OPTIONS)
    assert resumed.layers == whole.layers and resumed.warnings == whole.warnings
    assert any("in 1 of 3 layers" in warning for warning in resumed.warnings)
    for layer in range(LAYERS):
        assert same_attention(tmp_path / "out", tmp_path / "whole", layer, "qkvo")


def test_saved_statistics_carry_the_counts_and_older_ones_are_no_proof(text: str, tmp_path: Path) -> None:
    source, file = save(olmo(2.0, {0: "qkv"}), tmp_path / "in"), tmp_path / "moments.safetensors"
    first = convert(source, tmp_path / "a", 2, calibration=[text], statistics=str(file), **MERGE)
    again = convert(source, tmp_path / "b", 2, statistics=str(file))
    assert [row["clipped"] for row in again.layers] == [row["clipped"] for row in first.layers]
    for layer in range(LAYERS):
        assert same_attention(tmp_path / "a", tmp_path / "b", layer, "qkvo")
    statistics = load_statistics(file)
    old = {key: dataclasses.replace(m, clipped=None) for key, m in statistics.modules.items()}
    dataclasses.replace(statistics, modules=old).save(file)
    unknown = convert(source, tmp_path / "c", 2, statistics=str(file))
    assert any("was not counted" in warning for warning in unknown.warnings)
    with safe_open(str(statistics.save(file)), "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | {"self.0.clipped": torch.zeros(2)}, file, metadata)
    with pytest.raises(UsageError, match="not a statistics file of ours"):
        convert(source, tmp_path / "d", 2, statistics=str(file))


def test_a_result_that_reaches_the_bound_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged values are made a hundred times as large, as no merge does: the converted model exceeds the bound."""
    source = save(olmo(30.0, {0: "qkv", 2: "qkv"}), tmp_path / "in")
    plain = convert(source, tmp_path / "plain", 2, calibration=[text], **MERGE)
    assert not any("clipped_result" in row for row in plain.layers)

    def loud(*args: Any) -> Any:
        merged = joint(*args)
        return dataclasses.replace(
            merged, weights=dataclasses.replace(merged.weights, v=100 * merged.weights.v)
        )

    joint = MERGERS["joint"]
    monkeypatch.setitem(MERGERS, "joint", loud)
    result = convert(source, tmp_path / "out", 2, calibration=[text], **MERGE)
    shares = {row["layer"]: row["clipped_result"] for row in result.layers if "clipped_result" in row}
    assert 0 < shares[1]["v"] < 1 and shares[1]["q"] == shares[1]["k"] == 0
    assert any("clip_qkv 30 acts in" in w and "never did in the original" in w for w in result.warnings)


# --- counting ---------------------------------------------------------------------------------------------


def _inside(model: Any, layer: int) -> tuple[Any, dict[str, str]]:
    """An attention module, and the projections (and norms) that make its q, k and v."""
    if model.config.model_type == "dbrx":
        return model.transformer.blocks[layer].norm_attn_norm.attn, {"qkv": "Wqkv"}
    if model.config.model_type == "mpt":
        return model.transformer.blocks[layer].attn, {"qkv": "Wqkv"}
    normed = model.config.model_type == "olmoe"
    names = {"q": "q_norm", "k": "k_norm"} if normed else {"q": "q_proj", "k": "k_proj"}
    return model.model.layers[layer].self_attn, names | {"v": "v_proj"}


@pytest.mark.parametrize("model_type", ["olmo", "olmoe", "dbrx", "mpt"])
def test_counts_are_those_of_kept_activations(model_type: str) -> None:
    """By hand, from the outputs of the projections (of OLMoE the norms behind them), before the class clips them."""
    torch.manual_seed(0)
    bound = {"attn_config": {"clip_qkv": 0.5}} if model_type in ("dbrx", "mpt") else {"clip_qkv": 0.5}
    model = model_class(model_type)(pico_config(model_type, **bound)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.5))
    kept: dict[str, torch.Tensor] = {}
    attention, names = _inside(model, 1)
    for part, name in names.items():
        attention.get_submodule(name).register_forward_hook(
            lambda module, args, out, part=part: kept.update({part: out.detach().clone()})
        )
    ids = torch.randint(0, 90, (3, 10), generator=torch.Generator().manual_seed(1))
    spec = find_spec(json.loads(model.config.to_json_string(use_diff=False)))
    assert (spec.key_symmetry, spec.value_symmetry) == ("none", "none")
    found = collect(model, spec, ids, batch_size=3).modules["self.1"].clipped
    if "qkv" in kept:
        kept = dict(zip("qkv", kept["qkv"].chunk(3, -1), strict=True))
    want = [[int((kept[part].abs() > 0.5).sum()), kept[part].numel()] for part in "qkv"]
    assert found is not None and found.tolist() == want and all(0 < n < total for n, total in want)


def test_padding_is_not_counted() -> None:
    model = olmo(1.0)
    spec = find_spec(json.loads(model.config.to_json_string(use_diff=False)))
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    padded = collect(model, spec, {"input_ids": ids, "attention_mask": mask})
    cut = collect(model, spec, ids[:, :8])
    for key, moments in padded.modules.items():
        assert torch.equal(moments.clipped, cut.modules[key].clipped)


def test_plan_says_what_it_depends_on(tmp_path: Path) -> None:
    source = save(olmo(8.0), tmp_path / "in")
    (said,) = (warning for warning in plan(source, groups=2).warnings if "clip_qkv" in warning)
    assert "calibration counts how often it acts" in said and "without text, by the plain mean" in said
    assert not any("clip_qkv" in warning for warning in plan(source, groups=8).warnings)
    free = save(olmo(None), tmp_path / "free")
    assert not any("clip_qkv" in warning for warning in plan(free, groups=2).warnings)

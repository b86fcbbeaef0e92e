"""Checks are made before the work, say the same everywhere, and no config switches them off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file, save_file
from training import write_text

import mha2gqa
from mha2gqa.architectures import find_spec
from mha2gqa.calibration import load_statistics
from mha2gqa.checkpoints.reader import edit_config
from mha2gqa.cli.commands import cli
from mha2gqa.errors import CheckpointError, Mha2gqaError, UnsupportedModelError, UsageError
from mha2gqa.verification import preflight
from mha2gqa.verification.tiny_model import NO_TINY_MODEL, count_parameters, tiny_config
from mha2gqa.verification.tiny_random import check_tiny_random

HEAD = {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.zeros(1)}


def edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def refusals(source: Path, out: Path, **options: Any) -> set[str]:
    """What plan, convert and a calibrated convert say; nothing is read, written or left."""
    before = sorted(out.parent.iterdir())
    said = set()
    text = write_text(out.parent.parent / "text.jsonl", documents=20)
    for call in (
        lambda: mha2gqa.plan(source, groups=2, **options),
        lambda: mha2gqa.convert(source, out, 2, **options),
        lambda: mha2gqa.convert(source, out, 2, calibration=str(text), **options),
    ):
        with pytest.raises(Mha2gqaError) as caught:
            call()
        said.add(f"{caught.value.exit_code}: {caught.value}".replace(f"{source}: ", ""))
    assert sorted(out.parent.iterdir()) == before
    return said


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in" / "source"
    pico_llama().save_pretrained(folder)
    word_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda s: s.update(HEAD), {}, "unknown to the class: v_head.summary.bias, v_head.summary.weight"),
        (lambda s: s.pop("model.norm.weight"), {}, "missing: model.norm.weight"),
        (lambda s: s.pop("lm_head.weight"), {}, "missing: lm_head.weight"),
        (lambda s: None, {"intermediate_size": 99}, "of another shape: model.layers.0.mlp.down_proj.weight"),
        (lambda s: None, {"vocab_size": 60}, "model.embed_tokens.weight [64, 32], the config needs [60, 32]"),
    ],
)
def test_the_class_is_asked_before_the_work(
    source: Path,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    config: dict[str, Any],
    said: str,
) -> None:
    edit(with_tensors(source, change), **config)
    (line,) = refusals(source, tmp_path / "in" / "out")
    assert line.startswith("1: ") and said in line


@pytest.mark.parametrize(
    "switch",
    [
        {"auto_map": {"AutoModel": "x.y"}},
        {"auto_map": {"AutoModelForCausalLM": "x.My"}, "architectures": ["My"]},
        {"architectures": []},
        {"architectures": None},
        {"architectures": ["BertModel"]},
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "kernels-community/none"},
    ],
)
def test_no_word_of_a_config_switches_checks_off(
    source: Path, tmp_path: Path, switch: dict[str, Any]
) -> None:
    edit(source, **switch)
    result = mha2gqa.convert(source, tmp_path / "right", 2)
    assert [check.ok for check in result.verification] == [True] * 5
    assert mha2gqa.verify(tmp_path / "right").ok
    edit(source, intermediate_size=99)
    (line,) = refusals(source, tmp_path / "in" / "out")
    assert "of another shape" in line
    edit(tmp_path / "right", intermediate_size=99)
    assert not mha2gqa.verify(tmp_path / "right").ok


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Nothing remembered of what was checked before, nor afterwards of what is checked here."""
    preflight._checked.cache_clear()
    yield
    preflight._checked.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_what_cannot_be_checked_is_refused_unless_allowed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mha2gqa.verification.loads.model_class", lambda _: None)
    (line,) = refusals(source, tmp_path / "in" / "out")
    assert line.startswith("2: ") and "allow_unchecked=True" in line
    assert any(
        "cannot be checked" in w for w in mha2gqa.plan(source, groups=2, allow_unchecked=True).warnings
    )
    result = mha2gqa.convert(source, tmp_path / "out", 2, allow_unchecked=True)
    (told,) = [w for w in result.warnings if "unchecked" in w]
    assert told in json.loads((tmp_path / "out" / "mha2gqa.json").read_text())["warnings"]
    checked = mha2gqa.verify(tmp_path / "out")
    assert not checked.ok and "no class for models of type 'llama'" in checked.unchecked[0]
    with pytest.raises(CheckpointError, match="could not be checked"):
        cli.main(["verify", str(tmp_path / "out")], standalone_mode=False, obj={})


def test_code_of_its_own_may_hold_more_where_that_is_allowed(source: Path, tmp_path: Path) -> None:
    edit(with_tensors(source, lambda s: s.update(HEAD)), auto_map={"AutoModelForCausalLM": "x.My"})
    (line,) = refusals(source, tmp_path / "in" / "out")
    assert "names code of its own" in line
    result = mha2gqa.convert(source, tmp_path / "out", 2, allow_unchecked=True)
    assert any("unchecked" in w for w in result.warnings)
    assert "v_head.summary.bias" in load_file(tmp_path / "out" / "model.safetensors")


def test_extra_tensors_are_left_out_by_name(source: Path, tmp_path: Path) -> None:
    with_tensors(source, lambda s: s.update(HEAD))
    assert mha2gqa.plan(source, groups=2, drop_extra=["v_head.*"]).groups == 2
    result = mha2gqa.convert(source, tmp_path / "out", 2, drop_extra=["v_head.*"])
    assert result.warnings[0] == "left out, as asked: v_head.summary.bias, v_head.summary.weight"
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "v_head" in name]
    assert mha2gqa.verify(tmp_path / "out", against=source).ok
    with pytest.raises(UsageError, match="names no tensor"):
        mha2gqa.convert(source, tmp_path / "no", 2, drop_extra=["w_head.*"])
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        mha2gqa.convert(source, tmp_path / "no", 2, drop_extra=["v_head.*", "model.norm.weight"])
    with pytest.raises(CheckpointError, match="--drop-extra"):
        mha2gqa.evaluate(source, str(write_text(tmp_path / "t.jsonl", documents=3)), window=16)


@pytest.mark.usefixtures("asked_anew")
def test_a_package_that_is_missing_is_no_pass(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> Any:
        raise ImportError("needs timm\nmore")

    monkeypatch.setattr("mha2gqa.verification.loads._loading_info", absent)
    with pytest.raises(UnsupportedModelError, match="needs timm"):
        mha2gqa.convert(source, tmp_path / "out", 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_kv_heads", None), ("num_kv_heads", "aaaa"), ("num_kv_heads", {"after": "2"}),
        ("num_kv_heads", {"after": -1}), ("reexpression", "x"), ("reexpression", {"target_type": 3}),
        ("grouping", []), ("grouping", {}), ("grouping", {"model.layers.0.self_attn": [[0, 99]]}),
        ("grouping", {"model.layers.0.self_attn": "x"}),
    ],
)  # fmt: skip
def test_a_manifest_is_read_as_anybody_may_have_written_it(
    source: Path, tmp_path: Path, key: str, value: Any
) -> None:
    mha2gqa.convert(source, tmp_path / "out", 2, method="mean")
    place = tmp_path / "out" / "mha2gqa.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {key: value}))
    found = mha2gqa.verify(tmp_path / "out", against=source)
    (check,) = [check for check in found.checks if check.name == "against source"]
    assert check.ok is False and f"no usable {key}" in check.detail


def test_verify_against_sees_a_tensor_that_is_gone(source: Path, tmp_path: Path) -> None:
    mha2gqa.convert(source, tmp_path / "out", 2)
    assert mha2gqa.verify(tmp_path / "out", against=source).ok
    with_tensors(tmp_path / "out", lambda s: s.update({"model.norm.weight": s["model.norm.weight"] + 1}))
    checks = mha2gqa.verify(tmp_path / "out", against=source).checks
    assert "1 tensors differ" in checks[-1].detail and "model.norm.weight" in checks[-1].detail


def flipped(folder: Path, name: str) -> None:
    """Change one bit of one number of a tensor, on disk."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("role", ["k_proj", "o_proj"])
@pytest.mark.parametrize("how", [["--against"], ["--full"]])
def test_verify_sees_a_bit_that_changed_in_what_was_made(
    source: Path, tmp_path: Path, role: str, how: list[str]
) -> None:
    out, name = tmp_path / "out", f"model.layers.1.self_attn.{role}.weight"
    mha2gqa.convert(source, out, 2, method="joint")
    words = ["verify", str(out), *how, *([str(source)] if how == ["--against"] else [])]
    assert CliRunner().invoke(cli, words).exit_code == 0
    flipped(out, name)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 1 and "not as they were written" in result.output and name in result.output


def test_digests_are_of_all_that_was_made_and_nothing_else(source: Path, tmp_path: Path) -> None:
    mha2gqa.convert(source, tmp_path / "out", 2, method="mean")
    digests = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())["digests"]
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(digests) == sorted(name for name in made if "k_proj" in name or "v_proj" in name)
    for name, digest in digests.items():
        assert digest == hashlib.sha256(made[name].numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("value", [3, [], {"x": "y"}, {"x": 3}, {"x": "0" * 63}])
def test_digests_are_read_as_anybody_may_have_written_them(source: Path, tmp_path: Path, value: Any) -> None:
    mha2gqa.convert(source, tmp_path / "out", 2, method="mean")
    place = tmp_path / "out" / "mha2gqa.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"digests": value}))
    (check,) = [c for c in mha2gqa.verify(tmp_path / "out", full=True).checks if c.name == "as written"]
    assert check.ok is False and "no usable digests" in check.detail


def test_uptraining_keeps_the_digests_that_still_hold(source: Path, tmp_path: Path) -> None:
    mha2gqa.convert(source, tmp_path / "out", 2, method="mean")
    text = write_text(tmp_path / "text.jsonl", documents=60)
    options: dict[str, Any] = {"tokens": 512, "window": 32, "batch_tokens": 128, "device": "cpu"}
    mha2gqa.uptrain(
        tmp_path / "out", tmp_path / "up", str(text), teacher="none", train="attention", **options
    )
    (check,) = [c for c in mha2gqa.verify(tmp_path / "up", full=True).checks if c.name == "as written"]
    assert check.ok, check.detail
    flipped(tmp_path / "up", "model.layers.0.self_attn.q_proj.weight")
    (check,) = [c for c in mha2gqa.verify(tmp_path / "up", full=True).checks if c.name == "as written"]
    assert check.ok is False and "q_proj" in check.detail


def test_a_small_model_that_is_not_small_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**pico_llama().config.to_dict(), "num_key_value_heads": 2}
    assert check_tiny_random(config).ok
    monkeypatch.setattr("mha2gqa.verification.tiny_model.LARGEST", 1000)
    found = check_tiny_random(config)
    assert found.ok is None and "million parameters" in found.detail


@pytest.mark.parametrize("model_type", ["evolla", "phi4_multimodal", "blt", "falcon_h1"])
def test_no_config_keeps_the_small_model_busy(model_type: str) -> None:
    """Evolla took 24 s, phi4_multimodal 80, falcon_h1 13, blt imported every class of transformers."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]().to_dict() | {"model_type": model_type}
    found = check_tiny_random(config)
    assert found.ok or model_type in NO_TINY_MODEL
    assert "Unrecognized configuration" not in found.detail


@pytest.mark.parametrize("kind", ["", 3, [1], "x"])
def test_what_should_hold_the_number_of_heads_is_no_object(source: Path, tmp_path: Path, kind: Any) -> None:
    edit(source, model_type="gemma4_unified", text_config=kind)
    with pytest.raises(Mha2gqaError) as caught:
        mha2gqa.plan(source, groups=2)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"text_config is .*must be an object"):
        edit_config({"text_config": kind}, {("text_config", "num_key_value_heads"): 2})


def test_latent_attention_is_named_alike_by_plan_convert_and_verify(source: Path, tmp_path: Path) -> None:
    def latent(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
            state[name.replace("k_proj", "kv_a_proj_with_mqa").replace("v_proj", "kv_b_proj")] = state.pop(
                name
            )

    with_tensors(source, latent)
    (said,) = refusals(source, source.parent / "out")
    assert "multi-head latent attention" in said
    (failed,) = [c.detail for c in mha2gqa.verify(source).checks if c.name == "shapes"]
    assert "multi-head latent attention" in failed


@pytest.mark.parametrize("about", [None, "absent", [], 3, {"notes": 3}, {"notes": [3]}])
def test_statistics_that_say_nothing_usable_of_their_text(tmp_path: Path, about: Any) -> None:
    head: dict[str, Any] = {"schema_version": 1, "sites": {}}
    if about != "absent":
        head["about"] = about
    save_file({"x": torch.zeros(1)}, tmp_path / "s.safetensors", {"mha2gqa": json.dumps(head)})
    with pytest.raises(UsageError, match="not a statistics file of ours"):
        load_statistics(tmp_path / "s.safetensors")


def test_a_small_model_scans_short_chunks_whether_or_not_the_config_says_so() -> None:
    raw = {"model_type": "falcon_h1", "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32}
    for given in ({}, {"mamba_chunk_size": 256}):
        assert tiny_config(find_spec(raw | given), raw | given)["mamba_chunk_size"] == 8
    assert "mamba_chunk_size" not in tiny_config(
        find_spec(raw | {"model_type": "llama"}), raw | {"model_type": "llama"}
    )


def test_what_is_wrong_with_a_config_is_met_before_anything_large_is_made() -> None:
    def fails(error: Exception) -> Any:
        raise error

    with pytest.raises(KeyError):
        count_parameters(lambda: fails(KeyError("4")))
    assert count_parameters(lambda: fails(RuntimeError("a value of a meta tensor"))) == 0
    assert count_parameters(lambda: torch.nn.Linear(3, 4)) == 16

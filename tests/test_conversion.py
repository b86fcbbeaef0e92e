"""The converter on pico checkpoints: numbers, bytes, config, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file, save_file
from training import write_text
from transformers import AutoModelForCausalLM

from mha2gqa import heads
from mha2gqa.architectures import AttentionSpec
from mha2gqa.conversion.checkpoint import convert, convert_model, convert_state_dict
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError
from mha2gqa.uptraining import uptrain
from mha2gqa.verification.checks import verify

IDS = torch.arange(3, 33).view(2, 15)


def logits(path: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model(IDS).logits


def share_heads(model: torch.nn.Module, grouping: heads.Grouping) -> None:
    """Make K/V heads (weights and biases) equal inside each group."""
    for name, x in model.named_parameters():
        if ".k_proj." in name or ".v_proj." in name:
            view = x.data.view(8, -1, *x.shape[1:])
            for group in grouping:
                view[list(group)] = view[group[0]].clone()


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, {"head_dim": 8}, {"tie_word_embeddings": True}]
)
def test_identical_heads_convert_without_loss(tmp_path: Path, groups: int, changes: dict) -> None:
    model = pico_llama(**changes)
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(x)
    share_heads(model, heads.neighbours(8, groups))
    model.save_pretrained(tmp_path / "mha")
    result = convert(tmp_path / "mha", tmp_path / "gqa", groups, method="mean")
    assert [check.ok for check in result.verification] == [True] * 5
    assert torch.allclose(logits(tmp_path / "gqa"), logits(tmp_path / "mha"), atol=1e-5)
    new, old = (load_file(tmp_path / n / "model.safetensors") for n in ("gqa", "mha"))
    assert new.keys() == old.keys()
    for name, x in old.items():
        if ".k_proj." in name or ".v_proj." in name:
            first = x.view(8, -1, *x.shape[1:])[:: 8 // groups].reshape(new[name].shape)
            assert torch.equal(new[name], first)
        else:
            assert torch.equal(new[name], x)


def test_permuted_grouping_is_lossless_on_identical_heads(tmp_path: Path) -> None:
    grouping = ((0, 5, 3, 6), (1, 7, 2, 4))
    model = pico_llama()
    share_heads(model, grouping)
    model.save_pretrained(tmp_path / "mha")
    paths = [f"model.layers.{i}.self_attn" for i in range(2)]
    convert(tmp_path / "mha", tmp_path / "gqa", 2, method="mean", groupings=dict.fromkeys(paths, grouping))
    assert torch.allclose(logits(tmp_path / "gqa"), logits(tmp_path / "mha"), atol=1e-5)
    convert(tmp_path / "mha", tmp_path / "wrong", 2, method="mean")
    assert (logits(tmp_path / "wrong") - logits(tmp_path / "mha")).abs().max() > 0.5


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gqa_model_equals_its_expansion(tmp_path: Path, pico: Path, groups: int) -> None:
    convert(pico, tmp_path / "gqa", groups)
    gqa = load_file(tmp_path / "gqa" / "model.safetensors")
    wide = pico_llama()
    state = {n: x.view(groups, 4, 32).repeat_interleave(8 // groups, 0).view(32, 32)
             if ".k_proj." in n or ".v_proj." in n else x for n, x in gqa.items()}  # fmt: skip
    wide.load_state_dict(state)
    with torch.no_grad():
        assert torch.allclose(wide(IDS).logits, logits(tmp_path / "gqa"), atol=1e-5)


def test_config_differs_only_in_the_key(pico: Path, tmp_path: Path) -> None:
    raw = json.loads((pico / "config.json").read_text())
    raw = {"rope_theta": 500000.0, "torch_dtype": "float32", "my_own_key": [1, {"a": None}], **raw}
    del raw["rope_parameters"], raw["num_key_value_heads"]
    (pico / "config.json").write_text(json.dumps(raw))
    result = convert(pico, tmp_path / "out", 2)
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new == {**raw, "num_key_value_heads": 2}
    assert list(new) == [*raw, "num_key_value_heads"]
    assert any("absent" in warning for warning in result.warnings)


def test_shards_keep_their_names_and_the_index_is_right(tmp_path: Path) -> None:
    pico_llama().save_pretrained(tmp_path / "mha", max_shard_size="10KB")
    convert(tmp_path / "mha", tmp_path / "out", 2)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 74_368
    found = {p.name: set(load_file(p)) for p in (tmp_path / "out").glob("*.safetensors")}
    assert {n: f for f, names in found.items() for n in names} == index["weight_map"]
    single = tmp_path / "single"
    convert(tmp_path / "mha", single, 2, max_shard_size=10**9)
    assert torch.equal(logits(single), logits(tmp_path / "out"))


def test_key_and_value_of_a_layer_may_lie_in_different_shards(pico: Path, tmp_path: Path) -> None:
    state = load_file(pico / "model.safetensors")
    parts = {f"model-0000{i + 1}-of-00002.safetensors": {n: x for n, x in state.items() if (".v_proj" in n) == i}
             for i in (0, 1)}  # fmt: skip
    for name, part in parts.items():
        save_file(part, pico / name, metadata={"format": "pt"})
    (pico / "model.safetensors").unlink()
    weight_map = {n: f for f, part in parts.items() for n in part}
    (pico / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(pico, tmp_path / "out", 2)
    assert verify(tmp_path / "out", against=pico).ok


def test_bin_checkpoints_become_safetensors(pico: Path, tmp_path: Path) -> None:
    torch.save(load_file(pico / "model.safetensors"), pico / "pytorch_model.bin")
    convert(pico, tmp_path / "from_safetensors", 2)
    (pico / "model.safetensors").unlink()
    convert(pico, tmp_path / "from_bin", 2)
    assert torch.equal(logits(tmp_path / "from_bin"), logits(tmp_path / "from_safetensors"))
    assert not (tmp_path / "from_bin" / "pytorch_model.bin").exists()


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    pico_llama().bfloat16().save_pretrained(tmp_path / "mha")
    convert(tmp_path / "mha", tmp_path / "out", 2)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {x.dtype for x in state.values()} == {torch.bfloat16}
    assert sum(x.numel() for x in state.values()) * 2 == 37_184


def test_equal_number_of_groups_is_a_verified_copy(pico: Path, tmp_path: Path) -> None:
    result = convert(pico, tmp_path / "out", 8)
    old = (pico / "model.safetensors").read_bytes()
    assert torch.equal(logits(tmp_path / "out"), logits(pico))
    assert len((tmp_path / "out" / "model.safetensors").read_bytes()) == len(old)
    assert "none are shared" in result.warnings[0]


@pytest.mark.parametrize(("groups", "word"), [(3, "1, 2, 4, 8"), (0, "not possible"), (-1, "not possible"),
                                              (16, "would be more"), (2.5, "whole number"), ("2", "whole number")])  # fmt: skip
def test_impossible_groups_are_refused_before_anything_is_written(
    pico: Path, tmp_path: Path, groups: object, word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        convert(pico, tmp_path / "out", groups)  # type: ignore[arg-type]
    assert {p.name for p in tmp_path.iterdir()} == {"pico"}


def test_gqa_source_goes_to_fewer_groups(tmp_path: Path) -> None:
    pico_llama(num_key_value_heads=4).save_pretrained(tmp_path / "gqa4")
    state = load_file(tmp_path / "gqa4" / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    for groups in (2, 1):
        convert(tmp_path / "gqa4", tmp_path / f"g{groups}", groups, method="mean")
        new = load_file(tmp_path / f"g{groups}" / "model.safetensors")[name]
        right = state[name].double().view(groups, 4 // groups, 4, 32).mean(1).float().view(-1, 32)
        assert torch.equal(new, right)
    with pytest.raises(UsageError, match="4 KV heads, 8 would be more"):
        convert(tmp_path / "gqa4", tmp_path / "no", 8)


def test_broken_sources_are_refused(pico: Path, tmp_path: Path) -> None:
    state = load_file(pico / "model.safetensors")
    config = json.loads((pico / "config.json").read_text())

    def variant(name: str, tensors: dict | None = None, **changes: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(pico, folder)
        (folder / "config.json").write_text(json.dumps(config | changes))
        if tensors is not None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    key = "model.layers.0.self_attn.k_proj.weight"
    cases = [
        (variant("hand", num_key_value_heads=2), "32 rows = 8 heads x head_dim 4"),
        (variant("lost", {n: x for n, x in state.items() if n != key}), "no tensor for k.weight"),
        (variant("nan", state | {key: state[key] * float("nan")}), "NaN"),
        (variant("quantised", quantization_config={"quant_method": "gptq"}), "gptq"),
        (variant("int8", state | {key: state[key].to(torch.int8)}), "I8"),
        (variant("mla", model_type="deepseek_v3"), "deepseek_v3"),
        (variant("unknown", model_type="my_model"), "my_model"),
    ]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    cases.append((tmp_path / "adapter", "adapter"))
    truncated = variant("truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[:-100])
    cases.append((truncated, "truncated"))
    stale = variant("stale")
    (stale / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    cases.append((stale, "stale"))
    broken = variant("json")
    (broken / "config.json").write_text("{")
    cases.append((broken, "not valid JSON"))
    for folder, words in cases:
        with pytest.raises((CheckpointError, UnsupportedModelError), match=words) as caught:
            convert(folder, tmp_path / "out", 2)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("out*"))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    pico_llama().save_pretrained(tmp_path / "mha", max_shard_size="10KB")
    name = sorted(p.name for p in (tmp_path / "mha").glob("model-*"))[4]
    (tmp_path / "mha" / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        convert(tmp_path / "mha", tmp_path / "out", 2)


def test_output_folder_is_never_lost(pico: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        convert(pico, out, 2)
    with pytest.raises(UsageError, match="not ours"):
        convert(pico, out, 2, force=True)
    assert (out / "precious").read_text() == "x"
    for inside in (pico / "out", pico):
        with pytest.raises(UsageError, match="inside SOURCE"):
            convert(pico, inside, 2)
    convert(pico, tmp_path / "ours", 2)
    convert(pico, tmp_path / "ours", 4, force=True)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_key_value_heads"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "out", "pico"]


def test_a_failing_write_publishes_nothing(
    pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mha2gqa.conversion.publishing.copy_side_files", full)
    with pytest.raises(CheckpointError, match="No space left"):
        convert(pico, tmp_path / "out", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["pico"]


def test_too_small_a_disk_is_refused_first(
    pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match="free"):
        convert(pico, tmp_path / "out", 2)


@pytest.mark.slow  # `make kills` does so before every event of the file system
def test_a_killed_conversion_leaves_no_output_and_can_be_rerun(pico: Path, tmp_path: Path) -> None:
    code = ("import sys, time, mha2gqa.conversion.checkpoint as c, mha2gqa.conversion.publishing as p\n"
            "p.copy_side_files = lambda *a: (print('writing', flush=True), time.sleep(60))\n"
            "c.convert(sys.argv[1], sys.argv[2], 2)")  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(pico), str(tmp_path / "out")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0)
    assert not (tmp_path / "out").exists()
    convert(pico, tmp_path / "out", 2)
    assert verify(tmp_path / "out", against=pico).ok


def test_what_was_trained_is_not_held_against_the_source_and_another_model_is_named(
    pico: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "out", write_text(tmp_path / "text.jsonl")
    convert(word_tokenizer(pico), out, 2, method="mean")
    words = {"tokens": 256, "window": 16, "batch_tokens": 128, "device": "cpu"}
    for train in ("all", "attention"):
        uptrain(out, tmp_path / train, str(text), train=train, **words)
        assert verify(tmp_path / train, against=pico).ok
    (path,) = (tmp_path / "attention").glob("*.safetensors")
    weights = load_file(path)
    weights["model.embed_tokens.weight"] += 1  # which no step has trained
    save_file(weights, path, metadata={"format": "pt"})
    assert "embed_tokens" in str([c.detail for c in verify(tmp_path / "attention", against=pico).checks])
    manifest = json.loads((out / "mha2gqa.json").read_text())
    manifest["reexpression"] = {"source_type": "gpt_neox", "target_type": "phi"}
    (out / "mha2gqa.json").write_text(json.dumps(manifest))
    said = verify(out, against=pico).checks[-1].detail
    assert said.endswith("is a llama model, and it was converted from a gpt_neox model")


def test_verify_finds_what_is_wrong(pico: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(pico, out, 2, method="mean")
    good = load_file(out / "model.safetensors")
    key = "model.layers.0.self_attn.k_proj.weight"
    for changed, words in (
        (torch.randn(8, 32), "differ"),
        (torch.zeros(0, 32), "config says 2 KV heads = 8 key rows, the tensor has 0 rows"),
        (torch.zeros(16, 32), "16 rows"),
    ):
        save_file(good | {key: changed}, out / "model.safetensors", metadata={"format": "pt"})
        result = verify(out, against=pico)
        assert not result.ok
        assert words in " ".join(check.detail for check in result.checks if check.ok is False)
    save_file(good | {key: good[key] * float("inf")}, out / "model.safetensors", metadata={"format": "pt"})
    assert not verify(out, full=True).ok
    del good[key]
    save_file(good, out / "model.safetensors", metadata={"format": "pt"})
    assert not verify(out).ok


def test_bytes_too_many_are_a_failed_check(pico: Path, tmp_path: Path) -> None:
    """The reader of weights raises an error of its own kind for a file longer than its header says."""
    convert(pico, tmp_path / "out", 2)
    with (tmp_path / "out" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    (check,) = (check for check in verify(tmp_path / "out").checks if check.ok is False)
    assert check.name in ("files", "loads") and "\n" not in check.detail


def test_same_seed_same_bytes(pico: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(pico, tmp_path / name, 2, method="random", seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("tied", [False, True])
def test_convert_model_in_memory_equals_the_file(pico: Path, tmp_path: Path, tied: bool) -> None:
    model = pico_llama(tie_word_embeddings=tied)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    small = convert_model(model, 2)
    model.save_pretrained(tmp_path / "mha")
    convert(tmp_path / "mha", tmp_path / "gqa", 2)
    with torch.no_grad():
        assert torch.allclose(small(IDS).logits, logits(tmp_path / "gqa"), atol=1e-6)
    small.model.layers[0].self_attn.q_proj.weight.data.zero_()
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    small.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_key_value_heads"] == 2


def test_cached_greedy_decoding_equals_uncached(pico: Path, tmp_path: Path) -> None:
    convert(pico, tmp_path / "gqa", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gqa")
    ids = IDS[:, :5]
    cached = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(8):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, ids)
    cache = model(IDS, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (2, 2, 15, 4)


def test_convert_state_dict_of_an_own_model() -> None:
    spec = AttentionSpec(
        modules=(("self", "blocks.{layer}.attn"),), q="q_linear", k="k_linear", v="v_linear", o="o_linear"
    )
    torch.manual_seed(0)
    state = {f"blocks.0.attn.{p}_linear.weight": torch.randn(24, 24) for p in "qkvo"} | {
        "embed.weight": torch.randn(9, 24)
    }
    new = convert_state_dict(state, spec, 2, num_heads=6)
    key = state["blocks.0.attn.k_linear.weight"].double().view(2, 3, 4, 24).mean(1).float().view(8, 24)
    assert torch.equal(new["blocks.0.attn.k_linear.weight"], key)
    assert new["embed.weight"] is state["embed.weight"]
    assert new["blocks.0.attn.q_linear.weight"] is state["blocks.0.attn.q_linear.weight"]


def test_an_architecture_that_a_model_cannot_be_written_as(pico: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as_: llama cannot be written as phi; leave it out"):
        convert(pico, tmp_path / "out", 2, as_="phi")
    assert not (tmp_path / "out").exists()


def test_the_kernel_copy_and_the_buffered_copy_write_the_same(
    pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    convert(pico, tmp_path / "kernel", 2, max_shard_size=20_000, progress=lambda done, _: seen.append(done))
    for name, refuse in (("elsewhere", OSError(18, "Invalid cross-device link")), ("nothing", None)):

        def copy_file_range(*_: object, refuse: OSError | None = refuse) -> int:
            if refuse:
                raise refuse
            return 0

        monkeypatch.setattr(os, "copy_file_range", copy_file_range, raising=False)
        convert(pico, tmp_path / name, 2, max_shard_size=20_000)
        files = sorted((tmp_path / "kernel").glob("*.safetensors"))
        assert len(files) > 2
        for file in files:
            assert file.read_bytes() == (tmp_path / name / file.name).read_bytes()
    stored = [x.nbytes for file in files for x in load_file(file).values()]
    assert seen == sorted(seen) and seen[-1] == sum(stored)


def test_a_source_that_shrinks_while_it_is_copied_publishes_nothing(
    pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(*_: object) -> None:
        os.truncate(pico / "model.safetensors", 3000)

    monkeypatch.setattr("mha2gqa.conversion.checkpoint.check_space", shrink)
    with pytest.raises(CheckpointError, match="ends too early"):
        convert(pico, tmp_path / "out", 8)  # as many heads as before: nothing is made, all is copied
    assert [p.name for p in tmp_path.iterdir()] == ["pico"]

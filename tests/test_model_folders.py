"""What a checkpoint folder is, asked before it is used: every kind of it is read, or named with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import pico_llama
from safetensors.torch import load_file, save_file

from mha2gqa.checkpoints.loading import load_model
from mha2gqa.commands.estimate import plan
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, Mha2gqaError, UnsupportedModelError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


def refused(source: Path, said: str, out: Path, kind: type[Mha2gqaError] = CheckpointError) -> None:
    """`plan` and `convert` say the same; nothing is written."""
    for call in (lambda: plan(source, groups=2), lambda: convert(source, out / "result", 2)):
        with pytest.raises(kind, match=said) as caught:
            call()
        assert len(str(caught.value)) <= 400
    assert not list(out.glob("result*"))


def edit_config(source: Path, **changes: object) -> None:
    config = json.loads((source / CONFIG).read_text()) | changes
    (source / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


# --- the folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_pointers_and_dangling_links_are_named(pico: Path, tmp_path: Path, name: str) -> None:
    (pico / name).write_bytes(POINTER)
    refused(pico, f"{name}: a Git LFS pointer.*git lfs pull", tmp_path)
    (pico / name).unlink()
    (pico / name).symlink_to("../../blobs/0123")
    refused(pico, f"{name}: a link to .*blobs/0123.*does not exist", tmp_path)


def test_an_adapter_beside_or_instead_of_a_model(pico: Path, tmp_path: Path) -> None:
    (pico / "adapter_config.json").write_text("{}")
    save_file({"x": torch.ones(2)}, pico / "adapter_model.safetensors")
    refused(pico, "an adapter lies beside the model; merge it", tmp_path)
    with pytest.raises(CheckpointError, match="an adapter lies beside the model"):
        load_model(pico, device="cpu")
    (pico / CONFIG).unlink()
    refused(pico, "an adapter, not a model", tmp_path)


def test_an_index_that_agrees_with_the_single_file_is_fine(pico: Path, tmp_path: Path) -> None:
    names = list(load_file(pico / WEIGHTS))
    (pico / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    convert(pico, tmp_path / "out", 2)
    assert not (tmp_path / "out" / INDEX).exists()
    (pico / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
    )
    refused(pico, "both .* are there.*remove the stale one", tmp_path)


def test_shards_in_sub_folders(tmp_path: Path) -> None:
    pico_llama().save_pretrained(tmp_path / "flat", max_shard_size="10KB")
    convert(tmp_path / "flat", tmp_path / "right", 2, max_shard_size=10**9)
    source = tmp_path / "nested"
    shutil.copytree(tmp_path / "flat", source)
    index = json.loads((source / INDEX).read_text())
    for file in set(index["weight_map"].values()):
        folder = source / ("x" if "1-of" in file else "y")
        folder.mkdir(exist_ok=True)
        (source / file).rename(folder / file)
        index["weight_map"] |= {
            n: f"{folder.name}/{file}" for n, f in index["weight_map"].items() if f == file
        }
    (source / INDEX).write_text(json.dumps(index))
    convert(source, tmp_path / "out", 2)
    right = load_file(tmp_path / "right" / WEIGHTS)
    found = {n: x for f in (tmp_path / "out").glob("*.safetensors") for n, x in load_file(f).items()}
    assert right.keys() == found.keys() and all(torch.equal(right[n], found[n]) for n in right)
    (source / INDEX).unlink()
    refused(
        source, r"no weights here, but in|without model\.safetensors\.index|no model\.safetensors", tmp_path
    )


@pytest.mark.parametrize(
    "file", ["../o.safetensors", "/o.safetensors", "", ".", "x" * 300 + ".safetensors", "config.json", None, 3, [], {}, "a\0.safetensors"]
)  # fmt: skip
def test_no_index_names_a_file_outside_or_none(pico: Path, tmp_path: Path, file: object) -> None:
    shutil.copy(pico / WEIGHTS, tmp_path / "o.safetensors")
    names = list(load_file(pico / WEIGHTS))
    (pico / WEIGHTS).unlink()
    (pico / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    refused(pico, r"not a \.safetensors file in this folder", tmp_path)


def test_what_lies_there_instead_of_weights_is_named(pico: Path, tmp_path: Path) -> None:
    (pico / WEIGHTS).rename(tmp_path / "kept")
    for name, said in (
        ("model-q4.gguf", "GGUF"),
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("zero_to_fp32.py", "DeepSpeed"),
        ("__0_0.distcp", "torch.distributed"),
        ("consolidated.00.pth", "author's own format"),
        ("last.ckpt", "training checkpoint"),
        ("model-00001-of-00002.safetensors", "without model.safetensors.index.json"),
    ):
        (pico / name).write_bytes(b"x")
        refused(pico, said, tmp_path)
        (pico / name).unlink()
    (pico / "checkpoint-500").mkdir()
    shutil.move(tmp_path / "kept", pico / "checkpoint-500" / WEIGHTS)
    refused(pico, "no weights here, but in checkpoint-500; give .*checkpoint-500", tmp_path)
    hub = tmp_path / "models--a--b"
    (hub / "snapshots").mkdir(parents=True)
    shutil.move(pico, hub / "snapshots" / "abc")
    refused(hub, "no config.json here, but in snapshots/abc", tmp_path)


# --- names and configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_prefixes_of_training_tools_are_named(pico: Path, tmp_path: Path, prefix: str) -> None:
    state = {prefix + n: x for n, x in load_file(pico / WEIGHTS).items()}
    save_file(state, pico / WEIGHTS, {"format": "pt"})
    refused(pico, f"every tensor name begins with '{prefix}'.*save", tmp_path, UnsupportedModelError)
    with pytest.raises(CheckpointError) as caught:
        load_model(pico, device="cpu")
    assert prefix in str(caught.value) and len(str(caught.value)) <= 400


def test_every_kind_of_quantisation_is_named(pico: Path, tmp_path: Path) -> None:
    for method in ("gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "compressed-tensors"):
        edit_config(pico, quantization_config={"quant_method": method})
        refused(pico, f"quantised checkpoint \\({method}\\)", tmp_path, UnsupportedModelError)
    edit_config(pico, quantization_config=..., quantization={"group_size": 64, "bits": 4})
    state = load_file(pico / WEIGHTS)
    packed = {n: x[:, :4].contiguous().view(torch.uint32) if "_proj" in n else x for n, x in state.items()}
    packed |= {
        n.replace(".weight", ".scales"): x[:, :1].contiguous() for n, x in state.items() if "_proj" in n
    }
    save_file(packed, pico / WEIGHTS, {"format": "mlx"})
    refused(pico, "quantised checkpoint .MLX, 4 bits.", tmp_path, UnsupportedModelError)
    edit_config(pico, quantization=...)
    refused(pico, r"quantised checkpoint .it holds 'model.layers.*\.scales'", tmp_path, UnsupportedModelError)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**6}, "larger than any|the tensors are of 2 layers"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers' is larger than any model's"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers is 1000, the tensors are of 2 layers"),
        ({"num_hidden_layers": "2"}, "no usable num_hidden_layers"),
        ({"num_labels": 2**31}, "num_labels' is larger"),
        ({"num_key_value_heads": [8, 8]}, "num_key_value_heads is a list"),
        ({"num_attention_heads": [8, 8]}, "num_attention_heads is a list"),
        ({"num_key_value_heads": {}}, "num_key_value_heads is {}"),
        ({"head_dim": "4"}, "head_dim is '4'"),
        ({"head_dim": 4.0}, r"head_dim is 4\.0"),
        ({"num_attention_heads": 64, "head_dim": ...}, "not a multiple of 64 heads|asks for"),
        ({"per_layer_config": "x"}, "per_layer_config is 'x'"),
        ({"per_layer_config": {"a": {}}}, "per_layer_config is"),
        ({"per_layer_config": {"0": 3}}, "per_layer_config is"),
        ({"architectures": 1}, "architectures is 1"),
        ({"architectures": [1]}, "architectures is"),
        ({"model_type": 3}, "no model_type"),
        ({"model_type": ...}, "no model_type"),
        ({"partial_rotary_factor": "x", "rope_parameters": ...}, "partial_rotary_factor is 'x'|refuses it"),
        ({"sliding_window": "x"}, "sliding_window|refuses it"),
    ],
)
def test_a_config_of_another_shape_ends_in_one_line(
    pico: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    edit_config(pico, **changes)
    with pytest.raises(Mha2gqaError, match=said) as caught:
        plan(pico, groups=2)
    assert len(str(caught.value)) <= 400


def test_tensors_of_latent_attention_under_another_type(pico: Path, tmp_path: Path) -> None:
    state = {n.replace("k_proj", "kv_a_proj_with_mqa").replace("v_proj", "kv_b_proj"): x for n, x in load_file(pico / WEIGHTS).items()}  # fmt: skip
    save_file(state, pico / WEIGHTS, {"format": "pt"})
    refused(pico, "multi-head latent attention", tmp_path, UnsupportedModelError)

"""Inputs that people met in public (N01 … N31), each with what is right; what training met is in the files beside it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from click.testing import CliRunner
from conftest import pico_llama, word_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mha2gqa
from mha2gqa.cli.commands import cli
from mha2gqa.cli.printing import check_output
from mha2gqa.commands.describe import read_config
from mha2gqa.commands.push import push
from mha2gqa.errors import (
    CheckpointError,
    DataError,
    GateError,
    Mha2gqaError,
    UnsupportedModelError,
    UsageError,
)

TEXTS = [" ".join(f"w{(i * k) % 57}" for i in range(40)) for k in (1, 2, 3)]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
SCORE: dict[str, Any] = {"window": 32, "device": "cpu"}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    pico_llama().save_pretrained(folder)
    word_tokenizer(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "text.jsonl")


def jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def scored(model: Path, data: Path | str) -> mha2gqa.EvaluateResult:
    return mha2gqa.evaluate(model, str(data), **SCORE)


def score(model: Path, data: Path | str) -> mha2gqa.ModelResult:
    return scored(model, data).models[0]


def told(result: mha2gqa.EvaluateResult) -> list[str]:
    """Everything that it says beside its figures."""
    return [*result.warnings, *(w for m in result.to_dict()["models"] for w in m.get("notices", ()))]


def store(model: Path, state: State, **config: Any) -> Path:
    save_file(
        {name: x.contiguous() for name, x in state.items()}, model / "model.safetensors", {"format": "pt"}
    )
    return configure(model, **config)


def configure(model: Path, **changes: Any) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


def weights(model: Path) -> State:
    return load_file(model / "model.safetensors")


def refused(model: Path, out: Path, said: str, kind: type[Mha2gqaError] = CheckpointError) -> None:
    for call in (lambda: mha2gqa.plan(model, groups=2), lambda: mha2gqa.convert(model, out, 2)):
        with pytest.raises(kind, match=said) as caught:
            call()
        assert len(str(caught.value)) <= 400
    assert not list(out.parent.glob(f"{out.name}*"))


def test_n01_nan_is_a_result(model: Path, whole: Path, tmp_path: Path, text: Path) -> None:
    state = weights(model)
    state["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    store(model, state)
    output = tmp_path / "nan.json"
    argv = ["evaluate", str(whole), str(model), "--data", str(text), "--window", "32", "--device", "cpu"]
    gate = ["--against", str(whole), "--max-ppl-ratio", "1.1", "--output", str(output)]
    with pytest.raises(GateError):
        cli.main([*argv, *gate], standalone_mode=False, obj={})
    found = json.loads(output.read_text())
    assert found["models"][1]["perplexity"] == "nan" and found["gates"][0]["ok"] is False
    recipe = {
        "source": str(model),
        "output": str(tmp_path / "out"),
        "convert": {"groups": 2},
        "evaluate": {"data": str(text), "agreement": True, **SCORE},
        "report": {"max_ppl_ratio": 1.1},
    }
    with pytest.raises(GateError):
        mha2gqa.run(recipe)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.md", "report.html", "report.json", "result.json"} <= made


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
def test_n02_a_buffer_of_an_odd_dtype_is_named_or_kept(
    model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    extra = {"model.freqs_cis": torch.arange(4).to(dtype)}
    store(model, weights(model) | extra)
    refused(model, tmp_path / "out", "unknown to the class: model.freqs_cis")
    configure(model, auto_map={"AutoModelForCausalLM": "x.My"}, architectures=["My"])
    refused(model, tmp_path / "out", "names code of its own")
    mha2gqa.convert(model, tmp_path / "out", 2, allow_unchecked=True)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.freqs_cis"), extra["model.freqs_cis"])


def test_n03_a_downloaded_data_set_is_scored_without_its_card(
    model: Path, tmp_path: Path, text: Path
) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS}), folder / "data" / "train-0.parquet")
    for name in ("README.md", "LICENSE.txt", "notes.md", ".gitattributes", "dataset_infos.json"):
        (folder / name).write_text("w1 w2 w3 " * 30)
    right, found = score(model, text), scored(model, folder)
    assert (found.models[0].tokens, found.models[0].loss) == (right.tokens, right.loss)
    assert any("README.md" in warning for warning in told(found))
    pq.write_table(pa.table({"text": TEXTS}), folder / "data" / "test-0.parquet")
    with pytest.raises(UsageError, match="several splits"):
        score(model, folder)
    assert score(model, f"{folder}::train").loss == right.loss


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_n04_a_table_is_read_by_its_column(
    model: Path, tmp_path: Path, text: Path, ending: str, delimiter: str
) -> None:
    with (tmp_path / f"t.{ending}").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(TEXTS)])
    assert score(model, tmp_path / f"t.{ending}").loss == score(model, text).loss


def test_n05_an_adapter_beside_the_model(model: Path, tmp_path: Path, text: Path) -> None:
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"x": torch.ones(2)}, model / "adapter_model.safetensors")
    refused(model, tmp_path / "out", "an adapter lies beside the model; merge it")
    for call in (
        lambda: score(model, text),
        lambda: mha2gqa.convert(model, tmp_path / "out", 2, calibration=str(text)),
        lambda: mha2gqa.uptrain(model, tmp_path / "up", str(text), teacher="none", tokens=64),
    ):
        with pytest.raises(CheckpointError, match="an adapter lies beside the model"):
            call()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda state: {"model_state_dict": state, "epoch": 3},
            "training checkpoint, not a state dict: keys epoch",
        ),
        (lambda state: [1, 2], "holds a list, not a state dict"),
        (lambda state: state | {"x": 3}, "its entry 'x' is a int"),
    ],
)
def test_n06_a_bin_that_is_no_state_dict(
    model: Path, tmp_path: Path, make: Callable[[State], Any], said: str
) -> None:
    state = weights(model)
    (model / "model.safetensors").unlink()
    torch.save(make(state), model / "pytorch_model.bin")
    refused(model, tmp_path / "out", said)
    torch.save(state | {"a._extra_state": None}, model / "pytorch_model.bin")
    mha2gqa.convert(model, tmp_path / "out", 2)
    assert weights(tmp_path / "out").keys() == state.keys()


def test_n07_an_index_beside_the_file_it_names(model: Path, tmp_path: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights(model), "model.safetensors")}))
    assert mha2gqa.convert(model, tmp_path / "out", 2).num_kv_heads == {"before": 8, "after": 2}
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights(model), "other.safetensors")}))
    refused(model, tmp_path / "no", "remove the stale one")


@pytest.mark.parametrize("flag", [0x1, 0x20, 0x40, 0x2000])
def test_n08_a_pickle_with_a_record_that_is_encrypted(model: Path, tmp_path: Path, flag: int) -> None:
    state = weights(model)
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(state, file)
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        place = next(i.header_offset for i in archive.infolist() if i.filename.endswith("data/3"))
        name = next(i.filename for i in archive.infolist() if i.filename.endswith("data/3")).encode()
    entry = data.rindex(name) - 46  # of the directory at the end
    for at in (place + 6, entry + 8):
        data[at : at + 2] = (int.from_bytes(data[at : at + 2], "little") | flag).to_bytes(2, "little")
    file.write_bytes(data)
    refused(model, tmp_path / "out", "not readable")


def test_n08_a_pickle_with_a_record_that_is_marked_as_a_folder(model: Path, tmp_path: Path) -> None:
    """torch reads nothing there and returns whatever the memory held."""
    state = weights(model)
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(state, file)
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        name = next(i.filename for i in archive.infolist() if i.filename.endswith("data/3")).encode()
    data[data.rindex(name) - 46 + 38] |= 0x10  # attributes, in the directory at the end
    file.write_bytes(data)
    refused(model, tmp_path / "out", "marked as a folder")


def test_n08_a_pickle_of_before_2020(model: Path, whole: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(weights(whole), file, _use_new_zipfile_serialization=False)
    mha2gqa.convert(model, tmp_path / "out", 2)
    mha2gqa.convert(whole, tmp_path / "right", 2)
    assert all(torch.equal(x, weights(tmp_path / "right")[n]) for n, x in weights(tmp_path / "out").items())
    file.write_bytes(b"")
    refused(model, tmp_path / "no", "an empty file; download it again")


def zipped(data: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("t.jsonl", data)
    return held.getvalue()


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".jsonl.zst", zstandard.compress),
        (".jsonl.bz2", bz2.compress),
        (".JSONL.GZ", gzip.compress),
        (".jsonl.zip", zipped),
    ],
)
def test_n09_compressed_text(
    model: Path, tmp_path: Path, text: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    folder = tmp_path / "z"
    folder.mkdir()
    (folder / f"a{ending}").write_bytes(pack(text.read_bytes()))
    right = score(model, text)
    assert score(model, folder / f"a{ending}").loss == right.loss
    shutil.copy(text, folder / "b.jsonl")
    both = scored(model, folder)  # nothing is passed over in silence
    assert both.models[0].tokens == 2 * right.tokens
    assert any("several kinds" in warning for warning in told(both))


def test_n09_arrow(model: Path, tmp_path: Path, text: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert score(model, tmp_path / "t.arrow").loss == score(model, text).loss


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_n11_a_clone_without_lfs(model: Path, tmp_path: Path, text: Path, name: str) -> None:
    if name.endswith(".bin"):
        (model / "model.safetensors").unlink()
    (model / name).write_bytes(POINTER)
    refused(model, tmp_path / "out", f"{name}: a Git LFS pointer, .*git lfs pull")
    with pytest.raises(CheckpointError, match=f"{name}: a Git LFS pointer, .*git lfs pull"):
        score(model, text)
    (model / name).unlink()
    (model / name).symlink_to("../../blobs/none")
    if name == "tokenizer.json":
        with pytest.raises(CheckpointError, match=r"a link to '\.\./\.\./blobs/none', which does not exist"):
            score(model, text)
        refused(model, tmp_path / "out", "a link to '../../blobs/none', which does not exist")


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_n11_text_that_is_a_pointer(model: Path, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"t.{ending}").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"a Git LFS pointer, .*git lfs pull"):
        score(model, tmp_path / f"t.{ending}")


@pytest.mark.parametrize("content", ['{"do_sample": true.\n', ""])
def test_n12_a_broken_generation_config(model: Path, tmp_path: Path, text: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    refused(model, tmp_path / "out", r"model/generation_config\.json: not valid JSON")
    with pytest.raises(CheckpointError, match=r"model/generation_config\.json: not valid JSON"):
        mha2gqa.convert(model, tmp_path / "out", 2, calibration=str(text), statistics=str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_n13_tensors_that_the_class_does_not_know(model: Path, tmp_path: Path) -> None:
    state = weights(model)
    store(model, state | {"v_head.summary.weight": torch.ones(1, 32)})
    refused(model, tmp_path / "out", r"unknown to the class: v_head\.summary\.weight; drop_extra")
    mha2gqa.convert(model, tmp_path / "out", 2, drop_extra=["v_head.*"])
    assert weights(tmp_path / "out").keys() == state.keys()
    store(model, state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    mha2gqa.convert(model, tmp_path / "kept", 2)


def test_n14_weights_that_mlx_has_packed(model: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    packed = {f"{name}.weight": torch.zeros(32, 4, dtype=torch.uint32), f"{name}.scales": torch.ones(32, 1)}
    store(model, weights(model) | packed, quantization={"group_size": 64, "bits": 4})
    refused(model, tmp_path / "out", "quantised checkpoint .MLX, 4 bits", UnsupportedModelError)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_n16_names_with_the_prefix_of_a_tool(model: Path, tmp_path: Path, text: Path, prefix: str) -> None:
    store(model, {prefix + name: x for name, x in weights(model).items()})
    refused(model, tmp_path / "out", f"every tensor name begins with '{prefix}'", UnsupportedModelError)
    with pytest.raises(CheckpointError, match=f"every name begins with '{prefix}'") as caught:
        score(model, text)
    assert len(str(caught.value)) <= 400


def test_n18_and_n19_files_are_kept_and_readable(model: Path, tmp_path: Path) -> None:
    odd = '{"do_sample": false, "temperature": 0.9, "top_p": 0.6}'
    (model / "generation_config.json").write_text(odd)
    for path in model.iterdir():
        path.chmod(0o444)
    before = os.umask(0o022)
    try:
        mha2gqa.convert(model, tmp_path / "out", 2)
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "generation_config.json").read_text() == odd
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir() if path.is_file()
    }
    assert set(modes.values()) == {0o644}, modes


def test_n23_more_ids_than_embeddings(model: Path, tmp_path: Path, text: Path) -> None:
    state = weights(model)
    cut = {n: x[:20].clone() if x.shape[0] == 64 else x for n, x in state.items()}
    store(model, cut, vocab_size=20)
    with pytest.raises(Mha2gqaError, match=r"the tokenizer gives id .*, the model has 20 embeddings"):
        score(model, text)
    store(model, state, vocab_size=60)
    refused(model, tmp_path / "out", r"model\.embed_tokens\.weight \[64, 32\], the config needs \[60, 32\]")


def test_n24_tied_and_missing_heads(model: Path, tmp_path: Path, text: Path) -> None:
    state = weights(model)
    headless = {name: x for name, x in state.items() if name != "lm_head.weight"}
    store(model, headless, tie_word_embeddings=False)
    refused(model, tmp_path / "out", r"missing: lm_head\.weight")
    for name, head in (("same", state["model.embed_tokens.weight"]), ("other", state["lm_head.weight"])):
        store(model, headless | {"lm_head.weight": head.clone()}, tie_word_embeddings=True)
        mha2gqa.convert(model, tmp_path / name, 8)  # a copy
        assert score(tmp_path / name, text).loss == score(model, text).loss


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_n25_metadata_without_format(model: Path, tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file(weights(model), model / "model.safetensors", metadata)
    mha2gqa.convert(model, tmp_path / "out", 2)
    assert mha2gqa.verify(tmp_path / "out", full=True).ok


def test_n26_names_without_the_models_prefix(model: Path, tmp_path: Path) -> None:
    state = {n.removeprefix("model."): x for n, x in weights(model).items() if n != "lm_head.weight"}
    store(model, state, architectures=["LlamaModel"])
    mha2gqa.convert(model, tmp_path / "out", 2)
    assert weights(tmp_path / "out").keys() == state.keys()


def test_n27_configs_of_the_first_llama(model: Path, tmp_path: Path, text: Path) -> None:
    configure(model, architectures=["LLaMAForCausalLM"], pad_token_id=-1)
    result = mha2gqa.convert(model, tmp_path / "out", 8)
    assert [check.ok for check in result.verification] == [True] * 5
    assert score(tmp_path / "out", text).loss == score(model, text).loss


def test_n28_dtypes_are_kept_tensor_by_tensor(model: Path, tmp_path: Path) -> None:
    state = {n: x if "k_proj" in n or "norm" in n else x.bfloat16() for n, x in weights(model).items()}
    store(model, state, dtype="float16")
    mha2gqa.convert(model, tmp_path / "out", 2)
    assert {n: x.dtype for n, x in weights(tmp_path / "out").items()} == {
        n: x.dtype for n, x in state.items()
    }


def test_n29_and_n30_links_of_the_hubs_cache_and_odd_paths(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--x--y ü [1] %"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in model.iterdir():
        shutil.copy(path, cache / "blobs" / f"{path.name}.blob")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}.blob")
    mha2gqa.convert(snapshot, tmp_path / "out [2]", 2)
    assert not [path for path in (tmp_path / "out [2]").iterdir() if path.is_symlink()]
    with pytest.raises(UsageError, match="lies inside SOURCE"):
        mha2gqa.convert(model, model / "out", 2)


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000, "\udcff", "\ud800"])
def test_names_that_no_file_can_have(
    model: Path, tmp_path: Path, text: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = str(tmp_path / "out")
    for call in (
        lambda: mha2gqa.plan(name, groups=2),
        lambda: mha2gqa.convert(name, out, 2),
        lambda: mha2gqa.evaluate(name, str(text), **SCORE),
        lambda: mha2gqa.evaluate([model, name], str(text), against=name, **SCORE),
        lambda: mha2gqa.evaluate(model, Path(name), **SCORE),
        lambda: mha2gqa.uptrain(name, out, str(text)),
        lambda: mha2gqa.convert(model, out, 2, calibration=name),
        lambda: read_config(name),
        lambda: push(name, "a/b"),
        lambda: check_output(name + "/x"),
    ):
        with pytest.raises(Mha2gqaError) as caught:
            call()
        assert len(str(caught.value)) <= 400 and str(caught.value).isprintable()
    assert not mha2gqa.verify(name).ok and not mha2gqa.verify(model, against=name).ok
    assert not Path(out).exists()


def test_n31_values_that_are_no_text(model: Path, tmp_path: Path, text: Path) -> None:
    nulls = tmp_path / "nulls.jsonl"
    nulls.write_text(text.read_text() + '{"text": null}\n{"text": ""}\n')
    assert score(model, nulls).tokens == score(model, text).tokens
    for name, content, said in (
        ("nums.jsonl", b'{"text": "w1"}\n{"text": 3}\n', r"nums\.jsonl:2: column 'text' holds a int"),
        ("arr.json", json.dumps([{"text": "w1"}]).encode(), r"arr\.json:1: holds a JSON array.*jq -c"),
        (
            "long.json",
            json.dumps([{"text": "w1"}], indent=1).encode(),
            r"long\.json:1: holds a JSON array.*jq -c",
        ),
        ("utf16.txt", "w1 w2".encode("utf-16"), "not UTF-8 at byte"),
        ("cut.jsonl.gz", gzip.compress(text.read_bytes())[:-20], "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=said):
            score(model, tmp_path / name)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["foo", "auto", 5, [], ["bfloat16"], True])
def test_a_config_that_names_no_format_of_numbers(
    key: str, value: object, model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("dtype", None)
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    refused(model, tmp_path / "out", rf"config\.json: {key} is .*; it must name a format, such as bfloat16")
    for fine in (None, "float32"):
        (model / "config.json").write_text(json.dumps(config | {key: fine}))
        assert mha2gqa.plan(model, groups=2).num_kv_heads["after"] == 2


def test_a_record_whose_own_header_is_broken(model: Path, tmp_path: Path) -> None:
    """As torch does: what lies behind a header that is none is not read."""
    state = weights(model)
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        place = next(i.header_offset for i in archive.infolist() if i.filename.endswith("data/1"))
    data = bytearray(file.read_bytes())
    data[place] ^= 2
    file.write_bytes(data)
    refused(model, tmp_path / "out", "records contradict its directory")


def test_a_number_that_no_float_holds_is_no_crash(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10**29}
    (model / "config.json").write_text(json.dumps(config))
    try:
        mha2gqa.convert(model, tmp_path / "out", 2)
    except Mha2gqaError as error:
        assert len(str(error)) <= 400


def test_a_file_of_statistics_that_cannot_have_its_name(model: Path, tmp_path: Path) -> None:
    """A statistics file: refused as the place of a result is."""
    name = "a" * 5000
    with pytest.raises(UsageError, match="name is too long"):
        mha2gqa.convert(model, tmp_path / "out", 2, statistics=tmp_path / name)


def test_a_record_that_its_pickle_does_not_name(model: Path, tmp_path: Path) -> None:
    """As torch does, which asks for the record that the pickle names."""
    state = weights(model)
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(state, file)
    data = file.read_bytes()
    spelled = b"X\x01\x00\x00\x001q"  # the key 1 as protocol 2 writes it
    assert data.count(spelled) == 1
    file.write_bytes(data.replace(spelled, spelled.replace(b"1q", b"sq")))
    refused(model, tmp_path / "out", "its pickle does not name its record")


NO_DATA = "no such file|neither a local file|cannot be a path"


@pytest.mark.parametrize(
    "name", ["no such thing", "w1 w2 w3 w4", "a" * 5000, "two words/and a/very long " + "x" * 90]
)
def test_words_on_the_command_line_are_never_the_text_itself(name: str, model: Path, tmp_path: Path) -> None:
    """A path that is misspelt, or a text: in Python a list of texts is data, a command line names files."""
    word_tokenizer(model)
    for words in (
        ["evaluate", str(model), "--data", name],
        ["convert", str(model), str(tmp_path / "out"), "--groups", "2", "--calibration", name],
        ["uptrain", str(model), str(tmp_path / "out"), "--data", name, "--tokens", "64", "--batch-tokens", "16",
         "--window", "8", "--teacher", "none"],
    ):  # fmt: skip
        result = CliRunner().invoke(cli, words)
        assert result.exit_code in (1, 2) and isinstance(result.exception, Mha2gqaError | SystemExit), words
        assert re.search(NO_DATA, str(result.exception)), words
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"source: {model}\noutput: {tmp_path}/o\nconvert: {{groups: 2}}\nevaluate: {{data: '{name}'}}\n"
    )
    with pytest.raises(DataError, match=NO_DATA):
        mha2gqa.run(recipe, dry_run=True)
    assert not list(tmp_path.glob("o*"))

"""Models that are written as another architecture, converted like any other, through every public door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_proofs import (
    difference,
    load_complete,
    make_every_weight_matter,
    read_config,
    read_tensors,
    write_folder,
)
from conftest import word_tokenizer
from reexpressed_picos import FALCON, GPT2, GPTJ, IDS, NEOX, OPT, ROUNDING, H
from transformers import AutoModelForCausalLM, AutoTokenizer

from mha2gqa.arch_conversion import ArchConvertedCheckpoint, as_architecture, carry_tokenizer, written
from mha2gqa.checkpoints.manifest import read_manifest
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.commands.estimate import plan
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError
from mha2gqa.evaluation import evaluate
from mha2gqa.reconstruct import ReconstructConfig
from mha2gqa.uptraining import uptrain
from mha2gqa.verification.checks import failed, verify

IDS_IN = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(3))
TEXT = "\n".join(json.dumps({"text": " ".join(f"w{(i * j) % 57}" for j in range(1, 80))}) for i in range(40))


def pico(path: Path, name: str = "GPTNeoX", config: dict[str, Any] = NEOX, dtype: Any = torch.float32) -> Any:
    """A source as transformers saves it, with a tokenizer."""
    cls = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))
    torch.manual_seed(0)
    model = cls(cls.config_class(**config)).float().eval()
    make_every_weight_matter(model)
    model.to(dtype).save_pretrained(path)
    word_tokenizer(path)
    return model


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model(IDS_IN).logits


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("neox") / "source"
    pico(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text(TEXT)
    return str(path)


def test_all_kv_heads_stay_the_same_function(neox: Path, tmp_path: Path) -> None:
    result = convert(neox, tmp_path / "out", H)
    assert result.reexpression == {"source_type": "gpt_neox", "target_type": "phi"}
    assert result.num_kv_heads == {"before": H, "after": H} and not failed(result.verification)
    assert difference(logits(tmp_path / "out"), logits(neox)) < ROUNDING
    manifest = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    assert manifest["reexpression"] == result.reexpression
    assert Path(read_manifest(tmp_path / "out")["source_path"]) == neox.resolve()


@pytest.mark.parametrize("method", ["mean", "first", "random", "align", "joint"])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_method_from_weights_alone(neox: Path, tmp_path: Path, method: str, groups: int) -> None:
    result = convert(neox, tmp_path / "out", groups, method=method)
    assert {check.name: check.ok for check in result.verification} == dict.fromkeys(
        ("files", "tensor names", "shapes", "loads", "twin oracles", "re-expression", "tokenizer"), True
    )
    assert not failed(verify(tmp_path / "out", against=neox, full=True).checks)
    assert read_config(tmp_path / "out")["num_key_value_heads"] == groups
    found = logits(tmp_path / "out")
    assert found.isfinite().all() and difference(found, logits(neox)) > 1e-2


def test_verify_against_finds_a_changed_tensor(neox: Path, tmp_path: Path) -> None:
    convert(neox, tmp_path / "out", 2, method="mean")
    for name in ("model.layers.0.mlp.fc1.weight", "model.layers.1.self_attn.k_proj.weight"):
        tensors = read_tensors(tmp_path / "out")
        tensors[name] = tensors[name] + 1e-3
        changed = tmp_path / name
        write_folder(changed, read_config(tmp_path / "out"), tensors)
        (changed / "mha2gqa.json").write_bytes((tmp_path / "out" / "mha2gqa.json").read_bytes())
        assert name in failed(verify(changed, against=neox).checks)


def test_tensors_that_only_change_their_name_keep_their_bytes(tmp_path: Path) -> None:
    pico(tmp_path / "source", dtype=torch.bfloat16)
    convert(tmp_path / "source", tmp_path / "out", 2, max_shard_size=20_000)
    old, new = read_tensors(tmp_path / "source"), read_tensors(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert torch.equal(
        new["model.layers.1.mlp.fc2.weight"], old["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"]
    )
    view = as_architecture(open_checkpoint(tmp_path / "source"), 2)
    assert isinstance(view, ArchConvertedCheckpoint) and view.tensors["model.layers.1.mlp.fc2.weight"].plain
    assert not view.tensors["model.layers.1.mlp.fc1.weight"].plain


def test_shards_and_old_bin_files(neox: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(neox)
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((neox / "config.json").read_bytes())
    torch.save(read_tensors(neox), tmp_path / "bin" / "pytorch_model.bin")
    right = read_tensors(convert_to(neox, tmp_path / "right"))
    for kind in ("shards", "bin"):
        found = read_tensors(convert_to(tmp_path / kind, tmp_path / f"{kind}-out"))
        assert found.keys() == right.keys() and all(torch.equal(found[n], right[n]) for n in right)


def convert_to(source: Path, out: Path, groups: int = 2) -> Path:
    convert(source, out, groups)
    return out


def test_folding_that_overflows_half_precision_is_refused(tmp_path: Path) -> None:
    pico(tmp_path / "source", dtype=torch.float16)
    tensors = read_tensors(tmp_path / "source")
    tensors["gpt_neox.layers.0.input_layernorm.weight"] *= 30_000
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] *= 100
    write_folder(tmp_path / "large", read_config(tmp_path / "source"), tensors)
    with pytest.raises(CheckpointError, match=r"too large for float16 when written as phi; save the source"):
        convert(tmp_path / "large", tmp_path / "out", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large", "source"]


def test_calibrated_conversion_cleans_up_and_is_joint(neox: Path, text: str, tmp_path: Path) -> None:
    statistics = tmp_path / "moments"
    quick = {"calibration_window": 16, "fit": ReconstructConfig(steps=20, batch_size=4)}
    result = convert(neox, tmp_path / "out", 2, calibration=[text], statistics=str(statistics), **quick)
    assert result.method == "joint" and "fitted" in result.calibration["losses"]
    assert not failed(verify(tmp_path / "out", against=neox).checks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moments", "out"]
    again = convert(neox, tmp_path / "again", 2, statistics=str(statistics))  # moments alone: no model runs
    assert again.method == "joint" and not failed(again.verification)


def test_symmetric_copies_stay_lossless_through_re_expression(tmp_path: Path) -> None:
    """Heads of a GPT-NeoX that are turned copies of each other merge into one without loss."""
    model = pico(tmp_path / "source")
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            for x in (layer.attention.query_key_value.weight, layer.attention.query_key_value.bias):
                heads = x.view(H, 3, 8, *x.shape[1:])  # [h, (q, k, v), d, …]
                heads[:, 1:] = heads[:1, 1:]
                heads[1, 1] *= 2.0  # a key twice as long, asked half as much
                heads[1, 0] *= 0.5
                heads[2, 2] *= -1.0  # a value of the other sign
            layer.attention.dense.weight.view(64, H, 8)[:, 2] *= -1.0
    model.save_pretrained(tmp_path / "copies")
    convert(tmp_path / "copies", tmp_path / "joint", 1, method="joint")
    convert(tmp_path / "copies", tmp_path / "mean", 1, method="mean")
    right = logits(tmp_path / "copies")
    assert difference(logits(tmp_path / "joint"), right) < 4 * ROUNDING
    assert difference(logits(tmp_path / "mean"), right) > 1e-2


def test_evaluate_and_distil_beside_the_original(neox: Path, text: str, tmp_path: Path) -> None:
    convert(neox, tmp_path / "out", 2)
    uptrain(
        tmp_path / "out", tmp_path / "up", [text], tokens=4096, window=16, batch_tokens=128, device="cpu",
        learning_rate=3e-3,
    )  # fmt: skip
    folders = [neox, tmp_path / "out", tmp_path / "up"]
    rows = evaluate(folders, [text], protocol="blocks", window=16, against=neox, device="cpu").models
    assert rows[0].tokens == rows[1].tokens and rows[0].kv_bytes_per_token == 4 * rows[1].kv_bytes_per_token
    assert rows[2].kl < 0.8 * rows[1].kl  # the teacher was the original, of another class
    manifest = json.loads((tmp_path / "up" / "mha2gqa.json").read_text())
    assert manifest["reexpression"]["target_type"] == "phi"
    assert not failed(verify(tmp_path / "up").checks)


def test_plan_says_what_the_model_becomes(neox: Path, tmp_path: Path) -> None:
    found = plan(neox, groups=2)
    assert (found.model_type, found.result_type, found.trust_remote_code) == ("gpt_neox", "phi", False)
    assert found.reexpression == {"source_type": "gpt_neox", "target_type": "phi"}
    assert found.valid_groups == [1, 2, 4, 8]
    convert(neox, tmp_path / "out", 2)
    written_bytes = sum(x.numel() * x.element_size() for x in read_tensors(tmp_path / "out").values())
    assert found.bytes["after"] == written_bytes
    pico(tmp_path / "gpt2", "GPT2", GPT2)
    found = plan(tmp_path / "gpt2")
    assert (found.result_type, found.trust_remote_code) == ("gqa_gpt2", True)
    assert [o["model_type"] for o in found.options] == ["gpt_bigcode", "gqa_gpt2", "gqa_gpt2", "gpt2"]
    assert plan(tmp_path / "gpt2", as_="gpt_bigcode").valid_groups == [1, H]
    assert plan(neox / "config.json", groups=2).result_type == "phi"  # without weights


@pytest.mark.parametrize(
    ("name", "config", "target"),
    [
        ("GPT2", GPT2, "gpt_bigcode"),
        ("OPT", OPT, "gpt_bigcode"),
        ("GPTJ", GPTJ, "phi"),
        ("CodeGen", GPTJ, "phi"),
    ],
)
def test_one_kv_head_needs_no_code_of_ours(tmp_path: Path, name: str, config: dict, target: str) -> None:
    pico(tmp_path / "source", name, config)
    result = convert(tmp_path / "source", tmp_path / "out", 1)
    assert result.reexpression["target_type"] == target and not failed(result.verification)
    raw = read_config(tmp_path / "out")
    assert raw["model_type"] == target and "auto_map" not in raw
    assert not list((tmp_path / "out").glob("*.py"))
    assert not failed(verify(tmp_path / "out", against=tmp_path / "source").checks)
    if target == "gpt_bigcode":
        kept = convert(tmp_path / "source", tmp_path / "own", 1, as_="none")  # our exported code instead
        assert kept.reexpression == {} and list((tmp_path / "own").glob("modeling_*.py"))
        assert difference(logits_of_ours(tmp_path / "own"), logits(tmp_path / "out")) < ROUNDING


def logits_of_ours(path: Path) -> torch.Tensor:
    from mha2gqa.checkpoints.loading import load_model

    with torch.no_grad():
        return load_model(path, dtype="float32", device="cpu")(IDS_IN).logits


def test_falcon_with_alibi_becomes_multi_query(tmp_path: Path) -> None:
    """Falcon-RW: all heads, ALiBi, sequential. One KV head is its own multi_query form, no other number."""
    model = pico(tmp_path / "random", "Falcon", {**FALCON, "alibi": True, "parallel_attn": False})
    with torch.no_grad():
        for layer in model.transformer.h:
            for x in (layer.self_attention.query_key_value.weight, layer.self_attention.query_key_value.bias):
                heads = x.view(H, 3, 8, *x.shape[1:])
                heads[:, 1:] = heads[:1, 1:].clone()  # one key and value head for all
    model.save_pretrained(tmp_path / "rw")
    convert(tmp_path / "rw", tmp_path / "out", 1)
    assert read_config(tmp_path / "out")["multi_query"] is True
    assert not failed(verify(tmp_path / "out", against=tmp_path / "rw").checks)
    assert difference(logits(tmp_path / "out"), logits(tmp_path / "rw")) < ROUNDING
    with pytest.raises(UsageError, match="all KV heads or one, nothing between"):
        convert(tmp_path / "rw", tmp_path / "no", 2)
    pico(tmp_path / "parallel", "Falcon", FALCON)
    with pytest.raises(UsageError, match=r"as_ falcon writes it so"):
        convert(tmp_path / "parallel", tmp_path / "no", 2)
    result = convert(tmp_path / "parallel", tmp_path / "new", 2, as_="falcon")
    assert read_config(tmp_path / "new")["num_kv_heads"] == 2 and not failed(result.verification)
    assert not failed(verify(tmp_path / "new", against=tmp_path / "parallel").checks)


def test_what_cannot_be_meant_is_refused_in_one_line(neox: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r'ignores num_key_value_heads; convert with as_="auto"'):
        convert(neox, tmp_path / "out", 2, as_="none")
    with pytest.raises(UsageError, match=r"as_: gpt_neox cannot be written as llama; it can be written as"):
        convert(neox, tmp_path / "out", 2, as_="llama")
    with pytest.raises(UsageError, match="this gpt_neox can only be written as phi"):
        convert(neox, tmp_path / "out", 2, as_="nemotron")
    with pytest.raises(UsageError, match="3 does not divide the 8 KV heads; try one of 1, 2, 4, 8"):
        convert(neox, tmp_path / "out", 3)
    pico(tmp_path / "gpt2", "GPT2", GPT2)
    with pytest.raises(UsageError, match="gpt_bigcode holds all KV heads or one"):
        convert(tmp_path / "gpt2", tmp_path / "out", 2, as_="gpt_bigcode")
    config = {"model_type": "baichuan", "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.X"}, **IDS}
    write_folder(tmp_path / "remote", config, {"model.norm.weight": torch.ones(4)})
    with pytest.raises(UnsupportedModelError, match="its own code cannot hold fewer KV heads; as_ llama"):
        convert(tmp_path / "remote", tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "config", "groups"),
    [
        ("GPTNeoX", NEOX, 2),
        ("GPTNeoX", {**NEOX, "tie_word_embeddings": True}, 2),
        ("GPT2", GPT2, 1),
        ("GPTJ", GPTJ, H),
    ],
)
def test_a_model_in_memory_becomes_what_its_file_becomes(
    tmp_path: Path, name: str, config: dict[str, Any], groups: int
) -> None:
    model = pico(tmp_path / "source", name, config)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    convert(tmp_path / "source", tmp_path / "out", groups)
    small = convert_model(model, groups)
    assert type(small).__name__ == read_config(tmp_path / "out")["architectures"][0]
    with torch.no_grad():
        assert difference(small(IDS_IN).logits, logits(tmp_path / "out")) < ROUNDING
    files, live = read_tensors(tmp_path / "out"), small.state_dict()
    assert all(torch.equal(x, live[key]) for key, x in files.items())
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    blocks = torch.randint(3, 60, (24, 17), generator=torch.Generator().manual_seed(5))
    fitted = convert_model(model, groups, calibration=blocks, fit=ReconstructConfig(steps=20, check_every=10))
    small.save_pretrained(tmp_path / "saved")
    assert logits(tmp_path / "saved").shape == (2, 11, 96) and fitted(IDS_IN).logits.isfinite().all()


# --- tokenizers ------------------------------------------------------------------------------------------


def gpt2_tokenizer(path: Path, kinds: str) -> None:
    """A byte-level tokenizer as old checkpoints hold it: vocab.json and merges.txt, no special token named."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {x: i for i, x in enumerate(["<|endoftext|>", *letters, "Ġw"])}
    for file in path.glob("*token*"):
        file.unlink()
    if "json" in kinds:
        tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "w")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.save(str(path / "tokenizer.json"))
    if "bpe" in kinds:
        (path / "vocab.json").write_text(json.dumps(vocab))
        (path / "merges.txt").write_text("#version: 0.2\nĠ w\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))


@pytest.mark.parametrize("kinds", ["bpe", "json+bpe"])
@pytest.mark.parametrize("target", ["gpt_bigcode", "nemotron", "phi"])
def test_the_tokenizer_reads_as_before(tmp_path: Path, kinds: str, target: str) -> None:
    """gpt_bigcode and nemotron name no tokenizer class: special tokens would vanish, or nothing would load."""
    for name, model_type in (("source", "gpt2"), ("out", target)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        gpt2_tokenizer(tmp_path / name, kinds)
    files = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    ok, detail = carry_tokenizer(tmp_path / "source", tmp_path / "out")
    assert ok is True
    source, out = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("source", "out"))
    probe = "wow  w12\n é<|endoftext|>"
    assert out(probe)["input_ids"] == source(probe)["input_ids"]
    assert out.eos_token_id == source.eos_token_id == 0 and out.bos_token_id == source.bos_token_id
    untouched = files == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert untouched == (target == "phi"), detail


def test_calibration_reads_what_the_result_will(tmp_path: Path) -> None:
    pico(tmp_path / "source", "GPT2", {**GPT2, "vocab_size": 300})
    gpt2_tokenizer(tmp_path / "source", "bpe")
    view = as_architecture(open_checkpoint(tmp_path / "source"), 1)
    with written(view, tmp_path / "out") as checkpoint:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
        assert tokenizer.eos_token_id == 0
        load_complete(transformers.GPTBigCodeForCausalLM, checkpoint.path)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]

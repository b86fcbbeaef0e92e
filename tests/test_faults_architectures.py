"""Faults of fused layouts and of head counts that people met in public (C18 … C27), with the right value.

"tiny" is a real class with hidden 32, 8 heads of 4, 2 layers; what is right is computed here with plain
reshapes, never with the package's own splitters.
"""

from __future__ import annotations

import itertools
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

from mha2gqa import arch_conversion
from mha2gqa.arch_conversion import neox
from mha2gqa.architectures import find_attention_modules, find_spec, geometry
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError
from mha2gqa.kv_cache import kv_bytes_per_token

H, D, d = 8, 32, 4
IDS = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 64, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": H,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT_SIZES = {
    "vocab_size": 64, "n_embd": D, "n_layer": 2, "n_head": H, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def tiny(cls: Any, path: Path, **config: Any) -> torch.nn.Module:
    """A random model with the real class, saved as transformers saves it."""
    torch.manual_seed(0)
    model = cls(cls.config_class(**config)).float().eval()
    make_every_weight_matter(model)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    return load_model(path, dtype="float32", device="cpu")(IDS).logits


def averaged(x: torch.Tensor, groups: int) -> torch.Tensor:
    """`[H, d, …]` with equal heads inside each group."""
    mean = x.view(groups, H // groups, *x.shape[1:]).mean(1, keepdim=True)
    return mean.expand(-1, H // groups, *x.shape[1:]).reshape(x.shape)


def shared_neox(path: Path, groups: int) -> Path:
    """A GPT-NeoX whose K/V heads (weights and biases) are averaged over groups, in the right layout."""
    model = tiny(transformers.GPTNeoXForCausalLM, path / "random", **SIZES, rotary_pct=0.5)
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            for x in (layer.attention.query_key_value.weight, layer.attention.query_key_value.bias):
                rows = x.view(H, 3, d, *x.shape[1:])  # per head q, k, v
                rows[:, 1:] = averaged(rows[:, 1:], groups)
    model.save_pretrained(path / "shared")
    return path / "shared"


# --- C18: per-head interleaved [q|k|v] --------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_c18_pooling_a_pooled_neox_again_changes_nothing(tmp_path: Path, groups: int) -> None:
    source = shared_neox(tmp_path, groups)
    convert(source, tmp_path / "out", groups, method="mean")
    assert difference(logits(tmp_path / "out"), logits(source)) < 1e-5


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_c18_a_flat_chunk_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf: str) -> None:
    """Splitting in three equal blocks gives the same shapes; nothing of it may be published."""
    source = shared_neox(tmp_path, 2)
    right = neox._neox_rows

    def chunked(part: int, heads: int, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(3)[part] if (x.dim() == 2) == (leaf == "weight") else right(part, heads, x)

    monkeypatch.setattr(neox, "_neox_rows", chunked)
    with pytest.raises(CheckpointError, match="re-expression: both classes' logits differ"):
        convert(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


# --- C19: equal split of a tensor whose K/V are smaller already -------------------------------------------


def test_c19_fused_rows_are_counted_not_cut_in_three(tmp_path: Path) -> None:
    tiny(transformers.Phi3ForCausalLM, tmp_path / "s", **SIZES, num_key_value_heads=2)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    fused = read_tensors(tmp_path / "s")[name]
    assert fused.shape == (48, D)
    convert(tmp_path / "s", tmp_path / "out", 1, method="first")
    found = read_tensors(tmp_path / "out")[name]
    q, k, v = fused[:32], fused[32:40], fused[40:48]  # 32, 8 and 8 rows; a chunk would take 16, 16, 16
    assert torch.equal(found, torch.cat([q, k[:d], v[:d]]))
    write_folder(
        tmp_path / "wrong",
        read_config(tmp_path / "s") | {"num_key_value_heads": H},
        read_tensors(tmp_path / "s"),
    )
    with pytest.raises(CheckpointError, match="config says 8 KV heads"):
        convert(tmp_path / "wrong", tmp_path / "no", 1)


# --- C21: Falcon's three flags ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "multi_query", "stated"), list(itertools.product([False, True], [False, True], [None, 2, H]))
)
def test_c21_falcon_is_what_its_rows_say(
    tmp_path: Path, new: bool, multi_query: bool, stated: int | None
) -> None:
    sizes = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "max_position_embeddings")}
    flags = {"new_decoder_architecture": new, "multi_query": multi_query, "num_kv_heads": stated}
    flags |= {"parallel_attn": True, "alibi": False, "bias": False}
    model = tiny(transformers.FalconForCausalLM, tmp_path / "s", **sizes, **flags)
    rows = model.transformer.h[0].self_attention.query_key_value.weight.shape[0]
    kv_heads = (stated or H) if new else (1 if multi_query else H)
    assert rows == (H + 2 * kv_heads) * d
    config = read_config(tmp_path / "s") | flags
    spec, shapes = find_spec(config), {n: tuple(x.shape) for n, x in read_tensors(tmp_path / "s").items()}
    assert {geometry(spec, config, s, shapes).num_kv_heads for s in find_attention_modules(spec, shapes)} == {
        kv_heads
    }
    if not new and not multi_query:
        with pytest.raises(UsageError, match="only Falcon's new_decoder_architecture holds that many"):
            convert(tmp_path / "s", tmp_path / "out", 2)
        assert not (tmp_path / "out").exists()
        # Stock Falcon fails on such a config where it states another number: nothing to check the result with.
        convert(tmp_path / "s", tmp_path / "one", 1, allow_unchecked=stated == 2)
        assert (
            read_tensors(tmp_path / "one")["transformer.h.0.self_attention.query_key_value.weight"].shape[0]
            == 40
        )


# --- C22: GPTBigCode's two layouts ------------------------------------------------------------------------


def test_c22_bigcode_holds_one_kv_head_in_block_order(tmp_path: Path) -> None:
    tiny(transformers.GPTBigCodeForCausalLM, tmp_path / "s", **GPT_SIZES, multi_query=False)
    convert(tmp_path / "s", tmp_path / "out", 1, method="first")
    old, new = (read_tensors(tmp_path / n)["transformer.h.1.attn.c_attn.weight"] for n in ("s", "out"))
    heads = old.view(H, 3, d, D)  # MHA: head by head
    assert new.shape == (40, D) and read_config(tmp_path / "out")["multi_query"] is True
    assert torch.equal(new, torch.cat([heads[:, 0].reshape(D, D), heads[0, 1], heads[0, 2]]))
    load_complete(transformers.GPTBigCodeForCausalLM, tmp_path / "out")
    with pytest.raises(UsageError, match="all KV heads or one"):
        convert(tmp_path / "s", tmp_path / "no", 2)


# --- C23: GPT-2's Conv1D stores [in, out] -----------------------------------------------------------------


def test_c23_conv1d_is_split_along_its_outputs(tmp_path: Path) -> None:
    """The case asks for a refusal; here G = 1 becomes GPTBigCode, and any G the exported class: both by columns."""
    tiny(transformers.GPT2LMHeadModel, tmp_path / "s", **GPT_SIZES)
    name = "transformer.h.0.attn.c_attn.weight"
    old = read_tensors(tmp_path / "s")[name]
    assert old.shape == (D, 96)
    q, k, v = (old[:, D * i : D * (i + 1)] for i in range(3))
    convert(tmp_path / "s", tmp_path / "one", 1, method="first")
    assert torch.equal(read_tensors(tmp_path / "one")[name], torch.cat([q.T, k[:, :d].T, v[:, :d].T]))
    convert(tmp_path / "s", tmp_path / "two", 2, method="first")
    first = [0, 1, 2, 3, 16, 17, 18, 19]  # the first head of each half
    assert torch.equal(read_tensors(tmp_path / "two")[name], torch.cat([q, k[:, first], v[:, first]], 1))
    with pytest.raises(UnsupportedModelError, match="gpt_neox"):
        convert(_renamed(tmp_path, "gpt_neox"), tmp_path / "no", 2, as_="none")


def _renamed(tmp_path: Path, model_type: str) -> Path:
    config = read_config(tmp_path / "s") | {"model_type": model_type}
    write_folder(tmp_path / model_type, config, read_tensors(tmp_path / "s"))
    return tmp_path / model_type


# --- C24: "GQA" checkpoints with all heads and a cache that is as large as before -------------------------

IGNORING = {
    "opt": (transformers.OPTForCausalLM, {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": D}),
    "gpt2": (transformers.GPT2LMHeadModel, GPT_SIZES),
    "gpt_neox": (transformers.GPTNeoXForCausalLM, {**SIZES, "rotary_pct": 0.5}),
    "bloom": (transformers.BloomForCausalLM, {"vocab_size": 64, "hidden_size": D, "n_layer": 2, "n_head": H}),
    "mpt": (
        transformers.MptForCausalLM,
        {"vocab_size": 64, "d_model": D, "n_layers": 2, "n_heads": H, "max_seq_len": 64},
    ),
    "persimmon": (transformers.PersimmonForCausalLM, SIZES),
}


@pytest.mark.parametrize("model_type", IGNORING)
def test_c24_a_key_that_the_class_ignores_saves_nothing(tmp_path: Path, model_type: str) -> None:
    """The stock class takes `num_key_value_heads` and keeps every head: either really fewer, or refused."""
    cls, config = IGNORING[model_type]
    model = tiny(cls, tmp_path / "s", **config, num_key_value_heads=2)
    before = sum(p.numel() for p in model.parameters())
    raw = read_config(tmp_path / "s") | {"num_key_value_heads": 2}
    write_folder(tmp_path / "stated", raw, read_tensors(tmp_path / "s"))
    try:
        convert(tmp_path / "stated", tmp_path / "out", 2)
    except UsageError as error:
        assert model_type == "persimmon" and "ignores num_key_value_heads" in str(error)
        return
    except CheckpointError as error:
        assert "config says 2 KV heads" in str(error)  # and so does nothing by halves
        raw.pop("num_key_value_heads")
        write_folder(tmp_path / "plain", raw, read_tensors(tmp_path / "s"))
        convert(tmp_path / "plain", tmp_path / "out", 2)
    small = load_model(tmp_path / "out", dtype="float32", device="cpu")
    k_and_v = 2 * 2 * (H - 2) * d * (D + (0 if model_type == "mpt" else 1))  # layers, k and v, heads, rows
    lost = before - sum(p.numel() for p in small.parameters())
    # Phi has one norm a layer where GPT-NeoX has two, and a bias of the head.
    assert lost == k_and_v + (2 * 2 * D - 64 if model_type == "gpt_neox" else 0)
    cache = small(IDS, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == 2
    assert kv_bytes_per_token(read_config(tmp_path / "out")) * 4 == kv_bytes_per_token(
        {k: v for k, v in raw.items() if k != "num_key_value_heads"}
    )


# --- C26 and C27: layouts of remote code ------------------------------------------------------------------


def test_c26_internlm2_rows_lie_by_group() -> None:
    """wqkv holds per KV head its queries, then k, then v; every row carries 100 * kind + head."""
    kv, per_group = 2, 4
    tags = []
    for g in range(kv):
        tags += [100.0 + g * per_group + i for i in range(per_group) for _ in range(d)]
        tags += [200.0 + g] * d + [300.0 + g] * d
    fused = torch.tensor(tags)[:, None].expand(-1, D)
    config = {
        **SIZES, "model_type": "internlm2", "num_key_value_heads": kv, "num_hidden_layers": 1, "bias": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.X"},
    }  # fmt: skip
    names = [
        "model.tok_embeddings.weight", "model.norm.weight", "output.weight",
        *(f"model.layers.0.{x}.weight" for x in (
            "attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
            "attention_norm", "ffn_norm",
        )),
    ]  # fmt: skip
    found = arch_conversion.plan(config, names, 1, "llama")
    assert found is not None

    def rows(part: str) -> list[float]:
        return found.recipes[f"model.layers.0.self_attn.{part}_proj.weight"].make(fused)[:, 0].tolist()

    assert rows("q") == [100.0 + h for h in range(H) for _ in range(d)]
    assert rows("k") == [200.0 + h for h in range(kv) for _ in range(d)]
    assert rows("v") == [300.0 + h for h in range(kv) for _ in range(d)]


def test_c27_baichuan_stays_refused_until_llama_is_asked_for(tmp_path: Path) -> None:
    tiny(transformers.LlamaForCausalLM, tmp_path / "llama", **SIZES)
    tensors = read_tensors(tmp_path / "llama")
    for i in range(2):
        stem = f"model.layers.{i}.self_attn"
        tensors[f"{stem}.W_pack.weight"] = torch.cat([tensors.pop(f"{stem}.{p}_proj.weight") for p in "qkv"])
    config = {k: v for k, v in read_config(tmp_path / "llama").items() if k != "num_key_value_heads"}
    config |= {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"]}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaiChuanForCausalLM"}}
    write_folder(tmp_path / "s", config, tensors)
    with pytest.raises(UnsupportedModelError, match="its own code cannot hold fewer KV heads; as_ llama"):
        convert(tmp_path / "s", tmp_path / "out", 2)
    convert(tmp_path / "s", tmp_path / "same", H, as_="llama")
    pack = tensors["model.layers.1.self_attn.W_pack.weight"]
    found = read_tensors(tmp_path / "same")
    for i, part in enumerate("qkv"):  # rows 0 … 31, 32 … 63, 64 … 95
        assert torch.equal(found[f"model.layers.1.self_attn.{part}_proj.weight"], pack[32 * i : 32 * (i + 1)])
    assert difference(logits(tmp_path / "same"), logits(tmp_path / "llama")) < 1e-6
    convert(tmp_path / "s", tmp_path / "two", 2, as_="llama")
    load_complete(transformers.LlamaForCausalLM, tmp_path / "two")

"""A model and its re-expression compute the same, with as many KV heads as before; then heads are shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_proofs import (
    load_complete,
    make_every_weight_matter,
    read_config,
    read_tensors,
    write_folder,
)
from reexpressed_picos import IDS, NEOX, OPT, ROUNDING, ROUTES, TARGETS, H, class_of, save_source

from mha2gqa import arch_conversion, convert
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError


@torch.no_grad()
def _logits(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    extra = {}
    if mask is not None and not isinstance(model, transformers.OPTForCausalLM):
        extra["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    return model(input_ids=ids, attention_mask=mask, **extra).logits


@torch.no_grad()
def _cached_logits(model: torch.nn.Module, ids: torch.Tensor, prompt: int = 5) -> torch.Tensor:
    """Logits of a prompt, then of one token at a time from the cache."""
    out = model(input_ids=ids[:, :prompt], use_cache=True)
    parts = [out.logits]
    for i in range(prompt, ids.shape[1]):
        out = model(input_ids=ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def _assert_equal(found: torch.Tensor, right: torch.Tensor, where: torch.Tensor | None = None) -> None:
    """To rounding, relative to the standard deviation of the original's logits, at every position that is no padding."""
    error = (found - right).abs() / right.std()
    assert float((error if where is None else error[where]).max()) < ROUNDING


@pytest.mark.parametrize("name", ROUTES)
def test_logits_stay_with_all_kv_heads(name: str, tmp_path: Path) -> None:
    source = save_source(name, tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source")
    as_, target = ROUTES[name][2:]
    found = arch_conversion.plan(checkpoint.config, checkpoint.tensors, None, as_)
    assert found is not None and found.target_type == target
    (tmp_path / "out").mkdir()
    arch_conversion.write(arch_conversion.ArchConvertedCheckpoint(checkpoint, found), tmp_path / "out")
    result = load_complete(class_of(TARGETS[target]), tmp_path / "out")

    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    right = _logits(source, ids)
    _assert_equal(_logits(result, ids), right)
    _assert_equal(_cached_logits(result, ids), right)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for padded in (mask, mask.flip(1)):  # left, right
        _assert_equal(_logits(result, ids, padded), _logits(source, ids, padded), padded.bool())
    greedy = [
        model.generate(
            ids, max_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0, eos_token_id=None
        )
        for model, cache in ((source, True), (result, True), (result, False))
    ]
    assert torch.equal(greedy[0], greedy[1]) and torch.equal(greedy[1], greedy[2])


@pytest.mark.parametrize("name", ["gpt_neox", "gptj", "opt"])
def test_shapes_are_known_without_reading(name: str, tmp_path: Path) -> None:
    save_source(name, tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source")
    found = arch_conversion.plan(checkpoint.config, checkpoint.tensors, 1)
    assert found is not None
    (tmp_path / "out").mkdir()
    arch_conversion.write(arch_conversion.ArchConvertedCheckpoint(checkpoint, found), tmp_path / "out")
    assert arch_conversion.shapes_of(found, checkpoint.shapes) == open_checkpoint(tmp_path / "out").shapes


def test_half_precision_is_folded_in_single(tmp_path: Path) -> None:
    """A fold of fp16 numbers is rounded once."""
    model = save_source("gpt_neox", tmp_path / "source").half()
    model.save_pretrained(tmp_path / "half")
    checkpoint = open_checkpoint(tmp_path / "half")
    found = arch_conversion.plan(checkpoint.config, checkpoint.tensors)
    assert found is not None
    recipe = found.recipes["model.layers.0.mlp.fc1.weight"]
    weight, gamma = (checkpoint.read(n) for n in recipe.sources)
    folded = recipe.make(weight, gamma)
    assert folded.dtype == torch.float16
    assert torch.equal(folded, (weight.double() * gamma.double()).half())


def test_routes_that_do_not_exist_are_refused_with_those_that_do() -> None:
    neox = {"model_type": "gpt_neox", "num_attention_heads": 8}
    with pytest.raises(
        UsageError, match=r"gpt_neox cannot be written as llama; it can be written as nemotron, phi"
    ):
        arch_conversion.plan(neox, [], 2, "llama")
    assert arch_conversion.plan(neox, [], 2, "gpt_neox") is None
    with pytest.raises(UsageError, match="holds all KV heads or one; use --groups 1"):
        arch_conversion.plan({"model_type": "gpt2", "n_head": 8}, [], 2, "gpt_bigcode")
    for groups in (2, 8, None):  # what can stay what it is does so
        assert arch_conversion.plan({"model_type": "gpt2", "n_head": 8}, [], groups) is None
    assert arch_conversion.plan(neox, [], 2, "none") is None
    assert arch_conversion.plan({"model_type": "llama"}, [], 2) is None
    assert arch_conversion.plan({"model_type": "baichuan"}, [], 2) is None, "remote code only where asked for"


def test_a_model_that_does_not_fit_says_why(tmp_path: Path) -> None:
    config = {"model_type": "opt", **OPT, "do_layer_norm_before": False}
    assert arch_conversion.plan(config, [], 1) is None
    with pytest.raises(UnsupportedModelError, match="norms come after attention"):
        arch_conversion.plan(config, [], 1, "gpt_bigcode")
    odd = {"model_type": "gpt_neox", **NEOX, "rotary_pct": 0.4}  # 3.2 of 8 dims
    names = [
        n.removeprefix("gpt_neox.")
        for n in transformers.GPTNeoXModel(class_of("GPTNeoX").config_class(**NEOX)).state_dict()
    ]
    with pytest.raises(UnsupportedModelError, match="an odd number"):
        arch_conversion.plan(odd, [*names, "embed_out.weight"])
    save_source("gpt_neox", tmp_path / "s")
    names = list(read_tensors(tmp_path / "s"))
    with pytest.raises(CheckpointError, match=r"no tensor gpt_neox.layers.1.mlp.dense_h_to_4h.weight"):
        arch_conversion.plan(
            read_config(tmp_path / "s"),
            [n for n in names if n != "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"],
        )
    with pytest.raises(CheckpointError, match=r"does not have: gpt_neox.layers.7.odd.weight"):
        arch_conversion.plan(read_config(tmp_path / "s"), [*names, "gpt_neox.layers.7.odd.weight"])


# --- remote-code checkpoints: written by hand from a Llama or Qwen2, and read back as one ---------------


def _reference(cls: Any, **own: Any) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": H,
        "max_position_embeddings": 64,
    }  # fmt: skip
    model = cls(cls.config_class(**IDS, **{**sizes, **own})).float().eval()
    make_every_weight_matter(model)
    return dict(model.state_dict()), model


def _as(state: dict[str, torch.Tensor], *renames: tuple[str, str]) -> dict[str, torch.Tensor]:
    out = {}
    for name, x in state.items():
        for old, new in renames:
            name = name.replace(old, new)
        out[name] = x
    return out


def _fused(state: dict[str, torch.Tensor], stem: str, into: str, leaf: str, by_group: int = 0) -> None:
    q, k, v = (state.pop(f"{stem}.self_attn.{p}_proj.{leaf}") for p in "qkv")
    if by_group:  # per KV head: its queries, then k, then v
        parts = [x.view(by_group, -1, *x.shape[1:]) for x in (q, k, v)]
        state[into] = torch.cat(parts, 1).flatten(0, 1)
    else:
        state[into] = torch.cat([q, k, v])


REMOTE_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": H, "rms_norm_eps": 1e-6, **IDS,
    "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}, "tie_word_embeddings": False,
}  # fmt: skip


def _check_remote(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], model: Any, tmp_path: Path, as_: str
) -> None:
    write_folder(tmp_path / "remote", config, tensors)
    checkpoint = open_checkpoint(tmp_path / "remote")
    found = arch_conversion.plan(checkpoint.config, checkpoint.tensors, 2, as_)
    assert found is not None and "auto_map" not in found.config
    (tmp_path / "out").mkdir()
    arch_conversion.write(arch_conversion.ArchConvertedCheckpoint(checkpoint, found), tmp_path / "out")
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    result = load_complete(type(model), tmp_path / "out")
    _assert_equal(_logits(result, ids), _logits(model, ids))


def test_baichuan_as_llama(tmp_path: Path) -> None:
    state, model = _reference(transformers.LlamaForCausalLM)
    for i in range(2):
        _fused(state, f"model.layers.{i}", f"model.layers.{i}.self_attn.W_pack.weight", "weight")
    config = {**REMOTE_SIZES, "model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"]}
    config |= {"intermediate_size": 80, "max_position_embeddings": 64}
    _check_remote(config, state, model, tmp_path, "llama")


def test_baichuan2_normalises_its_output_rows(tmp_path: Path) -> None:
    config = {**REMOTE_SIZES, "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    config |= {"intermediate_size": 80, "max_position_embeddings": 64, "vocab_size": 125_696}
    state, _ = _reference(transformers.LlamaForCausalLM)
    for i in range(2):
        _fused(state, f"model.layers.{i}", f"model.layers.{i}.self_attn.W_pack.weight", "weight")
    found = arch_conversion.plan(config, state, 2, "llama")
    assert found is not None
    head = found.recipes["lm_head.weight"].make(state["lm_head.weight"])
    assert torch.allclose(head.norm(dim=1), torch.ones(96))
    with pytest.raises(UnsupportedModelError, match="disagree"):
        arch_conversion.plan({**config, "vocab_size": 64_000}, state, 2, "llama")
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        arch_conversion.plan(
            {k: v for k, v in config.items() if k != "max_position_embeddings"}, state, 2, "llama"
        )


def test_internlm_as_llama(tmp_path: Path) -> None:
    state, model = _reference(transformers.LlamaForCausalLM, attention_bias=True)
    config = {**REMOTE_SIZES, "model_type": "internlm", "bias": True, "intermediate_size": 80}
    config |= {"max_position_embeddings": 64}
    _check_remote(config, state, model, tmp_path, "llama")


def test_internlm2_as_llama(tmp_path: Path) -> None:
    state, model = _reference(transformers.LlamaForCausalLM, num_key_value_heads=4)
    for i in range(2):
        _fused(state, f"model.layers.{i}", f"model.layers.{i}.attention.wqkv.weight", "weight", by_group=4)
    tensors = _as(
        state,
        ("model.embed_tokens", "model.tok_embeddings"), ("lm_head", "output"), ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
        ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
    )  # fmt: skip
    config = {**REMOTE_SIZES, "model_type": "internlm2", "num_key_value_heads": 4, "intermediate_size": 80}
    config |= {"bias": False, "max_position_embeddings": 64}
    _check_remote(config, tensors, model, tmp_path, "llama")


def test_qwen_as_qwen2(tmp_path: Path) -> None:
    state, model = _reference(transformers.Qwen2ForCausalLM, rope_theta=500.0, num_key_value_heads=H)
    for i in range(2):
        for leaf in ("weight", "bias"):
            _fused(state, f"model.layers.{i}", f"model.layers.{i}.attn.c_attn.{leaf}", leaf)
    tensors = _as(
        state,
        ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"), ("model.layers", "transformer.h"),
        ("self_attn.o_proj", "attn.c_proj"), ("mlp.down_proj", "mlp.c_proj"), ("mlp.gate_proj", "mlp.w2"),
        ("mlp.up_proj", "mlp.w1"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
    )  # fmt: skip
    config = {**REMOTE_SIZES, "model_type": "qwen", "intermediate_size": 160, "seq_length": 64}
    config |= {"rotary_emb_base": 500.0, "layer_norm_epsilon": 1e-6, "use_dynamic_ntk": True}
    _check_remote(config, tensors, model, tmp_path, "qwen2")
    found = arch_conversion.plan(json.loads(json.dumps(config)), tensors, 2, "qwen2")
    assert found is not None and "equal up to 64 tokens" in found.notes[0]


class DeepseekMoe(torch.nn.Module):
    """DeepSeekMoE's feed-forward part, by its formula: the likeliest experts weighed, and shared ones beside them."""

    def __init__(
        self, width: int, inner: int, experts: int, shared: int, chosen: int, normalise: bool
    ) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, experts, bias=False)
        self.experts = torch.nn.ModuleList(_swiglu(width, inner) for _ in range(experts))
        self.shared_experts = _swiglu(width, inner * shared)
        self.chosen, self.normalise = chosen, normalise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.gate(x).softmax(-1).topk(self.chosen, -1)
        weight = weight / weight.sum(-1, keepdim=True) if self.normalise else weight
        every = torch.stack([expert(x) for expert in self.experts], -2)  # [B, T, E, D]
        picked = every.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))
        return (weight[..., None] * picked).sum(-2) + self.shared_experts(x)


def _swiglu(width: int, inner: int) -> torch.nn.Module:
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = transformers.LlamaConfig(hidden_size=width, intermediate_size=inner)
    return LlamaMLP(config)


@pytest.mark.parametrize(("first", "every", "normalise"), [(1, 1, False), (0, 1, True), (1, 2, False)])
def test_deepseek_moe_as_qwen2_moe(tmp_path: Path, first: int, every: int, normalise: bool) -> None:
    config = {**REMOTE_SIZES, "model_type": "deepseek", "intermediate_size": 80, "num_hidden_layers": 3}
    config |= {
        "max_position_embeddings": 64,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "hidden_act": "silu",
    }
    config |= {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_layer_freq": every}
    config |= {"first_k_dense_replace": first, "norm_topk_prob": normalise, "scoring_func": "softmax"}
    torch.manual_seed(0)
    llama = {k: config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=H, max_position_embeddings=64, **llama, **IDS)
    )
    for number, layer in enumerate(model.model.layers):
        if number >= first and number % every == 0:
            layer.mlp = DeepseekMoe(64, 24, 6, 2, 3, normalise)
    model.float().eval()
    make_every_weight_matter(model)
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    write_folder(tmp_path / "remote", config, tensors)
    checkpoint = open_checkpoint(tmp_path / "remote")
    found = arch_conversion.plan(checkpoint.config, checkpoint.tensors, 2, "qwen2_moe")
    assert found is not None and "auto_map" not in found.config
    (tmp_path / "out").mkdir()
    arch_conversion.write(arch_conversion.ArchConvertedCheckpoint(checkpoint, found), tmp_path / "out")
    result = load_complete(transformers.Qwen2MoeForCausalLM, tmp_path / "out")
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    right = _logits(model, ids)
    _assert_equal(_logits(result, ids), right)
    _assert_equal(_cached_logits(result, ids), right)
    for changed in ({"scoring_func": "sigmoid"}, {"n_shared_experts": None}, {"routed_scaling_factor": 2.5}):
        with pytest.raises(UnsupportedModelError, match="Qwen2-MoE's experts differ"):
            arch_conversion.plan(config | changed, tensors, 2, "qwen2_moe")
    assert arch_conversion.plan(config, tensors, 2) is None, "remote code only where asked for"
    done = convert(tmp_path / "remote", tmp_path / "gqa", 2, method="joint", as_="qwen2_moe")
    assert all(check.ok for check in done.verification if check.ok is not None)
    with pytest.raises(UnsupportedModelError, match="as_ qwen2_moe"):
        convert(tmp_path / "remote", tmp_path / "other", 2)

"""Streaming moments against moments computed from every activation, and what may go wrong on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import pico_llama

from mha2gqa import calibration
from mha2gqa.architectures import AttentionSpec, find_attention_modules
from mha2gqa.calibration import collect, fingerprint, load_statistics
from mha2gqa.errors import CheckpointError, DataError, UsageError

SPEC = AttentionSpec()


def blocks(n: int = 5, t: int = 12) -> torch.Tensor:
    return torch.randint(64, (n, t), generator=torch.Generator().manual_seed(1))


def reference(model: torch.nn.Module, ids: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """The same moments, from activations kept whole and attention weights that transformers returns."""
    kept = {}
    attention = model.model.layers[layer].self_attn
    handles = [
        attention.register_forward_pre_hook(
            lambda m, a, k: kept.__setitem__("x", k["hidden_states"]), with_kwargs=True
        ),
        attention.q_proj.register_forward_hook(lambda m, a, out: kept.__setitem__("q", out)),
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions[layer].double()  # [B, H, T, T]
    for handle in handles:
        handle.remove()
    x = kept["x"].double()
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    mixed = torch.einsum("bhts,bsn->bhtn", weights, x)
    q = kept["q"].double().view(*ids.shape, 8, -1)
    n = ids.numel()
    share = (1 + weights.sum(2).mean(1)) / 2  # [B, T]: every query hands out one unit of attention
    return {
        "inputs": torch.einsum("bt,btn,btm->nm", share, x, x) / n,
        "mixed": torch.einsum("bhtn,bhtm->nm", mixed, mixed) / n / 8,
        "queries": torch.einsum("bthi,bthj->hij", q, q) / n,
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_moments_equal_those_of_kept_activations(implementation: str) -> None:
    model = pico_llama(attention_bias=True)
    model.set_attn_implementation(implementation)
    ids = blocks()
    found = collect(model, SPEC, ids, batch_size=2)
    assert model.config._attn_implementation == implementation
    for layer in range(2):
        module, want = found.modules[f"self.{layer}"], reference(model, ids, layer)
        assert module.tokens == 60 and not module.cross
        torch.testing.assert_close(module.inputs, want["inputs"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(module.mixed, want["mixed"], rtol=1e-5, atol=1e-7)
        planes = module.queries.diagonal(dim1=1, dim2=2).view(8, 2, 2).sum(1)  # half-split pairs (j, j + 2)
        wanted = want["queries"].diagonal(dim1=1, dim2=2).view(8, 2, 2).sum(1)
        torch.testing.assert_close(planes, wanted, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(module.inputs[-1, -1], torch.tensor(1.0, dtype=torch.float64))


def test_the_model_computes_the_same_while_it_is_observed() -> None:
    model, ids = pico_llama(), blocks()
    with torch.no_grad():
        want = model(input_ids=ids).logits
        with calibration.observing(model, {"model.layers.0.self_attn": model.model.layers[0].self_attn}):
            torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(input_ids=ids).logits, want)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_batches_do_not_matter_and_runs_are_equal_to_the_bit() -> None:
    model, ids = pico_llama(), blocks(6)
    a, b, c = (collect(model, SPEC, ids, batch_size=size) for size in (1, 6, 6))
    for key in a.modules:
        torch.testing.assert_close(a.modules[key].mixed, b.modules[key].mixed, rtol=1e-6, atol=1e-9)
        for name in ("inputs", "mixed", "queries"):
            assert torch.equal(getattr(b.modules[key], name), getattr(c.modules[key], name))
    seen: list[tuple[int, int]] = []
    collect(model, SPEC, ids, batch_size=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 6), (6, 6)]


def test_statistics_survive_a_file_to_the_bit(tmp_path: Path) -> None:
    model = pico_llama()
    found = collect(model, SPEC, blocks())
    back = load_statistics(found.save(tmp_path / "sub" / "s.safetensors"))
    (tmp_path / "usual").touch()
    assert (tmp_path / "sub" / "s.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert back.about == found.about and back.about["tokens"] == 60 and back.about["window"] == 12
    modules = find_attention_modules(SPEC, model.state_dict())
    assert back.about["model"] == fingerprint(modules, model.state_dict().__getitem__)
    for key, module in found.modules.items():
        for name in ("inputs", "mixed", "queries"):
            assert torch.equal(getattr(module, name), getattr(back.modules[key], name))
    assert back.of(modules[1]).tokens == 60
    for projection in "qkvo":  # a change of any one is another model
        changed = {k: v + (f"{projection}_proj" in k) for k, v in model.state_dict().items()}
        assert fingerprint(modules, changed.__getitem__) != back.about["model"]


def test_bad_statistics_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"nonsense")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(UsageError, match="statistics"):
            load_statistics(path)


def test_sliding_windows_and_soft_caps_are_in_the_weights() -> None:
    """The class's own mask and eager function are used, not a causal softmax of ours."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, head_dim=4, sliding_window=4, attn_logit_softcapping=0.5, initializer_range=0.3,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    ids = blocks()
    found = collect(model, SPEC, ids)
    for layer in range(2):
        want = reference(model, ids, layer)
        torch.testing.assert_close(found.modules[f"self.{layer}"].mixed, want["mixed"], rtol=1e-5, atol=1e-6)


def test_cross_attention_uses_what_keys_are_made_of() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=4, d_ff=48, num_layers=2, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    spec = AttentionSpec(
        modules=(
            ("self", "decoder.block.{layer}.layer.0.SelfAttention"),
            ("cross", "decoder.block.{layer}.layer.1.EncDecAttention"),
        ),
        prefixes=("",), q="q", k="k", v="v", o="o", position="relative", key_symmetry="linear",
    )  # fmt: skip
    ids = blocks(4, 9)
    found = collect(model, spec, {"input_ids": ids, "decoder_input_ids": blocks(4, 5)})
    with torch.no_grad():
        out = model(input_ids=ids, decoder_input_ids=blocks(4, 5))
    x = out.encoder_last_hidden_state.double()
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    cross, own = found.modules["cross.1"], found.modules["self.1"]
    assert cross.cross and not own.cross and cross.tokens == 36 and own.tokens == 20
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=ids, decoder_input_ids=blocks(4, 5), output_attentions=True)
    share = (1 + out.cross_attentions[1].double().sum(2).mean(1) * 9 / 5) / 2
    want = torch.einsum("bt,btn,btm->nm", share, x, x) / 36
    torch.testing.assert_close(cross.inputs, want, rtol=1e-5, atol=1e-7)
    assert cross.mixed is not None and cross.query_inputs is None
    torch.testing.assert_close(cross.mixed[-1, -1], torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_class_that_cannot_be_observed_falls_back_and_says_so() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=8)).eval()
    spec = AttentionSpec(
        modules=(("self", "h.{layer}.self_attention"),), prefixes=("transformer.",), q="query_key_value",
        k="query_key_value", v="query_key_value", o="dense", layout="per_head", position="alibi",
    )  # fmt: skip
    found = collect(model, spec, blocks())
    assert found.modules["self.1"].mixed is None and found.modules["self.1"].queries is None
    assert found.modules["self.1"].tokens == 60
    assert "does not let its attention be observed" in found.about["notes"][0]


def test_too_little_text_is_told() -> None:
    notes = collect(pico_llama(), SPEC, blocks(1, 8)).about["notes"]
    assert "8 calibration tokens" in notes[0] and "33" in notes[0]
    with pytest.raises(DataError, match="--calibration"):
        collect(pico_llama(), SPEC, blocks()[:0])


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_nan_activations_name_the_layer(name: str) -> None:
    model = pico_llama()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn"):
        collect(model, SPEC, blocks())


def test_float16_overflow_names_the_layer_and_the_remedy() -> None:
    model = pico_llama().half()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(3e5)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn.*bfloat16"):
        collect(model, SPEC, blocks())

"""Logits of some positions at a time equal the model's own, in float64, for every kind of output head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import pico_llama

from mha2gqa import lm_head
from mha2gqa.lm_head import ChunkedLogits, LMHead, chunk_slices, find_lm_head, finish_backward

PICO = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.5,
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "scaled": ("Cohere", {"logit_scale": 0.3}),
    "divided": ("Granite", {"logits_scaling": 6.0}),
    "soft-capped": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 4, "sliding_window": 64}),
    "biased": ("Phi", {}),
    "around its base": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
}


def build(kind: str, changes: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**PICO | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_chunks_are_the_models_own_logits(kind: str, dtype: torch.dtype) -> None:
    model = build(*HEADS[kind]).to(dtype)
    ids = torch.randint(0, 64, (2, 11))
    chunked = ChunkedLogits(model)
    assert chunked.head is not None and chunked.vocabulary == 64
    states = chunked.states(input_ids=ids)
    assert states.shape == (22, chunked.head.module.in_features)  # hidden states, not logits
    slices = chunk_slices(22, 64, "cpu", elements=64 * 5)
    assert [part.stop - part.start for part in slices] == [5, 5, 5, 5, 2]
    found = torch.cat([chunked.logits(states[part]) for part in slices])
    expected = model(input_ids=ids).logits.flatten(0, 1)
    tolerance = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found.to(dtype), expected.to(dtype), rtol=0, atol=tolerance)


@torch.no_grad()
def test_an_unknown_head_is_not_trusted() -> None:
    """A model that does something else to its logits is asked for them whole."""
    model = pico_llama()
    forward = model.forward

    def odd(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = 30 * torch.tanh(out.logits / 30)  # a soft cap that the config does not tell
        return out

    model.forward = odd
    assert find_lm_head(model) is None
    chunked, ids = ChunkedLogits(model), torch.randint(0, 64, (2, 11))
    states = chunked.states(input_ids=ids)
    assert torch.equal(chunked.logits(states[3:7]), odd(input_ids=ids).logits.flatten(0, 1)[3:7])


def test_a_small_undeclared_change_is_seen_in_half_precision_too() -> None:
    """Values far below a cap hardly change: the product itself is compared, not two products."""
    model = pico_llama(initializer_range=0.05).bfloat16()
    forward = model.forward

    def odd(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    model.forward = odd
    assert find_lm_head(model) is None


def test_a_declared_change_that_the_class_does_not_make_is_not_made() -> None:
    model = pico_llama()
    model.config.final_logit_softcapping = 2.0
    assert find_lm_head(model) is None


def test_states_changed_before_the_head_are_seen() -> None:
    model = pico_llama()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 1.01,))
    assert find_lm_head(model) is None


def test_encoder_decoders_are_asked_for_whole_logits() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    assert find_lm_head(T5ForConditionalGeneration(config)) is None


def test_a_model_is_probed_once_and_anew_with_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model, probes = pico_llama().train(), []
    probe = lm_head._probe
    monkeypatch.setattr(lm_head, "_probe", lambda *args: probes.append(1) or probe(*args))
    first = find_lm_head(model)
    assert find_lm_head(model) is first and len(probes) == 1 and model.training
    assert not model.lm_head._forward_hooks
    model.resize_token_embeddings(70, mean_resizing=False)
    second = find_lm_head(model)
    assert second is not None and second.module is model.lm_head and len(probes) == 2


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, None), (1.0, 2.0), (0.3, 2.0)])
def test_the_gradient_of_factor_and_cap_is_autograds(scale: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    product = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    logits = LMHead(torch.nn.Linear(1, 1), scale, softcap).finish(product)
    grad = torch.randn_like(product)
    (expected,) = torch.autograd.grad(logits, product, grad)
    torch.testing.assert_close(finish_backward(grad, logits.detach(), scale, softcap), expected)


@pytest.mark.parametrize("count", [0, 1, 7, 64, 65])
def test_slices_cover_all_positions_once_within_the_limit(count: int) -> None:
    slices = chunk_slices(count, 100, "cpu", elements=800)
    assert [i for part in slices for i in range(count)[part]] == list(range(count))
    assert all(part.stop - part.start <= 8 for part in slices)
    assert all(part.stop - part.start == 1 for part in chunk_slices(count, 10**9, "cpu"))  # never none

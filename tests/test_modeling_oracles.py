"""Oracles for the exported modelling code: the grouped-query class against the stock multi-head class."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from families import CASES, PICOS, H, assert_same, export_of, inputs, logits, stock_model
from torch import Tensor, nn
from transformers import GenerationMixin

from mha2gqa.architectures import find_attention_modules, find_spec, geometry
from mha2gqa.heads import expand, neighbours, split, unsplit
from mha2gqa.merging import MERGERS, MergeContext
from mha2gqa.modeling import (
    modeling_gqa_alibi,
    modeling_gqa_bart,
    modeling_gqa_gpt2,
    modeling_gqa_gpt_neo,
    modeling_gqa_moonshine,
    modeling_gqa_moonshine_streaming,
    modeling_gqa_musicgen,
    modeling_gqa_t5,
)

MODULES = {
    f"{m.__name__.rpartition('.')[2]}.py": m
    for m in (
        modeling_gqa_alibi,
        modeling_gqa_bart,
        modeling_gqa_gpt2,
        modeling_gqa_gpt_neo,
        modeling_gqa_moonshine,
        modeling_gqa_moonshine_streaming,
        modeling_gqa_musicgen,
        modeling_gqa_t5,
    )
}
GROUPS = {"self": 2, "cross": 4}  # none equals H / G, and the two differ
State = dict[str, Tensor]


def shared_states(name: str, state: Mapping[str, Tensor], groups: Mapping[str, int]) -> tuple[State, State]:
    """State of the grouped-query model (mean pooling) and of the stock model with those heads repeated."""
    config = {"model_type": PICOS[name][0], **PICOS[name][1]}
    spec = find_spec(config)
    shared, repeated = dict(state), dict(state)
    modules = find_attention_modules(spec, state)
    assert {module.kind for module in modules} == ({"self", "cross"} if export_of(name).cross else {"self"})
    for module in modules:
        tensors = {role: state[tensor] for role, tensor in module.names.items()}
        shape = geometry(spec, config, module, {n: tuple(x.shape) for n, x in state.items()})
        assert (shape.num_heads, shape.num_kv_heads) == (H, H)
        weights = split(spec, shape, tensors)
        merged = MERGERS["mean"](weights, neighbours(H, groups[module.kind]), MergeContext(spec, 0)).weights
        for role, x in unsplit(spec, merged).items():
            shared[module.names[role]] = x
        for role, x in unsplit(spec, expand(merged, H)).items():
            repeated[module.names[role]] = x
    return shared, repeated


def gqa_model(name: str, attention: str, state: State, groups: Mapping[str, int]) -> nn.Module:
    """The exported class with `state` loaded: no tensor may be missing or left over."""
    export = export_of(name)
    module = MODULES[export.file]
    changes: dict[str, Any] = copy.deepcopy(PICOS[name][1])
    holder = changes
    for key in export.within:
        holder = holder[key]
    holder[export.kv_keys[0]] = groups["self"]
    if export.cross:
        holder[export.kv_keys[1]] = groups["cross"]
    config = getattr(module, export.config)(**changes)
    model = getattr(module, export.model)._from_config(config, attn_implementation=attention).eval()
    model.load_state_dict(state)
    return model


def pair(name: str, attention: str) -> tuple[nn.Module, nn.Module]:
    """A grouped-query model and the multi-head model it must equal."""
    stock = stock_model(name, attention)
    shared, repeated = shared_states(name, stock.state_dict(), GROUPS)
    stock.load_state_dict(repeated)
    return gqa_model(name, attention, shared, GROUPS), stock


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_equals_the_stock_model_with_its_shared_heads_repeated(name: str, attention: str) -> None:
    gqa, stock = pair(name, attention)
    ours, theirs = logits(gqa, inputs(name)), logits(stock, inputs(name))
    assert theirs.std() > 0.1
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", PICOS)
def test_heads_identical_within_groups_are_pooled_bit_for_bit(name: str) -> None:
    stock = stock_model(name)
    once, repeated = shared_states(name, stock.state_dict(), GROUPS)
    twice, again = shared_states(name, repeated, GROUPS)
    assert all(torch.equal(once[n], twice[n]) for n in once)
    assert all(torch.equal(repeated[n], again[n]) for n in repeated)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_as_many_groups_as_heads_is_the_stock_model(name: str, attention: str) -> None:
    stock = stock_model(name, attention)
    gqa = gqa_model(name, attention, stock.state_dict(), {"self": H, "cross": H})
    assert_same(logits(gqa, inputs(name)), logits(stock, inputs(name)))


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.parametrize("groups", [{"self": 1, "cross": 8}, {"self": 8, "cross": 1}])
def test_one_kind_of_attention_alone_can_be_shared(name: str, attention: str, groups: dict[str, int]) -> None:
    stock = stock_model(name, attention)
    shared, repeated = shared_states(name, stock.state_dict(), groups)
    stock.load_state_dict(repeated)
    gqa = gqa_model(name, attention, shared, groups)
    assert_same(logits(gqa, inputs(name)), logits(stock, inputs(name)))


def padded(batch: dict[str, Tensor], left: bool) -> dict[str, Tensor]:
    """The batch with four padding tokens beside every row of `input_ids`."""
    ids = batch["input_ids"]
    pad, real = torch.ones_like(ids[:, :4]), torch.ones_like(ids)
    order = (lambda a, b: [b, a]) if left else (lambda a, b: [a, b])
    return {
        **batch,
        "input_ids": torch.cat(order(ids, pad), 1),
        "attention_mask": torch.cat(order(real, 0 * pad), 1),
    }


@pytest.mark.parametrize(
    ("name", "attention"),
    # Two hear sounds; a prefix that is padded takes the positions of what follows it, in the stock model as well.
    [
        c
        for c in CASES
        if PICOS[c[0]][0] not in ("whisper", "moonshine", "moonshine_streaming", "musicgen_melody")
    ],
)
def test_padding_changes_nothing(name: str, attention: str) -> None:
    gqa, _ = pair(name, attention)
    batch = inputs(name)
    if export_of(name).cross:  # the encoder's padding is on the right
        ours, plain = logits(gqa, padded(batch, left=False)), logits(gqa, batch)
    else:
        mixed = padded(batch, left=True)
        position = (mixed["attention_mask"].cumsum(1) - 1).clamp(min=0)
        accepts = "position_ids" in inspect.signature(gqa.forward).parameters
        ours = logits(gqa, {**mixed, **({"position_ids": position} if accepts else {})})[:, 4:]
        plain = logits(gqa, batch)
    assert_same(ours, plain)


def generate(model: nn.Module, name: str, **options: Any) -> Any:
    """Six tokens, greedy or beam, with a cache unless told otherwise (MPT's config says no)."""
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "eos_token_id": None, **options}
    batch = {k: v for k, v in inputs(name).items() if k != "decoder_input_ids"}
    if "input_ids" in batch:
        batch = padded(batch, left=not export_of(name).cross)
    if PICOS[name][0] == "whisper":  # Whisper's own generate wants language tokens; the loop is the same
        return GenerationMixin.generate(model, **batch, decoder_input_ids=torch.full((3, 1), 2), **options)
    return model.generate(**batch, **options)


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_decoding_equals_uncached_and_the_stock_model(name: str, attention: str, beams: int) -> None:
    if beams > 1 and name.startswith("musicgen"):
        pytest.skip("MusicGen decodes greedily or samples")
    gqa, stock = pair(name, attention)
    cached = generate(gqa, name, num_beams=beams)
    assert torch.equal(cached, generate(gqa, name, num_beams=beams, use_cache=False))
    assert torch.equal(cached, generate(stock, name, num_beams=beams))


@pytest.mark.parametrize("name", PICOS)
def test_the_cache_holds_the_shared_heads_only(name: str) -> None:
    gqa, _ = pair(name, "eager")
    out = generate(gqa, name, return_dict_in_generate=True)
    cache = out.get("cache", out.get("past_key_values"))
    kinds = (
        {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
        if export_of(name).cross
        else {"self": getattr(cache, "self_attention_cache", cache)}
    )
    for kind, part in kinds.items():
        layers = part.layers[:2]  # T5 makes as many as the encoder has
        assert [layer.keys.shape[1] for layer in layers] == [GROUPS[kind]] * 2
        assert [layer.values.shape[1] for layer in layers] == [GROUPS[kind]] * 2


@pytest.mark.parametrize(
    "name", ["t5", "umt5", "bart", "whisper", "moonshine", "gpt2", "opt", "bloom", "mpt"]
)
def test_training_reaches_the_shared_projections_and_matches_the_stock_loss(name: str) -> None:
    gqa, stock = pair(name, "eager")
    batch = inputs(name)
    labels = batch.get("decoder_input_ids", batch.get("input_ids"))
    losses = [model.train()(**batch, labels=labels).loss for model in (gqa, stock)]
    assert_same(losses[0], losses[1])
    losses[0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in gqa.named_parameters() if ".k" in n)


@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "whisper", "moonshine", "gpt2", "opt"])
def test_attention_weights_can_be_asked_for(name: str) -> None:
    gqa, stock = pair(name, "eager")
    with torch.no_grad():
        ours = gqa(**inputs(name), output_attentions=True)
        theirs = stock(**inputs(name), output_attentions=True)
    for key in ("attentions", "decoder_attentions", "cross_attentions"):
        for a, b in zip(ours.get(key) or (), theirs.get(key) or (), strict=True):
            assert_same(a, b)
    assert ours.get("decoder_attentions", ours.get("attentions"))[0].shape[1] == H


def test_files_share_the_same_lines_to_the_letter() -> None:
    marker = "# --- the same lines in every exported file that uses the attention interface"
    users = (
        modeling_gqa_bart, modeling_gqa_gpt2, modeling_gqa_gpt_neo, modeling_gqa_musicgen, modeling_gqa_t5,
    )  # fmt: skip
    blocks = {inspect.getsource(m).split(marker)[1].split("\n# --- ")[0] for m in users}
    assert len(blocks) == 1
    for name in ("check_heads",):
        assert len({inspect.getsource(getattr(m, name)) for m in MODULES.values()}) == 1


def test_impossible_head_counts_are_refused() -> None:
    for name in ("t5", "bart", "gpt2", "opt", "bloom", "mpt"):
        with pytest.raises(ValueError, match="3 key/value heads cannot serve 8"):
            gqa_model(name, "eager", {}, {"self": 3, "cross": 3})

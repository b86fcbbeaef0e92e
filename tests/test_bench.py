"""`bench`: the step it times is real decoding, on a cache that stays as long as it is, and its bytes add up."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pico_models import model_class, pico_config

from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.commands import bench as bench_module
from mha2gqa.commands import decode, fixed_cache, growing_cache, merged, step_times
from mha2gqa.commands.bench import bench, longest_context
from mha2gqa.commands.step_variants import Variant, agree, variants
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import UsageError
from mha2gqa.uptraining.model_prep import repeated_layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "llama"
    torch.manual_seed(0)
    model_class("llama")(pico_config("llama")).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quick_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a small buffer."""
    real = step_times.copy_bandwidth
    monkeypatch.setattr(bench_module, "copy_bandwidth", lambda device: real(device, 0.001))


def live(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = model_class(model_type)(pico_config(model_type, **changes)).eval()
    return model, json.loads(model.config.to_json_string(use_diff=False))


def test_every_model_gets_the_same_conditions_and_its_bytes_add_up(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", 2)
    result = bench([model, tmp_path / "out"], batch=2, context=16, new_tokens=3, bandwidth=1e9)
    full, grouped = result.models
    assert full["kv_bytes"] == 4 * grouped["kv_bytes"] == 2 * 2 * 8 * 8 * 4 * 2 * 16
    assert result.copy_bandwidth is not None and result.copy_bandwidth > 0
    embedding = (
        open_checkpoint(model).tensors["model.embed_tokens.weight"].nbytes
    )  # a row of it is read for a token
    for row in result.models:
        assert row["step_bytes"] == row["weight_bytes"] - embedding + row["kv_bytes"]
        assert row["tokens_per_second"] * row["milliseconds_per_step"] == pytest.approx(2000)
        assert row["share_of_bandwidth"] == pytest.approx(row["bytes_per_second"] / 1e9)
        assert row["floor_milliseconds"] == pytest.approx(row["step_bytes"] / 1e6)
        assert row["first_token_milliseconds"] > 0 and row["native_gqa"]
        assert row["step"] == "fixed cache, no mask" and not row["cuda_graph"]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"num_key_value_heads": 8}),
        ("gpt_bigcode", {"multi_query": True}),
        ("olmo2", {"num_key_value_heads": 1}),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": 16}),
    ],
)
@torch.inference_mode()
def test_the_timed_step_computes_what_a_full_pass_does(model_type: str, changes: dict[str, Any]) -> None:
    """Also where a layer keeps no more than its window."""
    model, config = live(model_type, **changes)
    before = model.config._attn_implementation
    step = decode.FixedStep(model, config, 3, 40)
    with decode._ours(step):
        step.prefill()
        token = step.token.clone()
        for _ in range(2):  # the cache is as long as before: the same step again
            step.token.copy_(token)
            logits = model(input_ids=step.token, position_ids=step.position, **step.keys_and_values).logits
    window = changes.get("sliding_window", 40)
    assert {part.key.shape[2] for part in step.cache.parts} == {min(40, window)}
    full = model(torch.cat([step.prompt.expand(3, -1), token], 1)).logits[:, -1:]
    assert model.config._attn_implementation == before
    assert float((logits - full).abs().max()) < torch.finfo(torch.float32).eps * 256 * float(full.abs().max())


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 8), (4, 1)])
@pytest.mark.parametrize("scaling", [None, 0.5])
@torch.inference_mode()
def test_one_token_attends_to_every_slot(heads: int, kv_heads: int, scaling: float | None) -> None:
    """Against softmax written out in float64."""
    torch.manual_seed(0)
    slots, width = 48, 16
    query = torch.randn(3, heads, 1, width) * 3
    key, value = torch.randn(2, 3, kv_heads, slots, width)
    repeat = heads // kv_heads
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (key, value))
    logits = query.double() @ k.mT * (width**-0.5 if scaling is None else scaling)
    found = fixed_cache.one_token(query, key, value, scaling)
    assert torch.allclose(found.double(), logits.softmax(-1) @ v, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_the_fastest_kernel_is_found_among_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of a GPU, with the clock and the waiting of a CPU."""
    part = fixed_cache.LayerCache(2, 2, 256, (16, 16), torch.zeros(1))
    tried = []

    def timed(call: Any) -> float:
        output = call()
        assert output.shape == (2, 4, 1, 16)
        tried.append(call)
        return 1.0 / len(tried)

    monkeypatch.setattr(fixed_cache, "timed", timed)
    kernels = [fixed_cache.Kernel(f"{name}_ATTENTION") for name in ("CUDNN", "FLASH")] + [
        fixed_cache.Kernel("MATH")
    ]
    monkeypatch.setattr(fixed_cache, "KERNELS", kernels)  # a processor has no cuDNN
    kernel, seconds = fixed_cache.quickest(part, 4)
    assert kernel == kernels[-1]  # the last is the fastest here
    assert seconds == {"flash": 1.0, "math": 0.5}
    assert fixed_cache.fastest(part, 4) == (fixed_cache.Kernel(), {})  # nothing to choose without a GPU


@torch.inference_mode()
def test_a_step_on_a_chosen_kernel_computes_what_a_full_pass_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that a GPU makes, on a wide model whose rotary frequencies are looked up in every pass.

    Layers are traced as for a compiler; what the compiler of this machine makes of them is seen by `make slow`.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(decode, "fastest", lambda part, heads: (fixed_cache.Kernel("MATH"), {"x": 1.0}))
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, "attention_factor": 1.0}
    rope |= {"short_factor": [1.5] * 4, "long_factor": [1.5] * 4, "original_max_position_embeddings": 16}
    model, config = live("llama", num_key_value_heads=2, num_hidden_layers=3, rope_parameters=rope)
    step = decode.FixedStep(model, config, 2, 32, compiled=True)
    with decode._ours(step):
        step.prefill()
        token = step.token.clone()
        step.prepare()
        assert step.compiled and not step.warnings and step.kernels == {"x": 1.0}
        assert step.measure(1) > 0
        step.token.copy_(token)
        step.step()
    assert model.model.rotary_emb.rope_type == "longrope"
    full = model(torch.cat([step.prompt.expand(2, -1), token], 1)).logits[:, -1:].argmax(-1)
    assert torch.equal(step.token, full)


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_layers_share_one_program_and_compute_the_same() -> None:
    """The code path of a GPU, on the CPU's compiler: one graph for all layers, then everything as before."""
    model, config = live("llama", num_key_value_heads=2, num_hidden_layers=3)
    step = decode.FixedStep(model, config, 2, 12, compiled=True)
    with decode._ours(step):
        step.prefill()
        token = step.token.clone()
        torch._dynamo.utils.counters.clear()
        step.prepare()
        assert step.compiled and not step.warnings
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        step.token.copy_(token)
        step.step()
        compiled = step.token.clone()
    full = model(torch.cat([step.prompt.expand(2, -1), token], 1)).logits[:, -1:].argmax(-1)
    assert torch.equal(compiled, full)
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]


def test_a_model_that_does_not_compile_is_timed_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = live("llama")

    def broken(model: Any) -> int:
        for layer in model.model.layers:
            layer.forward = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no compiler\nat all"))
        return 1

    monkeypatch.setattr(decode, "compile_layers", broken)
    times = decode.fixed_step(model, config, 1, 8, 2, compiled=True)
    assert not times.compiled and times.warnings == ("layers not compiled: no compiler",)


WAYS = [
    Variant(),
    Variant(True),
    Variant(True, merged=True),
]


@pytest.mark.parametrize("fastest", range(len(WAYS)))
def test_the_fastest_way_to_run_the_layers_is_taken_and_computes_the_same(
    fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice that a GPU makes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(decode, "variants", lambda device, compiled: WAYS)
    clock = iter([1.0 if i == fastest else 2.0 for i in range(len(WAYS))])
    monkeypatch.setattr(decode.FixedStep, "time", lambda self, steps: (self.replay(), next(clock))[1])
    model, config = live("llama", num_key_value_heads=2, num_hidden_layers=3)
    before = {name: x.clone() for name, x in model.named_parameters()}
    step = decode.FixedStep(model, config, 2, 12, compiled=True)
    with torch.inference_mode(), decode._ours(step):
        step.prefill()
        token = step.token.clone()
        step.prepare()
        assert step.variant == WAYS[fastest] and not step.warnings
        assert set(step.seconds) == {str(way) for way in WAYS} and len(set(map(str, WAYS))) == len(WAYS)
        step.token.copy_(token)
        step.step()
    full = model(torch.cat([step.prompt.expand(2, -1), token], 1)).logits[:, -1:].argmax(-1)
    assert torch.equal(step.token, full)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())
    assert not any(x.is_inference() for x in model.parameters())


@torch.inference_mode()
def test_a_way_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "variants", lambda device, compiled: [Variant(), Variant(merged=True)])
    seconds = iter([2.0, 1.0])
    monkeypatch.setattr(decode.FixedStep, "time", lambda self, steps: (self.replay(), next(seconds))[1])
    monkeypatch.setattr(
        merged.Shared, "read", lambda self, x, begin, end: x.new_zeros(*x.shape[:-1], end - begin)
    )
    model, config = live("llama")
    step = decode.FixedStep(model, config, 2, 12)
    with decode._ours(step):
        step.prefill()
        step.prepare()
    assert step.variant == Variant() and list(step.seconds) == ["layers as they are"]
    assert step.warnings == ["layers as they are, merged projections: not taken, its logits are others"]


@torch.inference_mode()
def test_weights_that_a_captured_step_reads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the addresses that it was captured with; merging gives the weights others."""
    monkeypatch.setattr(decode, "variants", lambda device, compiled: [Variant(), Variant(merged=True)])
    seconds, read = iter([1.0, 2.0]), []
    monkeypatch.setattr(decode.FixedStep, "time", lambda self, steps: next(seconds))
    model, config = live("llama")
    step = decode.FixedStep(model, config, 2, 12)
    monkeypatch.setattr(step, "_capture", lambda: read.append([p.data_ptr() for p in model.parameters()]))
    with decode._ours(step):
        step.prefill()
        step.prepare()
        assert step.variant == Variant() and [x.data_ptr() for x in step.weights] == read[0] != read[1]


def test_ways_are_offered_where_there_is_a_choice() -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert variants(cpu, True) == [Variant(True)] and variants(cpu, False) == [Variant()]
    assert variants(card, False) == [Variant()]
    assert variants(card, True) == WAYS
    assert agree(torch.ones(3), torch.ones(3) * 1.01) and not agree(torch.ones(3), -torch.ones(3))
    assert not agree(torch.tensor([float("nan")]), torch.ones(1))


@pytest.mark.parametrize(
    ("model_type", "changes"), [("qwen2", {}), ("llama", {"attention_bias": True}), ("gpt_neox", {})]
)
@torch.no_grad()
def test_merged_projections_give_what_each_gives(model_type: str, changes: dict[str, Any]) -> None:
    """With biases; a layer of other names stays as it is. Read in any order, and once or twice."""
    model, _ = live(model_type, **changes)
    ids = torch.arange(10)[None]
    before = model(ids).logits
    done = [m for layer in repeated_layers(model) for m in merged.merge_projections(layer)]
    sizes = [len(shared.modules) for shared in done]
    assert sizes == ([] if model_type == "gpt_neox" else [3, 2] * len(repeated_layers(model)))
    assert torch.allclose(model(ids).logits, before, atol=1e-6)
    if done:
        assert not merged.merge_projections(repeated_layers(model)[0])  # they are
        attention, x = repeated_layers(model)[0].self_attn, torch.randn(2, 3, model.config.hidden_size)
        for name in "vqqkv":
            module = getattr(attention, f"{name}_proj")
            y = torch.nn.functional.linear(x, module.weight, module.bias)
            assert torch.allclose(module(x), y, atol=1e-5)
    merged.undo_merge(done)
    assert torch.allclose(model(ids).logits, before, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bloom", "attention interface"),
        ("gemma2", "softcap"),
        ("gpt_oss", "s_aux"),
        ("bamba", "not every layer"),
    ],
)
def test_other_kinds_of_attention_are_timed_in_their_own_loop(model_type: str, why: str) -> None:
    model, config = live(model_type)
    before = model.config._attn_implementation
    times = bench_module.time_decoding(model, config, 2, 12, 2)
    assert times.path == "growing cache" and not times.native_gqa
    assert why in times.warnings[0] and times.seconds > 0
    assert model.config._attn_implementation == before


def test_cached_steps_of_the_growing_loop_attend_to_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step sees one more cached token, the last as many as were asked for; no kernel plans for it anew."""
    model, _ = live("llama")
    seen, planned = [], []
    original = type(model).forward

    def forward(self: Any, *args: Any, **words: Any) -> Any:
        cache = words.get("past_key_values")
        seen.append((0 if cache is None else cache.get_seq_length(), words["input_ids"].shape[1]))
        planned.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(self, *args, **words)

    monkeypatch.setattr(type(model), "forward", forward)
    times = growing_cache.growing_cache(model, 2, 16, 2)
    assert seen[:3] == [(0, 11)] * 3 and seen[3:] == [(11 + i, 1) for i in range(5)]
    assert times.context == 16
    assert all(planned[:3]) and not any(planned[3:]) and torch.backends.cuda.cudnn_sdp_enabled()


def test_the_context_is_shortened_to_what_the_models_reach(model: Path) -> None:
    longest = longest_context(json.loads((model / "config.json").read_text()))
    assert longest == 128 and longest_context({"model_type": "bloom"}) is None
    assert bench(model, context=longest, new_tokens=1).warnings == []
    result = bench(model, context=4096, new_tokens=1)
    assert result.context == result.models[0]["context"] == 128
    assert "context is 128, not 4,096" in result.warnings[0]


@pytest.mark.slow
def test_budgets_hold_as_many_sequences_as_the_cache_leaves_room_for(model: Path) -> None:
    plain = bench(model, context=16, new_tokens=1).models[0]
    room = (plain["weight_bytes"] + 5.5 * plain["kv_bytes"]) / 0.9
    budget, none = bench(model, context=16, new_tokens=1, memory=[room, 1000.0]).models[0]["budgets"]
    assert budget["batch"] == 5 and budget["tokens_per_second"] > 0
    assert none["batch"] == 0 and none["tokens_per_second"] is None and "not one" in none["reason"]


def test_a_cache_that_does_not_fit_says_by_how_much_and_what_would(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench(model, context=16, new_tokens=1).models[0]["kv_bytes"]
    monkeypatch.setattr(bench_module, "free_memory", lambda device: int(3.5 * one))
    with pytest.raises(UsageError, match=r"does not fit.*batch 3"):
        bench(model, batch=8, context=16)
    monkeypatch.setattr(bench_module, "free_memory", lambda device: one // 2)
    with pytest.raises(UsageError, match="batch 1 and context 8"):
        bench(model, batch=8, context=16)


def test_memory_that_ends_during_a_step_is_one_line_and_a_budget_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    loaded, config = live("llama")
    monkeypatch.setattr(bench_module, "time_decoding", ends)
    with pytest.raises(UsageError, match=r"out of memory beside a cache of .* use a smaller batch"):
        bench(model, context=16, new_tokens=1)
    row = bench_module.budget_row(loaded, config, 1e9, context=16)
    assert row["tokens_per_second"] is None and "out of memory" in row["reason"]


def test_the_copy_moves_bytes() -> None:
    assert step_times.copy_bandwidth(torch.device("cpu"), 0.001) > 0

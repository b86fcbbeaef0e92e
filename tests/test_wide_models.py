"""Wide heads in the stock classes: a GQA-G model placed in them computes the same; conversion, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_proofs import make_every_weight_matter
from conftest import pico_llama, word_tokenizer
from pico_models import HEADS, model_class, pico_config, pico_inputs
from reexpressed_picos import ROUTES, save_source
from safetensors.torch import load_file
from test_calibrated_fits import write_text
from walk_worker import OPTIONS

import mha2gqa
from mha2gqa.architectures import (
    AttentionSpec,
    config_changes,
    find_attention_modules,
    find_spec,
    query_scale,
    rotary_dim,
    wide_changes,
)
from mha2gqa.architectures import geometry as geometry_of
from mha2gqa.architectures.registry import SUPPORTED
from mha2gqa.checkpoints.reader import edit_config
from mha2gqa.commands.estimate import plan
from mha2gqa.commands.export import FORMATS, export
from mha2gqa.conversion.work_dir import WorkDir
from mha2gqa.errors import UnsupportedModelError, UsageError
from mha2gqa.heads import split, unsplit, widen
from mha2gqa.reconstruct import ReconstructConfig
from mha2gqa.report.views import view

TYPES = sorted(name for name, spec in SUPPORTED.items() if spec.wide)
IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip


def raw_config(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False)) | {"model_type": config.model_type}


def build(cls: Any, raw: dict[str, Any]) -> Any:
    config = cls.config_class.from_dict(raw)
    config._attn_implementation = "eager"
    return cls(config).float().eval()


def placed(model: Any, raw: dict[str, Any], wide: int) -> Any:
    """The wide model that `model` is a special case of: its KV heads are the channels."""
    spec = find_spec(raw).in_memory()
    state = dict(model.state_dict())
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    modules = find_attention_modules(spec, shapes)
    for module in modules:
        g = geometry_of(spec, raw, module, shapes)
        weights = split(spec, g, {role: state[name] for role, name in module.names.items()})
        rotary = rotary_dim(spec, raw, g.head_dim, module.layer)
        made = unsplit(spec, widen(weights, wide, spec.position, rotary, query_scale(spec, wide)))
        state |= {name: made[role] for role, name in module.names.items() if role in made}
    groups = g.num_kv_heads // wide
    changes = config_changes(spec, raw, g.num_heads, groups) | wide_changes(spec, raw, g, wide)
    new = build(type(model), edit_config(raw, changes))
    new.load_state_dict(state)
    return new


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(**pico_inputs(model, ids), **more).logits


@pytest.mark.parametrize("name", TYPES)
@torch.no_grad()
def test_a_plain_model_is_a_wide_one(name: str) -> None:
    raw = raw_config(pico_config(name))
    spec = find_spec(raw).in_memory()
    raw = edit_config(raw, config_changes(spec, raw, HEADS, 4))
    model = build(model_class(name), raw)
    make_every_weight_matter(model)
    wide = placed(model, raw, 2)
    text = wide.config.get_text_config()
    assert (text.num_key_value_heads, text.head_dim) == (2, 16)
    right, got = logits(model, IDS), logits(wide, IDS)
    assert float((got - right).abs().max() / right.std()) <= 1e-5
    # with a cache, token by token at the end
    past = wide(input_ids=IDS[:, :20], use_cache=True).past_key_values
    steps = []
    for at in range(20, 24):
        out = wide(input_ids=IDS[:, at : at + 1], past_key_values=past, use_cache=True)
        past, steps = out.past_key_values, [*steps, out.logits]
    assert float((torch.cat(steps, 1) - got[:, 20:]).abs().max() / right.std()) <= 1e-4
    # behind padding
    padded = torch.cat([IDS.new_full((2, 3), 3), IDS], 1)
    mask = (torch.arange(27) >= 3).long().expand(2, 27)
    positions = (torch.arange(27) - 3).clamp_min(0).expand(2, 27)
    behind = wide(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    assert float((behind - got).abs().max() / right.std()) <= 1e-4


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_rope_keeps_its_frequencies(kind: str) -> None:
    rope = {"rope_theta": 1e4, **SCALED[kind]}
    model = pico_llama(num_key_value_heads=4, rope_parameters=rope)
    wide = placed(model, raw_config(model.config), 2)
    ids = torch.randint(3, 60, (2, 100), generator=torch.Generator().manual_seed(2))
    for length in (12, 100):  # longrope changes at 16 tokens
        right, got = logits(model, ids[:, :length]), logits(wide, ids[:, :length])
        assert float((got - right).abs().max() / right.std()) <= 2e-5


def test_both_spellings_say_the_same() -> None:
    model = pico_llama()
    spec, raw = AttentionSpec(wide=True, text_type="llama"), raw_config(model.config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    g = geometry_of(spec, raw, find_attention_modules(spec, shapes)[0], shapes)
    for source in (raw, {k: v for k, v in raw.items() if k != "rope_parameters"} | {"rope_theta": 5e5}):
        new = {path[0]: value for path, value in wide_changes(spec, source, g, 2).items()}
        theta = new["rope_theta"]
        assert theta == (1e4 if source is raw else 5e5)
        assert new["rope_parameters"] == new["rope_scaling"] | {"rope_theta": theta}
        assert new["rope_scaling"]["original_max_position_embeddings"] == 128
        # written out: head_dim 4 has the frequencies 1 and theta^-1/2, twice
        wanted = [1.0, theta**-0.5] * 2
        found = [theta ** (-i / 4) / f for i, f in enumerate(new["rope_scaling"]["short_factor"])]
        assert found == pytest.approx(wanted, rel=1e-12)


@torch.no_grad()
def test_nothing_shared_is_nothing_lost(tmp_path: Path) -> None:
    """A GQA-4 model converted to 2 heads twice as wide: the same cache, the same logits, greedy text, files."""
    model = pico_llama(num_key_value_heads=4, attention_bias=True)
    make_every_weight_matter(model)
    model.save_pretrained(tmp_path / "gqa4")
    made = mha2gqa.convert(tmp_path / "gqa4", tmp_path / "out", 4, wide=2)
    assert (made.num_kv_heads, made.groups, made.wide) == ({"before": 4, "after": 2}, 4, 2)
    assert made.head_dim == {"before": 4, "after": 8}
    assert made.kv_bytes_per_token["before"] == made.kv_bytes_per_token["after"]
    (told,) = made.warnings  # nothing of what a conversion without data loses
    assert made.method == "joint" and "2 KV heads of head_dim 8 hold the cache of GQA-4" in told
    assert told.endswith("the source's cache is no larger: give fewer --groups to save any")
    manifest = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    assert (manifest["groups"], manifest["wide"]) == (4, 2)
    card, shown = (tmp_path / "out" / "README.md").read_text(), str(view(made.to_dict()))
    for text in (card, shown):
        assert "2 times as wide (head_dim 8), with the cache of GQA-4" in text
    assert "arithmetic of attention, are 2 times as large" in card and "gqa4-wide2" in card
    new = type(model).from_pretrained(tmp_path / "out").eval()
    live = mha2gqa.convert_model(model, 4, wide=2)
    right = logits(model, IDS)
    for other in (new, live):
        assert float((logits(other, IDS) - right).abs().max() / right.std()) <= 1e-4
        greedy = [m.generate(IDS[:, :6], max_new_tokens=20, do_sample=False) for m in (model, other)]
        assert torch.equal(*greedy)
    assert not [
        c for c in mha2gqa.verify(tmp_path / "out", against=tmp_path / "gqa4").checks if c.ok is False
    ]


def test_fits_work_on_wide_heads(tmp_path: Path) -> None:
    model = pico_llama()
    blocks = torch.randint(3, 60, (64, 33), generator=torch.Generator().manual_seed(3))
    fit = ReconstructConfig(steps=4, batch_size=8)
    new = mha2gqa.convert_model(model, 4, wide=2, calibration=blocks, fit=fit)
    assert (new.config.num_key_value_heads, new.config.head_dim) == (2, 8)
    again = mha2gqa.convert_model(model, 4, wide=2, calibration=blocks, fit=fit)
    assert torch.equal(logits(new, IDS), logits(again, IDS))


@pytest.mark.parametrize(
    ("options", "groups", "what"),
    [
        ({"wide": 3}, 4, "does not divide groups 4; use one of 2, 4"),
        ({"wide": 8}, 4, "more than the 4 KV heads that share the cache; use one of 2, 4"),
        ({"wide": 2}, 1, "more than the 1 KV heads that share the cache; convert without wide"),
        ({"wide": 2, "method": "mean"}, 4, "not possible with method mean"),
        ({"wide": 0}, 4, "must be >= 1"),
        ({"wide": 2}, 6, "6 does not divide the 8 KV heads"),
    ],
)
def test_what_does_not_go_together_is_refused(
    pico: Path, tmp_path: Path, options: dict[str, Any], groups: int, what: str
) -> None:
    with pytest.raises(UsageError) as error:
        mha2gqa.convert(pico, tmp_path / "out", groups, **options)
    message = str(error.value)
    assert what in message and "\n" not in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("gemma", {"head_dim": 256}, "head_dim would be 512, and attention kernels support at most 256"),
        ("qwen3", {}, "a norm on each head of q and k"),
        ("olmo2", {}, "a norm over all heads of q and k"),
        ("jamba", {}, "its positions are not rotary"),
        ("mpt", {}, "ALiBi"),
        ("stablelm", {}, "the class of stablelm models does not take head_dim"),
        ("nemotron", {}, "the class of nemotron models does not take head_dim"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type dynamic",
        ),
    ],
)
def test_models_without_a_wide_form_are_refused_by_name(
    name: str, changes: dict[str, Any], what: str
) -> None:
    from mha2gqa.conversion.plan import plan_conversion

    config = pico_config(name, **changes)
    with torch.device("meta"):
        model = model_class(name)(config)
    shapes = {n: tuple(x.shape) for n, x in model.state_dict().items()}
    with pytest.raises((UsageError, UnsupportedModelError)) as error:
        plan_conversion(raw_config(config), shapes, 4, method="joint", wide=2)
    assert what in str(error.value) and "\n" not in str(error.value)
    assert "wide 2: " in str(error.value)


def test_a_wrong_rotary_factor_fails_the_check(pico: Path, tmp_path: Path) -> None:
    from mha2gqa.verification.tiny_random import check_tiny_random

    mha2gqa.convert(pico, tmp_path / "out", 4, wide=2)
    source, config = (json.loads((p / "config.json").read_text()) for p in (pico, tmp_path / "out"))
    assert check_tiny_random(config, source).ok
    for rope in (config["rope_parameters"], config["rope_scaling"]):
        rope["short_factor"][-1] *= 1.01
    broken = check_tiny_random(config, source)
    assert broken.ok is False and "rotary frequencies differ" in broken.detail


LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "vocab_size": 32000, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def test_plan_says_where_wide_heads_pay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2))
    found = plan(tmp_path, groups=8, wide=2)
    wide, attention = found.wide, 32 * 4096 * 4096
    assert (wide["wide"], wide["num_kv_heads"], wide["head_dim"]) == (2, 4, 256)
    assert found.num_kv_heads == {"before": 32, "after": 4} and found.groups == 8
    # W_Q and W_O are doubled; keys and values stay
    assert wide["parameters"]["wide"] - wide["parameters"]["plain"] == 2 * attention
    assert wide["parameters"]["double"] - wide["parameters"]["plain"] == attention // 2
    assert found.parameters["after"] == wide["parameters"]["wide"]
    assert found.kv_bytes_per_token["after"] == 131_072
    # at n cached tokens: 2 bytes of 1.5 x 2^29 more weights against 131,072 fewer bytes a token
    assert wide["pays_above_cached_tokens"] == 2 * 3 * attention // 2 // 131_072 == 12_288
    step = next(s for s in wide["steps"] if (s["batch"], s["context"]) == (8, 8192))
    looked_up = 32_000 * 4096  # the input embedding, of which a step reads single rows
    assert step["wide_bytes"] == 2 * (wide["parameters"]["wide"] - looked_up) + 131_072 * 65_536
    assert step["double_bytes"] == 2 * (wide["parameters"]["double"] - looked_up) + 262_144 * 65_536
    flops = wide["attention_flops_per_cached_token"]
    assert flops == {"wide": 2 * flops["plain"], "plain": 4 * 32 * 4096, "double": flops["plain"]}
    assert "--groups 8 --wide 2 " in found.recommended
    assert plan(tmp_path, groups=8).wide == {}


@pytest.mark.parametrize(("tp", "times"), [(4, None), (8, "2 times"), (16, "2 times")])
def test_plan_says_when_ranks_are_more_than_wide_heads(tmp_path: Path, tp: int, times: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2))
    told = [w for w in plan(tmp_path, groups=8, wide=2, tp=tp).warnings if "--tp" in w]
    assert len(told) == (times is not None)
    assert times is None or (times in told[0] and "wide KV heads" in told[0])


def test_plan_refuses_as_convert_does_and_counts_what_it_writes(pico: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not divide groups 4"):
        plan(pico, groups=4, wide=3)
    (told,) = (w for w in plan(pico, groups=4, wide=4).warnings if "wide heads" in w)
    assert "1 KV head of head_dim" in told and "holds the cache of GQA-4" in told and "no larger" not in told
    found, made = plan(pico, groups=4, wide=2), mha2gqa.convert(pico, tmp_path / "out", 4, wide=2)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert found.bytes["after"] == sum(x.nbytes for x in tensors.values())
    assert found.kv_bytes_per_token == made.kv_bytes_per_token


@pytest.mark.parametrize("to", FORMATS)
def test_export_refuses_wide_heads(pico: Path, tmp_path: Path, to: Any) -> None:
    mha2gqa.convert(pico, tmp_path / "out", 4, wide=2)
    with pytest.raises(UnsupportedModelError, match="a factor for each rotary pair"):
        export(tmp_path / "out", tmp_path / "exported", to)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
@torch.no_grad()
def test_models_written_as_another_type_become_wide(name: str, tmp_path: Path) -> None:
    model = save_source(name, tmp_path / "source")  # partial rotary; interleaved in GPT-J
    heads = getattr(model.config, "num_attention_heads", None) or model.config.n_head
    made = mha2gqa.convert(tmp_path / "source", tmp_path / "out", heads, wide=2)
    assert made.num_kv_heads == {"before": heads, "after": heads // 2}
    assert made.reexpression["target_type"] == ROUTES[name][3]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    new = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "out").eval()
    right = logits(model, IDS)
    assert float((logits(new, IDS) - right).abs().max() / right.std()) <= 1e-4


@torch.no_grad()
def test_a_text_model_inside_another_becomes_wide() -> None:
    raw = raw_config(pico_config("llava"))
    raw["text_config"]["num_key_value_heads"] = 4
    model = build(model_class("llava"), raw)
    make_every_weight_matter(model)
    wide = placed(model, raw, 2)
    assert (wide.config.text_config.num_key_value_heads, wide.config.text_config.head_dim) == (2, 16)
    right, got = logits(model, IDS), logits(wide, IDS)
    assert float((got - right).abs().max() / right.std()) <= 1e-5


def test_the_layer_walk_of_wide_heads_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = tmp_path / "source", str(write_text(tmp_path / "text.jsonl"))
    pico_llama().save_pretrained(source)
    word_tokenizer(source)
    words = {"calibration": [text], **OPTIONS}
    put = WorkDir.put

    def interrupted(self: WorkDir, number: int, *rest: Any) -> None:
        put(self, number, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WorkDir, "put", interrupted)
        mha2gqa.convert(source, tmp_path / "out", 4, wide=2, **words)
    with pytest.raises(UsageError, match="wide"):  # what is finished belongs to other heads
        mha2gqa.convert(source, tmp_path / "out", 4, **words)
    resumed = mha2gqa.convert(source, tmp_path / "out", 4, wide=2, **words)
    whole = mha2gqa.convert(source, tmp_path / "whole", 4, wide=2, **words)
    assert resumed.layers == whole.layers and len(whole.layers[0]["grouping"]) == 2
    assert resumed.calibration["losses"] == whole.calibration["losses"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(a[n], b[n]) for n in b)
    plain = mha2gqa.convert(source, tmp_path / "plain", 4, **words)
    assert whole.layers[0]["relative_error"] < plain.layers[0]["relative_error"]

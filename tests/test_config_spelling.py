"""Config values in the spelling of transformers 5 and of transformers 4: both say the same, to both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pico_models import model_class, pico_config
from reexpressed_picos import NEOX, save_source
from transformers import CONFIG_MAPPING, GPTNeoXConfig, GPTNeoXForCausalLM

from mha2gqa.checkpoints.config_spelling import both_spellings
from mha2gqa.conversion.checkpoint import convert

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "added"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "bfloat16"},
            {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"},
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
            {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_scaling": YARN},
        ),
        (  # sections of a multimodal rotation are part of what older keys call scaling
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": {**YARN, "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                },
            },
            {"rope_theta": 5e5, "rope_scaling": YARN},
        ),
        # What older keys cannot say stays unsaid, and old spellings stay what they are.
        ({"model_type": "x", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, {}),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1.0}}}, {}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"},
            {},
        ),
    ],
)
def test_older_keys_stand_beside_the_newer_ones(config: dict[str, Any], added: dict[str, Any]) -> None:
    assert both_spellings(config) == config | added
    nested = {"text_config": config, "id2label": {"0": "a"}}
    assert both_spellings(nested) == {**nested, "text_config": config | added}


def test_a_key_that_is_there_keeps_its_value() -> None:
    config = {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4, "dtype": "float16"}
    assert both_spellings(config) == config | {"rope_scaling": None, "torch_dtype": "float16"}
    assert both_spellings(both_spellings(config)) == both_spellings(config)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "phi",
        "nemotron",
        "stablelm",
        "glm4",
        "gemma3",
        "gemma3_text",
        "olmo3",
        "qwen2_vl",
        "gpt_oss",
        "apertus",
        "qwen3_moe",
    ],
)
@pytest.mark.parametrize("rope", ["default", "linear"])
def test_transformers_5_reads_both_spellings_as_one(model_type: str, rope: str) -> None:
    raw = json.loads(pico_config(model_type, dtype="bfloat16").to_json_string())
    text = raw.get("text_config", raw)
    parameters = text["rope_parameters"].get("full_attention", text["rope_parameters"])
    parameters["rope_theta"] = 54321.0
    if rope == "linear":
        parameters |= {"rope_type": "linear", "factor": 2.0}
    cls = CONFIG_MAPPING[model_type]
    plain, both = (cls.from_dict(json.loads(json.dumps(c))) for c in (raw, both_spellings(raw)))
    assert json.loads(plain.to_json_string(use_diff=False)) == json.loads(both.to_json_string(use_diff=False))


@pytest.mark.parametrize(("parallel", "target"), [(True, "phi"), (False, "nemotron")])
def test_a_rewritten_neox_states_its_rotary_width_for_older_classes(
    parallel: bool, target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = GPTNeoXConfig(**NEOX, use_parallel_residual=parallel, rope_parameters=rope)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "in")
    for groups in (2, 8):  # all heads kept: written as another type all the same
        convert(tmp_path / "in", tmp_path / str(groups), groups)
        new = json.loads((tmp_path / str(groups) / "config.json").read_text())
        assert new["model_type"] == target
        assert new["rope_parameters"] == rope
        assert (new["partial_rotary_factor"], new["rope_theta"], new["rope_scaling"]) == (0.5, 500.0, None)
        assert new["torch_dtype"] == new["dtype"] == "float32"


def test_rewritten_gptj_and_native_results_state_both(tmp_path: Path) -> None:
    save_source("gptj", tmp_path / "gptj")
    convert(tmp_path / "gptj", tmp_path / "phi", 2)
    new = json.loads((tmp_path / "phi" / "config.json").read_text())
    assert (new["partial_rotary_factor"], new["rope_theta"]) == (0.5, 10_000)

    config = pico_config("llama", rope_parameters={**YARN, "rope_theta": 5e5})
    model_class("llama")(config).save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "out", 2)
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new["rope_theta"] == 5e5 and new["rope_scaling"].items() >= YARN.items()
    assert new["rope_scaling"] == {k: v for k, v in new["rope_parameters"].items() if k != "rope_theta"}


def test_a_copy_keeps_the_config_as_it_is(tmp_path: Path) -> None:
    model_class("llama")(pico_config("llama")).save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", 8)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (tmp_path / "in" / "config.json").read_text()
    )

"""Every architecture of the table, with its real class: converted, loaded, run, and held against the oracles.

`python tests/test_architectures_walk.py` proves all and writes the list that `mha2gqa archs` shows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_proofs import (
    convert_pico,
    convert_reexpressed,
    difference,
    outputs,
    prove_fitted,
    prove_forward,
    prove_load,
    runnable,
)
from conftest import word_tokenizer
from families import PICOS
from pico_models import GROUPS, TIMM, pico_config
from pico_models import model_class as pico_class
from reexpressed_picos import ROUTES, TARGETS, class_of, save_source
from training import write_text

from mha2gqa.architectures import listing
from mha2gqa.architectures.exported import STOCK
from mha2gqa.checkpoints.loading import load_tokenizer
from mha2gqa.conversion.in_memory import plan_model
from mha2gqa.reconstruct.hidden_states import Stream
from mha2gqa.reconstruct.module_calls import block_paths

WALKED = [name for name in listing.supported_types() if name not in STOCK]
# One of each kind of entry runs by default; `make archs` runs all.
REPRESENTATIVE = {
    "afmoe", "blt", "chameleon", "cohere", "cohere_asr", "dbrx", "dia", "diffllama", "doge", "exaone", "exaone4",
    "falcon", "flint", "gemma", "gemma3", "gemma3n_text", "gemma4_text", "glm", "gpt_bigcode", "gpt_oss", "granitemoehybrid",
    "inkling2_text", "laguna", "llama", "llama4_text", "llava", "mimo_v2_flash", "mistral", "mixtral", "mllama", "molmo2",
    "nanochat", "nemotron_h", "olmo", "olmo2", "phi", "phi3", "pi0", "qwen2", "qwen2_vl", "qwen3", "qwen3_next",
    "recurrent_gemma", "sarvam_moe", "stablelm", "starcoder2", "t5gemma", "zamba2",
}  # fmt: skip


def _parameter(name: str) -> Any:
    return name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture
def no_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty module in place of a vision tower that needs timm."""
    _replace_timm(monkeypatch.setattr)


def _replace_timm(setattr_: Any) -> None:
    from transformers import AutoModel

    build = AutoModel.from_config.__func__

    def from_config(cls: Any, config: Any, **kwargs: Any) -> torch.nn.Module:
        timm = config.model_type in ("gemma3n_vision", "timm_wrapper")
        return torch.nn.Module() if timm else build(cls, config, **kwargs)

    setattr_(AutoModel, "from_config", classmethod(from_config))


def _skip_if_absent(model_type: str) -> None:
    from transformers import CONFIG_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {__version__} has no {model_type}")


@pytest.mark.parametrize("model_type", [_parameter(name) for name in WALKED])
def test_architecture(model_type: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    _skip_if_absent(model_type)
    if model_type in TIMM:
        request.getfixturevalue("no_timm")
    pico = convert_pico(model_type, tmp_path, GROUPS.get(model_type, 2))
    prove = prove_forward if model_type in listing.proofs()["forward"] else prove_load
    prove(pico)


# What text alone cannot calibrate, or a pico model cannot show.
UNFITTED = {
    "blt": "bytes are read in patches",
    "diffusion_gemma": "layers run one module",
    "evolla": "needs a protein",
    "gemma3n_text": "four hidden states a text, refused",
    "gpt_bigcode": "holds all KV heads or one",
    "kyutai_speech_to_text": "needs sound",
    "llama4": "its class fails without an image",
    "mllama": "cross-attention needs an image",
    "pi0": "needs images and states",
    "shieldgemma2": "a classifier of images",
    "voxtral_realtime": "needs sound",
    "zamba": "layers run one module",
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WALKED)
def test_a_fitted_checkpoint_is_the_fitted_model(model_type: str, tmp_path: Path) -> None:
    _skip_if_absent(model_type)
    if model_type in UNFITTED or model_type in TIMM:
        pytest.skip(UNFITTED.get(model_type, "needs timm"))
    torch.manual_seed(0)
    config = pico_config(model_type)
    if getattr(config, "is_encoder_decoder", False):
        pytest.skip("an encoder-decoder: test_modeling_calibrated.py")
    pico_class(model_type)(config).save_pretrained(tmp_path / "mha")
    if len(load_tokenizer(word_tokenizer(tmp_path / "mha")).tokenize("w1 w2 w3")) != 3:
        pytest.skip("transformers reads every tokenizer of this type as one of its own")
    prove_fitted(tmp_path / "mha", tmp_path, write_text(tmp_path / "text.jsonl", documents=60))


# Blocks that are passed text beside hidden states, or run more than once.
BESIDE = ("dory", "gemma4_text", "inkling2_text", "zamba2")


@pytest.mark.parametrize(
    "model_type",
    [n if n in BESIDE else pytest.param(n, marks=pytest.mark.slow) for n in WALKED if n not in UNFITTED],
)
def test_blocks_run_alone_give_the_logits_of_the_model(model_type: str) -> None:
    _skip_if_absent(model_type)
    if model_type in TIMM or getattr(pico_config(model_type), "is_encoder_decoder", False):
        pytest.skip("needs timm, or another kind of text")
    model = runnable(pico_class(model_type)(pico_config(model_type)).eval())
    with torch.no_grad():
        for p in model.parameters():
            seeded = torch.Generator().manual_seed(p.numel())
            p.copy_(torch.randn(p.shape, generator=seeded) * 0.2 + (p.ndim == 1))
        ids = torch.randint(4, 90, (5, 9), generator=torch.Generator().manual_seed(1))
        expected = model(input_ids=ids, use_cache=False).logits
        modules = plan_model(model, 2, "mean", None, 0).modules
        blocks = block_paths(model, min((m.module for m in modules), key=lambda m: m.layer))
        stream = Stream(model, ids, 2, blocks)
        assert stream.chained == (model_type != "dory")
        for _ in blocks:
            stream.advance()
        found = torch.cat([stream.logits(i) for i in range(len(stream.batches))])
    assert difference(found, expected) < 1e-3


# The first of each source and target; all keep their logits in test_reexpress.py.
FIRST = {(source, target): name for name, (source, _, _, target) in reversed(ROUTES.items())}.values()


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in ROUTES]
)
def test_reexpressed_architecture(name: str, tmp_path: Path) -> None:
    _prove_reexpressed(name, tmp_path)


def _prove_reexpressed(name: str, folder: Path) -> str:
    """Prove one way to write a model as another architecture; returns `source -> target`."""
    original = save_source(name, folder / "mha")
    _, _, as_, target = ROUTES[name]
    groups = 1 if target == "gpt_bigcode" else 2
    pico = convert_reexpressed(class_of(TARGETS[target]), folder / "mha", folder, groups, as_)
    ids = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    assert difference(outputs(pico.model, ids), outputs(original, ids)) < 1e-5
    prove_forward(pico)
    return f"{json.loads((folder / 'mha' / 'config.json').read_text())['model_type']} -> {target}"


def test_every_reexpression_is_proven_or_says_otherwise() -> None:
    rows = listing.reexpressed_rows()
    forward = [f"{row['model_type']} -> {row['as']}" for row in rows if row["proven"] == "forward"]
    assert sorted(forward) == listing.proofs()["reexpressed"]
    assert {row["model_type"] for row in rows if row["proven"] == "layout"} == {
        "baichuan", "deepseek", "internlm", "internlm2", "qwen",
    }  # fmt: skip


def test_every_supported_type_is_proven_and_the_list_is_the_table() -> None:
    proven = listing.proofs()
    assert sorted(proven["forward"] + proven["meta"]) == listing.supported_types()
    assert STOCK.keys() == {model_type for model_type, _ in PICOS.values()}  # run in test_modeling_*.py
    assert len(proven["forward"]) >= 200


def test_every_type_of_transformers_has_a_fate() -> None:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if transformers.__version__ != listing.proofs()["transformers"]:
        pytest.skip(f"the table is of transformers {listing.proofs()['transformers']}")
    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    every = {name for mapping in mappings for name in mapping}
    kinds = listing.list_architectures()
    known = {kind: {row["model_type"] for row in rows} for kind, rows in kinds.items()}
    assert every - set().union(*known.values()) == set()
    assert not known["refused"] & (known["supported"] | known["reexpressed"])


def _prove(model_type: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        pico = convert_pico(model_type, Path(folder), GROUPS.get(model_type, 2))
        try:
            prove_forward(pico)
        except (TypeError, ValueError, NotImplementedError) as error:
            print(f"{model_type}: no forward pass ({error})", file=sys.stderr)
            prove_load(pico)
            return "meta"
    return "forward"


def main() -> None:
    """Prove every type and write `proven.json`."""
    import transformers

    _replace_timm(setattr)
    kinds = {name: _prove(name) for name in WALKED} | dict.fromkeys(STOCK, "forward")
    lists = {kind: sorted(n for n, k in kinds.items() if k == kind) for kind in ("forward", "meta")}
    with tempfile.TemporaryDirectory() as folder:
        routes = {_prove_reexpressed(name, Path(folder) / name) for name in ROUTES}
    lists["reexpressed"] = sorted(routes)
    data = {"transformers": transformers.__version__, **lists}
    listing._PROVEN.write_text(json.dumps(data, indent=1) + "\n")
    print({kind: len(names) for kind, names in lists.items()})


if __name__ == "__main__":
    main()

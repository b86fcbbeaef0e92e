"""Results load in transformers 4.57 and compute the same there (slow: needs that version beside this one).

`MHA2GQA_TRANSFORMERS4` names a folder with it, as `make engines` installs it; without it all is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_proofs import make_every_weight_matter
from families import PICOS, export_of, inputs, logits, stock_model
from pico_models import model_class, pico_config
from reexpressed_picos import ROUTES, save_source
from safetensors.torch import load_file, save_file

from mha2gqa.checkpoints.loading import load_model
from mha2gqa.conversion.checkpoint import convert

FOLDER = os.environ.get("MHA2GQA_TRANSFORMERS4")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="MHA2GQA_TRANSFORMERS4 names no folder"),
]
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
NATIVE = [
    "llama", "qwen2", "qwen3", "olmo2", "olmo3", "mistral", "gemma2", "gemma3_text", "phi", "phi3", "stablelm",
    "nemotron", "starcoder2", "granite", "cohere", "glm4", "gpt_oss", "mixtral", "qwen3_moe", "falcon",
]  # fmt: skip
WIDE = ["llama", "qwen2", "mistral", "gemma2", "phi", "starcoder2", "granite", "cohere", "glm4", "mixtral"]
OLDER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
from safetensors.torch import load_file, save_file
assert transformers.__version__.startswith("4."), transformers.__version__
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
report = {}
for name, folder, auto, batch, result in json.loads(sys.argv[2]):
    try:
        model, info = getattr(transformers, auto).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True, torch_dtype=torch.float32,
            attn_implementation="eager",
        )
        wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
        assert not wrong, wrong
        with torch.no_grad():
            save_file({"logits": model.eval()(**load_file(batch), use_cache=False).logits.contiguous()}, result)
        report[name] = "ok"
    except Exception as error:
        report[name] = f"{type(error).__name__}: {error}"
print(json.dumps(report))
"""


def rotated(config: Any) -> Any:
    """The config with a base of the rotary frequencies that no class takes for granted."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if parameters:
        for part in parameters.values() if "full_attention" in parameters else (parameters,):
            part["rope_theta"] = 4321.0
    return config


def native(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = model_class(name)(rotated(pico_config(name))).eval()
    make_every_weight_matter(model)
    model.save_pretrained(folder)


def job(name: str, out: Path, auto: str, batch: dict[str, torch.Tensor], right: torch.Tensor) -> list[str]:
    """What the older version shall load and run; what it shall say is put beside it."""
    files = [out.with_name(f"{out.name}.{what}") for what in ("batch", "right", "result")]
    save_file(batch, files[0])
    save_file({"logits": right.contiguous()}, files[1])
    return [name, str(out), auto, str(files[0]), str(files[2])]


def in_older(jobs: list[list[str]], tmp_path: Path) -> None:
    """Run all jobs in one process of the older version, and compare."""
    environment = {**os.environ, "PYTHONPATH": "", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    code = [sys.executable, "-c", OLDER, str(Path(str(FOLDER)).resolve()), json.dumps(jobs)]
    done = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = {name: said for name, said in report.items() if said != "ok"}
    for name, out, _, _, result in jobs:
        if report[name] == "ok":
            right = load_file(f"{out}.right")["logits"]
            difference = float((load_file(result)["logits"] - right).abs().max() / right.std())
            if not difference < 1e-4:
                wrong[name] = f"differs by {difference:.1e} of the spread"
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("wide", [1, 2])
def test_native_results(wide: int, tmp_path: Path) -> None:
    jobs = []
    for name in NATIVE if wide == 1 else WIDE:
        native(name, tmp_path / name)
        out = tmp_path / f"{name}-gqa"
        convert(tmp_path / name, out, 2 * wide, wide=wide)
        model = load_model(out, device="cpu", dtype="float32")
        with torch.no_grad():
            jobs.append(
                job(name, out, "AutoModelForCausalLM", {"input_ids": IDS}, model(IDS, use_cache=False).logits)
            )
    in_older(jobs, tmp_path)


@pytest.mark.parametrize("groups", [2, 8])
def test_rewritten_architectures(groups: int, tmp_path: Path) -> None:
    jobs = []
    for name, (*_, as_, target) in ROUTES.items():
        save_source(name, tmp_path / name)
        if target == "gpt_bigcode" and groups == 2:
            continue
        out = tmp_path / f"{name}-{target}"
        convert(tmp_path / name, out, groups, as_=as_)
        model = load_model(out, device="cpu", dtype="float32")
        with torch.no_grad():
            right = model(IDS, use_cache=False).logits
        jobs.append(job(name, out, "AutoModelForCausalLM", {"input_ids": IDS}, right))
    in_older(jobs, tmp_path)


def test_exported_classes(tmp_path: Path) -> None:
    jobs = []
    for name in PICOS:
        source, out = tmp_path / name, tmp_path / f"{name}-gqa"
        stock_model(name).save_pretrained(source)
        if name in ("mt5", "t5-untied"):  # a head of its own, as all published ones have
            tensors = load_file(source / "model.safetensors")
            generator = torch.Generator().manual_seed(2)
            tensors["lm_head.weight"] = torch.randn(tensors["shared.weight"].shape, generator=generator)
            save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        convert(source, out, 2)
        model = load_model(out, device="cpu", dtype="float32")
        jobs.append(job(name, out, export_of(name).auto, inputs(name), logits(model, inputs(name))))
    in_older(jobs, tmp_path)


def test_a_tied_head_that_reads_unscaled_outputs_is_refused_by_older_versions(tmp_path: Path) -> None:
    """transformers 4 would scale them without a word."""
    stock_model("t5-untied").save_pretrained(tmp_path / "t5")
    convert(tmp_path / "t5", tmp_path / "out", 2)
    right = torch.zeros(1, 1)
    one = job("t5", tmp_path / "out", "AutoModelForSeq2SeqLM", inputs("t5"), right)
    with pytest.raises(AssertionError, match="use 5 or later"):
        in_older([one], tmp_path)


def test_this_version_is_not_the_older_one() -> None:
    assert not transformers.__version__.startswith("4.")

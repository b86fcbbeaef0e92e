"""Fits that train whole decoder layers: what changes, where it is written, and that nothing else does."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama
from launching import launch
from safetensors.torch import load_file
from seq2seq_models import saved
from test_calibrated_fits import write_text
from test_walk import LAYERS, MODELS, WORKER, blocks, llama, of_type, same, save
from walk_worker import FIT, OPTIONS, stop_after

import mha2gqa
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.config import OptionError
from mha2gqa.conversion import convert_model
from mha2gqa.conversion.in_memory import plan_model
from mha2gqa.errors import UnsupportedModelError
from mha2gqa.reconstruct import ReconstructConfig, reconstruct, regress
from mha2gqa.reconstruct.train_state import autocast, rest_of_block, undisturbed

LAYER = replace(FIT, train="layer", rest_rate=0.3)
WORDS: dict[str, Any] = OPTIONS | {"fit": LAYER}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("text") / "text.jsonl", documents=20))


@pytest.mark.parametrize(
    "name", ["tied", "half", "experts", "fused", "full_norms", "interleaved", "exported"]
)
def test_all_of_a_layer_changes_alike_on_disk_and_in_memory_and_nothing_else(
    name: str, text: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = save(MODELS[name](), tmp_path / "source")
    model = load_model(source, dtype="float32", device="cpu")
    whole = convert_model(model, 2, calibration=blocks(source, text), fit=LAYER).state_dict()
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    stored = next(iter(before.tensors.values())).dtype
    want = {n: x.bfloat16().float() if stored == "BF16" else x for n, x in whole.items()}
    got = load_model(tmp_path / "out", dtype="float32", device="cpu").state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)
    kept = {n for n in before.tensors if torch.equal(before.read(n), after.read(n))}
    assert kept == {n for n in before.tensors if not re.search(r"\.\d+\.", n)}
    checks = mha2gqa.verify(tmp_path / "out", against=source).checks
    assert all(check.ok for check in checks), checks


def test_verification_still_sees_what_else_differs(text: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = save(llama(), tmp_path / "source")
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    file = tmp_path / "out" / "model.safetensors"
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        tensors = load_file(file)
        save_file(tensors | {name: tensors[name] + 1}, file, {"format": "pt"})
        wrong = [c for c in mha2gqa.verify(tmp_path / "out", against=source, full=True).checks if not c.ok]
        assert any(name in check.detail for check in wrong), wrong
        save_file(tensors, file, {"format": "pt"})


def test_a_stopped_walk_goes_on_with_the_same_bytes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama(), tmp_path / "source")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 1)
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    mha2gqa.convert(source, tmp_path / "whole", 2, calibration=[text], **WORDS)
    assert same(tmp_path / "whole", tmp_path / "out")


def test_processes_sum_the_gradients_of_the_whole_layer(text: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = save(MODELS["experts"](), tmp_path / "source")
    mha2gqa.convert(
        source, tmp_path / "one", 2, calibration=[text], **OPTIONS | {"fit": replace(FIT, train="layer")}
    )
    launch([WORKER, str(source), str(tmp_path / "many"), text, "layer"], tmp_path, 2)
    a, b = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "many"))
    for tensor, x in a.items():  # sums are taken in another order
        torch.testing.assert_close(b[tensor], x, rtol=1e-3, atol=1e-3 * float(x.abs().max()))


def test_pickled_and_sharded_sources_get_the_same_tensors(text: str, tmp_path: Path) -> None:
    model = llama()
    source = save(model, tmp_path / "source")
    pickled = save(model, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    sharded = save_tokenizer(model, tmp_path / "sharded")
    made = {}
    for folder in (source, pickled, sharded):
        out = tmp_path / f"{folder.name}-out"
        mha2gqa.convert(folder, out, 2, calibration=[text], **WORDS)
        checkpoint = open_checkpoint(out)
        made[folder.name] = {n: checkpoint.read(n) for n in checkpoint.tensors}
    for name in ("pickled", "sharded"):
        assert all(torch.equal(x, made[name][n]) for n, x in made["source"].items())


def save_tokenizer(model: Any, folder: Path) -> Path:
    from conftest import word_tokenizer

    word_tokenizer(folder)
    return folder


def test_without_steps_the_bytes_are_those_of_attention_alone(text: str, tmp_path: Path) -> None:
    source = save(llama(), tmp_path / "source")
    for train in ("attention", "layer"):
        fit = replace(FIT, train=train, steps=0)
        mha2gqa.convert(source, tmp_path / train, 2, calibration=[text], **OPTIONS | {"fit": fit})
    assert same(tmp_path / "attention", tmp_path / "layer")


def rows(count: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(seed))


def shared_heads() -> Any:
    """A model whose heads are equal in pairs of four."""
    teacher = pico_llama()
    with torch.no_grad():
        for layer in teacher.model.layers:
            for p in ("k_proj", "v_proj"):
                w = getattr(layer.self_attn, p).weight.view(2, 4, 4, 32)
                w[:] = w[:, :1]
    return teacher


def test_a_spoilt_feed_forward_part_is_brought_back() -> None:
    teacher = shared_heads()
    spec = plan_model(teacher, 2, "mean", None, 0).spec
    ends = {}
    for train in ("attention", "layer"):
        student = convert_model(teacher, 2, method="joint")
        with torch.no_grad():
            torch.manual_seed(1)
            for layer in student.model.layers:
                w = layer.mlp.down_proj.weight
                w += 0.3 * w.std() * torch.randn_like(w)
        config = ReconstructConfig(
            steps=150, batch_size=8, check_every=25, train=train, learning_rate=3e-3, rest_rate=1.0
        )
        reconstruct(teacher, student, spec, rows(), config)
        with torch.no_grad():
            a, b = (m(rows(16, 3)).logits for m in (teacher, student))
        ends[train] = float((a - b).square().mean() / a.var())
    assert ends["layer"] < 0.1 * ends["attention"]


def test_where_heads_are_equal_nothing_gets_worse() -> None:
    teacher = shared_heads()
    spec = plan_model(teacher, 2, "mean", None, 0).spec
    student = convert_model(teacher, 2, method="joint")
    fits = reconstruct(teacher, student, spec, rows(), replace(LAYER, batch_size=8))
    assert max(fit.after for fit in fits) < 1e-8
    with torch.no_grad():
        torch.testing.assert_close(student(rows(8, 3)).logits, teacher(rows(8, 3)).logits, rtol=0, atol=1e-3)


def test_products_in_half_precision_see_the_weights_of_their_step() -> None:
    """Torch keeps the bfloat16 casts of weights until the outermost autocast ends, here that around the whole walk."""
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(1, 4, dtype=torch.bfloat16)
    with undisturbed(x.device):
        with autocast(x):
            assert torch.equal(x @ weight, torch.full((1, 4), 4.0, dtype=torch.bfloat16))
        with torch.no_grad():
            weight.mul_(2)
        with autocast(x):
            assert torch.equal(x @ weight, torch.full((1, 4), 8.0, dtype=torch.bfloat16))


def test_fits_in_half_precision_gain_whatever_surrounds_them() -> None:
    teacher = pico_llama().bfloat16()
    spec = plan_model(teacher, 2, "mean", None, 0).spec
    ends = []
    for around in (nullcontext(), undisturbed(torch.device("cpu"))):
        student = convert_model(teacher, 2, method="mean")
        with around:
            fits = reconstruct(teacher, student, spec, rows(), replace(LAYER, steps=40, refit=False))
        assert all(fit.after < 0.9 * fit.before for fit in fits), fits
        ends.append([fit.after for fit in fits])
    assert ends[0] == ends[1]


def test_what_other_layers_share_is_left_alone() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 8}
    model = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    plan = plan_model(model, 2, "mean", None, 0)
    modules = [m.module for m in plan.modules if ".0." in m.path]
    names = rest_of_block(model, "decoder.block.0", plan.spec, modules)
    assert not any("relative_attention_bias" in name for name in names)
    assert {name.rsplit(".", 2)[1] for name in names} == {"layer_norm", "wi", "wo"}


def test_only_the_output_of_the_layer_can_be_matched(text: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unit=attention"):
        ReconstructConfig(train="layer", unit="attention")
    with pytest.raises(OptionError, match="train"):
        mha2gqa.convert(
            tmp_path / "none", tmp_path / "out", 2, calibration=[text],
            fit={"train": "layer", "unit": "attention"},
        )  # fmt: skip


def test_tensors_that_could_not_be_written_are_refused_before_the_walk(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    source = save(MODELS["experts"](), tmp_path / "source")
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda model, state: state)
    with pytest.raises(UnsupportedModelError, match="cannot be written as stored"):
        mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    assert not (tmp_path / "out.convert").exists()


def test_settings_that_no_stage_reads_are_named(text: str, tmp_path: Path) -> None:
    source = save(llama(), tmp_path / "source")
    idle = {"fit": replace(FIT, rest_rate=0.3, distill_rate=1e-4)}
    made = mha2gqa.convert(source, tmp_path / "attention", 2, calibration=[text], **OPTIONS | idle)
    assert [w for w in made.warnings if w.startswith("--fit")] == [
        "--fit rest_rate has no effect without train=layer",
        "--fit distill_rate has no effect without distill_steps",
    ]
    made = mha2gqa.convert(source, tmp_path / "layer", 2, calibration=[text], **WORDS)
    assert not [w for w in made.warnings if w.startswith("--fit")]


def test_the_manifest_says_what_was_trained(text: str, tmp_path: Path) -> None:
    source = save(llama(), tmp_path / "source")
    made = mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    manifest = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    assert manifest["calibration"]["fit"]["train"] == "layer"
    assert all(row["error_fitted"] < row["error_refitted"] for row in made.layers)
    assert len(made.layers) == LAYERS


@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_decoder_layers_of_an_encoder_decoder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = count(0, -1)  # so little text teaches nothing: what was learned is kept all the same
    monkeypatch.setattr(regress, "relative_error", lambda *_: float(next(falling)))
    source = saved(tmp_path / kind, kind)
    words = [" ".join(f"w{(i * j) % 57}" for j in range(1, 4 + i % 9)) for i in range(81)]
    rows = [{"source": a, "target": b} for a, b in pairwise(words)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fit = ReconstructConfig(
        steps=8, batch_size=4, check_every=1, train="layer", learning_rate=1e-4, rest_rate=1.0
    )
    mha2gqa.convert(
        source, tmp_path / "out", 4, calibration=str(tmp_path / "pairs.jsonl"), fit=fit, device="cpu"
    )
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    changed = {n for n in before.tensors if not torch.equal(before.read(n), after.read(n))}
    inside = {n for n in before.tensors if re.search(r"decoder\.(layers|block)\.\d+\.", n)}
    assert changed <= inside
    for name in (
        n for n in inside if "relative_attention_bias" in n
    ):  # heads are reordered, nothing is trained
        old, new = (x.read(name).sort(1).values for x in (before, after))
        assert torch.equal(old, new)
    rest = {n for n in inside if re.search(r"norm|fc\d|\.w[io]\.", n)}
    assert rest and rest <= changed
    checks = mha2gqa.verify(tmp_path / "out", against=source).checks
    assert all(check.ok is not False for check in checks), checks


def test_layers_of_a_model_that_is_written_as_another(text: str, tmp_path: Path) -> None:
    source = save(of_type("gpt_neox", rotary_pct=0.5), tmp_path / "source")
    made = mha2gqa.convert(source, tmp_path / "out", 2, calibration=[text], **WORDS)
    assert made.reexpression
    plain = mha2gqa.convert(source, tmp_path / "plain", 2, calibration=[text], **OPTIONS)
    assert made.calibration["losses"]["merged"] == plain.calibration["losses"]["merged"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain"))
    same_bytes = {name for name in a if torch.equal(a[name], b[name])}
    assert same_bytes == {name for name in a if not re.search(r"\.\d+\.", name)}
    checks = mha2gqa.verify(tmp_path / "out", against=source).checks
    assert all(check.ok for check in checks), checks

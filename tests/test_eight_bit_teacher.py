"""A teacher whose linear layers are in 8 bits: what is rounded, what it teaches, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file
from torch import nn
from training import TINY, family
from transformers.pytorch_utils import Conv1D

from mha2gqa.errors import UsageError
from mha2gqa.uptraining import train_model, uptrain
from mha2gqa.uptraining.eight_bits import LEVELS, EightBitLinear, round_to_eight_bits
from mha2gqa.uptraining.guard import SpikeGuard

RUN = {"tokens": 64 * 6, "save_steps": 2, "learning_rate": 3e-3, **TINY}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return family(tmp_path_factory.mktemp("family"))


def losses(result) -> list[float]:
    return [e["loss"] for e in result.losses["train"]]


def restored(layer: EightBitLinear) -> torch.Tensor:
    return layer.integers.float() * layer.scale.float()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_its_rounded_weights(dtype, biased):
    torch.manual_seed(0)
    weight = torch.randn(24, 40) * torch.logspace(-3, 1, 24)[:, None]  # rows of very different sizes
    weight[5] = 0
    weight, bias = weight.to(dtype), torch.randn(24).to(dtype) if biased else None
    layer = EightBitLinear(weight, bias)
    assert layer.integers.dtype is torch.int8 and layer.weight.element_size() == 1
    assert not any(p.requires_grad for p in layer.parameters())
    # Half a step of the row; the step itself is rounded to the dtype.
    step = weight.float().abs().amax(1, keepdim=True) / LEVELS
    room = step / 2 + LEVELS * step * torch.finfo(dtype).eps
    assert bool(((restored(layer) - weight.float()).abs() <= room).all())
    assert bool((restored(layer)[5] == 0).all())
    x = torch.randn(3, 7, 40).to(dtype)
    wanted = F.linear(x.double(), restored(layer).double(), None if bias is None else bias.double())
    largest = wanted.abs().amax((0, 1))
    assert bool(((layer(x).double() - wanted).abs() <= 8 * torch.finfo(dtype).eps * (largest + 1)).all())


def test_parameters_are_what_fsdp2_of_older_versions_shards():
    """In torch 2.11 it makes each a parameter with a gradient, and freezes it then."""
    layer = EightBitLinear(torch.randn(6, 5).bfloat16(), torch.randn(6).bfloat16())
    for p in layer.parameters():
        part = nn.Parameter(p.detach().new_zeros(8, *p.shape[1:]))
        part.data[:6].copy_(p)
        assert part.requires_grad
        assert torch.equal(part.detach()[:6].view(torch.int8), p.detach().view(torch.int8))
    assert next(p.dtype for p in layer.parameters() if p.is_floating_point()) is torch.bfloat16


def test_linear_layers_of_both_kinds_are_rounded_and_the_head_is_not():
    model = pico_llama()
    model.extra = Conv1D(6, 4)
    seen = model.extra.weight.detach().clone()
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    count = round_to_eight_bits(model, CPU, "teacher")
    assert count == linear - model.lm_head.weight.numel() + 24
    assert type(model.lm_head) is nn.Linear and type(model.model.embed_tokens) is nn.Embedding
    x = torch.randn(5, 4)
    torch.testing.assert_close(restored(model.extra), seen.t(), atol=float(seen.abs().max()) / 250, rtol=0)
    torch.testing.assert_close(model.extra(x), x @ restored(model.extra).t() + model.extra.bias)
    with pytest.raises(UsageError, match=r"^teacher: has no linear layer .*; leave out teacher_dtype$"):
        round_to_eight_bits(model, CPU, "teacher")


def test_it_teaches_what_its_rounded_weights_teach(models, tmp_path):
    """Against a float teacher of the very weights that 8 bits hold, and near the one that was rounded."""
    _, student, text = models
    eight = uptrain(student, tmp_path / "eight", text, teacher_dtype="int8", **RUN)
    whole = uptrain(student, tmp_path / "whole", text, **RUN)
    model = pico_llama()
    round_to_eight_bits(model, CPU, "teacher")
    state = {
        name + ".weight": restored(m) for name, m in model.named_modules() if isinstance(m, EightBitLinear)
    }
    plain = pico_llama()
    plain.load_state_dict(state, strict=False)
    plain.save_pretrained(tmp_path / "rounded")
    word_tokenizer(tmp_path / "rounded")
    same = uptrain(student, tmp_path / "same", text, teacher=str(tmp_path / "rounded"), **RUN)
    assert losses(eight) == pytest.approx(losses(same), abs=1e-5)
    assert losses(eight) != losses(whole)
    assert losses(eight) == pytest.approx(losses(whole), rel=1 / LEVELS)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("eight", "same"))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_killed_run_ends_with_the_same_bytes(models, tmp_path, monkeypatch):
    _, student, text = models
    straight = uptrain(student, tmp_path / "straight", text, teacher_dtype="int8", **RUN)
    accept = SpikeGuard.accept

    def killing(self, at, *args):
        if at == 5:
            raise KeyboardInterrupt
        return accept(self, at, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SpikeGuard, "accept", killing)
        uptrain(student, tmp_path / "up", text, teacher_dtype="int8", **RUN)
    with pytest.raises(UsageError, match=r"teacher_dtype: 'int8' -> None"):
        uptrain(student, tmp_path / "up", text, **RUN)
    resumed = uptrain(student, tmp_path / "up", text, teacher_dtype="int8", **RUN)
    assert resumed.resumed_from == 4 and losses(resumed) == losses(straight)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("up", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_answers_kept_on_disk_are_of_one_dtype(models, tmp_path):
    _, student, text = models
    kept = {"teacher_top_k": 8, "teacher_cache": str(tmp_path / "cache")}
    uptrain(student, tmp_path / "up", text, teacher_dtype="int8", **kept, **RUN)
    shutil.rmtree(tmp_path / "up")
    with pytest.raises(UsageError, match=r"dtype: 'int8' -> 'float32'"):
        uptrain(student, tmp_path / "up", text, **kept, **RUN)


def test_refused_before_the_work(models, tmp_path):
    _, student, text = models
    with pytest.raises(UsageError, match=r"teacher_dtype: requires a teacher; leave out `?teacher`? none"):
        uptrain(student, tmp_path / "up", text, teacher="none", teacher_dtype="int8", **RUN)
    with pytest.raises(UsageError, match="teacher_dtype int8: requires a checkpoint"):
        train_model(
            pico_llama(num_key_value_heads=2), torch.zeros(4, 17, dtype=torch.long), teacher=pico_llama(),
            teacher_dtype="int8", tokens=64, batch_tokens=64, device="cpu",
        )  # fmt: skip
    with pytest.raises(UsageError, match=r"teacher_dtype: must be .*int8"):
        uptrain(student, tmp_path / "up", text, teacher_dtype="int4", **RUN)
    assert not list(tmp_path.iterdir())

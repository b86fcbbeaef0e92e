"""Oracles of the chunked loss: equal to the naive computation, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import pico_llama

from mha2gqa.lm_head import CHUNK_ELEMENTS, LMHead
from mha2gqa.uptraining import loss as D


def naive(z, labels, teacher, temperature, ce_weight):
    """The textbook loss on whole logits, summed over unmasked tokens."""
    keep = labels != D.IGNORE_INDEX
    z, labels = z[keep], labels[keep]
    ce = F.cross_entropy(z, labels, reduction="sum")
    if teacher is None:
        return ce
    width = min(z.shape[1], teacher.shape[1])
    p = F.softmax(teacher[keep][:, :width] / temperature, -1)
    q = F.log_softmax(z[:, :width] / temperature, -1)
    kl = F.kl_div(q, p, reduction="sum") * temperature**2
    return ce_weight * ce + (1 - ce_weight) * kl


@pytest.mark.parametrize("teacher_vocab", [None, 31, 40, 25])
@pytest.mark.parametrize(("temperature", "ce_weight"), [(1.0, 0.0), (2.5, 0.0), (1.0, 0.3), (2.0, 0.7)])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 3.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_chunks_equal_the_naive_loss(
    monkeypatch, teacher_vocab, temperature, ce_weight, scale, softcap, biased
):
    torch.manual_seed(0)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 7 * 31)  # 7 tokens a chunk, the last one short
    hidden = torch.randn(23, 12, dtype=torch.float64, requires_grad=True)
    module = torch.nn.Linear(12, 31, bias=biased, dtype=torch.float64)
    labels = torch.randint(0, 25, (23,))
    labels[[3, 11]] = D.IGNORE_INDEX
    teacher = None if teacher_vocab is None else 3 * torch.randn(23, teacher_vocab, dtype=torch.float64)
    head = LMHead(module, scale, softcap)
    spec = D.Objective(teacher is not None, temperature, ce_weight if teacher is not None else 1.0)
    chunk = None if teacher is None else (lambda part: teacher[part])
    loss, ce = D.chunked_loss(hidden, labels, spec, head=head, teacher=chunk)
    leaves = [hidden, *module.parameters()]
    got = torch.autograd.grad(loss * 0.37, leaves)

    z = module(hidden) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    wanted = naive(z, labels, teacher, temperature, ce_weight)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(got, torch.autograd.grad(wanted * 0.37, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if spec.ce_weight > 0:
        torch.testing.assert_close(ce, naive(z, labels, None, 1, 1), rtol=1e-10, atol=1e-10)


def test_own_logits_path_equals_the_naive_loss():
    torch.manual_seed(0)
    logits = torch.randn(9, 17, requires_grad=True)
    teacher, labels = torch.randn(9, 17), torch.randint(0, 17, (9,))
    loss, _ = D.chunked_loss(logits, labels, D.Objective(True, 1.0, 0.0), teacher=lambda part: teacher[part])
    wanted = naive(logits, labels, teacher, 1.0, 0.0)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    ours, theirs = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(wanted, logits)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_float32_agrees_to_a_millionth_per_token():
    """What training runs in: float32 sums over many tokens, against float64."""
    torch.manual_seed(0)
    hidden, module = torch.randn(512, 16, requires_grad=True), torch.nn.Linear(16, 1000, bias=False)
    labels, teacher = torch.randint(0, 1000, (512,)), torch.randn(512, 1000)
    spec = D.Objective(True, 1.0, 0.5)
    loss, _ = D.chunked_loss(hidden, labels, spec, head=LMHead(module), teacher=lambda part: teacher[part])
    double = hidden.detach().double().requires_grad_()
    wanted = naive(double @ module.weight.double().t(), labels, teacher.double(), 1.0, 0.5)
    assert abs(loss.item() - wanted.item()) / 512 < 1e-6
    ours, theirs = torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(wanted, double)[0]
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


def test_logits_never_exist_whole(monkeypatch):
    """No [tokens, vocabulary] tensor is made on the way, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.size = max(self.size, out.numel())
            return out

    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 16 * 4096)
    hidden, module = torch.randn(256, 8, requires_grad=True), torch.nn.Linear(8, 4096, bias=False)
    labels = torch.randint(0, 4096, (256,))
    frozen = torch.nn.Linear(8, 4096, bias=False).requires_grad_(False)
    chunk = D.teacher_chunks(torch.randn(256, 8), LMHead(frozen))
    with Largest() as largest:
        loss, _ = D.chunked_loss(
            hidden, labels, D.Objective(True, 1.0, 0.0), head=LMHead(module), teacher=chunk
        )
        loss.backward()
    assert largest.size <= 16 * 4096  # whole logits would be 256 * 4096


# --- Liger ------------------------------------------------------------------------------------------------


@pytest.fixture
def liger(monkeypatch) -> list[dict]:
    """A stand-in for liger-kernel that computes its textbook meaning and notes how it was called."""
    import sys
    from types import ModuleType

    calls: list[dict] = []

    def fused(x, weight, target, bias=None, **words):
        calls.append(words)
        z = F.linear(x, weight, bias)
        z = z if words["softcap"] is None else words["softcap"] * torch.tanh(z / words["softcap"])
        return F.cross_entropy(z, target, ignore_index=words["ignore_index"], reduction=words["reduction"])

    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
    return calls


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_liger_is_called_for_plain_loss_and_equals_the_chunks(liger, biased, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(23, 12, requires_grad=True)
    head = LMHead(torch.nn.Linear(12, 31, bias=biased), softcap=softcap)
    labels = torch.randint(0, 31, (23,))
    labels[[3, 11]] = D.IGNORE_INDEX
    leaves = [hidden, *head.module.parameters()]
    found = [D.chunked_loss(hidden, labels, D.Objective(liger=on), head=head) for on in (False, True)]
    assert len(liger) == 1 and liger[0]["accum_dtype"] == torch.float32
    torch.testing.assert_close(found[1], found[0])
    for ours, theirs in zip(*(torch.autograd.grad(x[0], leaves) for x in found), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_liger_is_left_out_where_it_cannot_say_it(liger):
    hidden, module = torch.randn(5, 4, requires_grad=True), torch.nn.Linear(4, 9, bias=False)
    labels, teacher = torch.randint(0, 9, (5,)), torch.randn(5, 9)
    on = {"liger": True}
    D.chunked_loss(hidden, labels, D.Objective(**on), head=LMHead(module, scale=0.5))
    D.chunked_loss(
        hidden, labels, D.Objective(True, 1.0, 0.0, **on), head=LMHead(module), teacher=lambda p: teacher[p]
    )
    D.chunked_loss(module(hidden), labels, D.Objective(**on))
    with torch.no_grad():
        D.chunked_loss(hidden, labels, D.Objective(**on), head=LMHead(module))
    assert not liger


def test_ligers_own_loss_stays_off(monkeypatch, tmp_path):
    from mha2gqa.errors import UsageError
    from mha2gqa.uptraining import model_prep
    from mha2gqa.uptraining.arguments import build_arguments
    from mha2gqa.uptraining.budget import UptrainConfig, plan_budget

    words = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    config = UptrainConfig("m", "o", ("d",), tokens=64, batch_tokens=64, device="cpu", training_args=words)
    budget = plan_budget(config, window=16)
    monkeypatch.setattr(model_prep, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="use_liger_kernel: needs the package liger-kernel"):
        build_arguments(config, budget, tmp_path, 32, False)
    monkeypatch.setattr(model_prep, "find_spec", lambda name: name)
    args = build_arguments(config, budget, tmp_path, 32, False)
    assert args.liger_kernel_config == {
        "rope": False,
        "fused_linear_cross_entropy": False,
        "cross_entropy": False,
    }


def test_ligers_kernels_leave_with_the_run():
    """They would stop a merge or a check of the same class on a CPU."""
    from transformers.models.llama import modeling_llama

    from mha2gqa.uptraining.model_prep import liger_removed_after

    def forward(self, x):
        raise AssertionError("a kernel on a CPU")

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    model, ids = pico_llama(), torch.arange(8)[None]
    wanted, norm, rope = model(ids).logits, modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb
    with pytest.raises(KeyError), liger_removed_after(model):
        modeling_llama.LlamaRMSNorm = modeling_llama.apply_rotary_pos_emb = forward
        model.model.norm.forward = forward.__get__(model.model.norm)
        with pytest.raises(TypeError):  # the rope
            model(ids)
        raise KeyError
    assert modeling_llama.LlamaRMSNorm is norm and modeling_llama.apply_rotary_pos_emb is rope
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=0)

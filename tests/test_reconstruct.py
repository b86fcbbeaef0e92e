"""Refit and regression: what they reach, what they leave alone, and the order of things."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import pico_llama

from mha2gqa.architectures import find_spec
from mha2gqa.errors import DataError
from mha2gqa.inmemory import convert_model
from mha2gqa.reconstruct import ReconstructConfig, reconstruct

SPEC = find_spec({"model_type": "llama"})
BLOCKS = torch.randint(3, 64, (160, 12), generator=torch.Generator().manual_seed(1))
QUICK = ReconstructConfig(steps=80, batch_size=8, learning_rate=3e-3)


def kl(teacher: torch.nn.Module, student: torch.nn.Module) -> float:
    with torch.no_grad():
        p, q = (model(BLOCKS).logits.log_softmax(-1) for model in (teacher, student))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("unit", ["attention", "layer"])
@pytest.mark.parametrize("inputs", ["student", "teacher"])
def test_every_stage_brings_the_student_closer(unit: str, inputs: str) -> None:
    teacher = pico_llama(attention_bias=True)
    before = {n: x.clone() for n, x in teacher.state_dict().items()}
    student = convert_model(teacher, 2)
    start = kl(teacher, student)
    config = dataclasses.replace(QUICK, unit=unit, inputs=inputs)
    fits = reconstruct(teacher, student, SPEC, BLOCKS, config)
    assert [fit.path for fit in fits] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for fit in fits:
        assert fit.refitted is not None and fit.refitted < fit.before
    assert fits[0].after < fits[0].before
    assert kl(teacher, student) < 0.9 * start
    assert all(torch.equal(x, before[n]) for n, x in teacher.state_dict().items())
    changed = {
        n
        for n, x in student.state_dict().items()
        if not torch.equal(x, convert_model(teacher, 2).state_dict()[n])
    }
    assert changed and all(".self_attn." in name for name in changed)


def test_a_student_that_equals_its_teacher_stays() -> None:
    teacher = pico_llama()
    student = convert_model(teacher, 8)
    fits = reconstruct(teacher, student, SPEC, BLOCKS, QUICK)
    for fit in fits:
        assert fit.before < 1e-12 and fit.after < 1e-6
    assert kl(teacher, student) < 1e-6


def test_refit_is_the_ridge_solution() -> None:
    teacher, config = pico_llama(attention_bias=True), dataclasses.replace(QUICK, regress=False, ridge=1e-3)
    student = convert_model(teacher, 1)
    merged = student.model.layers[0].self_attn.o_proj
    w0 = torch.cat([merged.weight.T, merged.bias[None]]).double().detach().clone()
    seen: dict[str, torch.Tensor] = {}
    for name, model in (("z", student), ("y", teacher)):
        module = model.model.layers[0].self_attn.o_proj
        hook = module.register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: args[0] if name == "z" else out})
        )
        with torch.no_grad():
            model(BLOCKS[:152])
        hook.remove()
    z = torch.cat([seen["z"].flatten(0, 1).double(), torch.ones(152 * 12, 1).double()], 1)
    y = seen["y"].flatten(0, 1).double()
    strength = 1e-3 * (z.T @ z).diagonal().mean()
    right = torch.linalg.solve(z.T @ z + strength * torch.eye(33).double(), z.T @ y + strength * w0)
    reconstruct(teacher, student, SPEC, BLOCKS, config)
    got = student.model.layers[0].self_attn.o_proj
    assert torch.allclose(torch.cat([got.weight.T, got.bias[None]]).double(), right, atol=1e-4)


def test_same_seed_same_weights() -> None:
    teacher = pico_llama()
    students = [convert_model(teacher, 2) for _ in range(2)]
    for student in students:
        reconstruct(teacher, student, SPEC, BLOCKS, QUICK)
    a, b = (student.state_dict() for student in students)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_bfloat16_students_stay_bfloat16() -> None:
    teacher = pico_llama().bfloat16()
    student = convert_model(teacher, 2)
    start = kl(teacher, student)
    reconstruct(teacher, student, SPEC, BLOCKS, QUICK)
    assert {x.dtype for x in student.parameters()} == {torch.bfloat16}
    assert kl(teacher, student) < start


def test_too_little_text_is_refused() -> None:
    teacher = pico_llama()
    with pytest.raises(DataError, match="give at least 384 tokens"):
        reconstruct(teacher, convert_model(teacher, 2), SPEC, BLOCKS[:20], ReconstructConfig())


def test_a_dead_module_is_harmless() -> None:
    teacher = pico_llama()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(teacher.model.layers[0].self_attn, name).weight.data.zero_()
    student = convert_model(teacher, 2)
    reconstruct(teacher, student, SPEC, BLOCKS, QUICK)
    assert all(torch.isfinite(x).all() for x in student.state_dict().values())

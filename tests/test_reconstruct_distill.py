"""End-to-end training against explicit divergences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import pico_llama

from mha2gqa.architectures import AttentionSpec
from mha2gqa.conversion.checkpoint import convert_model
from mha2gqa.reconstruct import ReconstructConfig, distill
from mha2gqa.reconstruct import distill as distill_function

SPEC = AttentionSpec()
CONFIG = ReconstructConfig(batch_size=4, check_every=10, holdout=0.25, distill_steps=40, distill_rate=3e-3)
BLOCKS = ["model.layers.0", "model.layers.1"]


def ids(n: int = 24, t: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(64, (n, t), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def divergence(teacher: Any, student: Any, rows: torch.Tensor) -> float:
    p, q = (m(input_ids=rows).logits.double().log_softmax(-1) for m in (teacher, student))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_it_comes_closer_to_the_originals_predictions() -> None:
    teacher = pico_llama()
    student = convert_model(teacher, 2, method="joint")
    old = {n: x.clone() for n, x in student.state_dict().items()}
    original = {n: x.clone() for n, x in teacher.state_dict().items()}
    begin = divergence(teacher, student, ids(100)[76:])
    told: list[tuple[int, int]] = []
    done = distill(teacher, student, SPEC, ids(100), CONFIG, lambda *steps: told.append(steps))
    assert told == [(i, 40) for i in range(1, 41)]
    assert done.before == pytest.approx(begin, rel=1e-4)  # of 25 batches the last 6 judge
    assert done.after == pytest.approx(divergence(teacher, student, ids(100)[76:]), rel=1e-4)
    assert done.after < 0.97 * done.before and done.steps == 40
    changed = {n for n, x in student.state_dict().items() if not torch.equal(x, old[n])}
    assert changed == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qkvo"}
    assert all(torch.equal(x, original[n]) for n, x in teacher.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in student.parameters())


def test_logits_in_chunks_give_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Any, dict[str, torch.Tensor]]:
        teacher = pico_llama()
        student = convert_model(teacher, 2, method="joint")
        done = distill(teacher, student, SPEC, ids(), replace(CONFIG, distill_steps=5))
        return done, student.state_dict()

    whole, weights = run()
    assert all(torch.equal(x, weights[n]) for n, x in run()[1].items())
    monkeypatch.setitem(
        distill_function.__globals__["LOGITS"], "cpu", 64 * 12 * 3
    )  # two chunks of the 48 positions
    pieces, others = run()
    assert pieces.before == pytest.approx(whole.before, rel=1e-5)
    for name, x in weights.items():
        torch.testing.assert_close(others[name], x, rtol=1e-3, atol=1e-4)


def test_a_lossless_student_stays_lossless_and_half_precision_stays_half() -> None:
    teacher = pico_llama().bfloat16()
    same = convert_model(teacher, 8, method="joint")
    done = distill(teacher, same, SPEC, ids(), CONFIG)
    assert done.before < 1e-6 and done.after <= done.before
    student = convert_model(teacher, 2, method="joint")
    done = distill(teacher, student, SPEC, ids(100), CONFIG)
    assert done.after < done.before
    assert all(x.dtype == torch.bfloat16 for x in student.state_dict().values())


def test_conversion_distils_after_regression() -> None:
    teacher = pico_llama()
    rows = torch.cat([ids(48), ids(48, 1)], 1)
    fit = replace(CONFIG, steps=5, learning_rate=1e-3)
    regressed = convert_model(teacher, 2, calibration=rows, fit=replace(fit, distill_steps=0))
    student = convert_model(teacher, 2, calibration=rows, fit=fit)
    assert divergence(teacher, student, ids(40, seed=5)) < divergence(teacher, regressed, ids(40, seed=5))


# --- the Fisher metric -----------------------------------------------------------------------------------

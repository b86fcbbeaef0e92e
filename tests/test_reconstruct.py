"""Refit against an explicit least-squares solution; regression lowers the error of every kind of module."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import pico_llama

from mha2gqa.architectures import AttentionSpec
from mha2gqa.conversion.checkpoint import convert_model
from mha2gqa.errors import DataError, UsageError
from mha2gqa.reconstruct import LayerFit, ReconstructConfig, reconstruct
from mha2gqa.reconstruct.calls import gather
from mha2gqa.reconstruct.driver import split_batches
from mha2gqa.reconstruct.hidden_states import Stream
from mha2gqa.reconstruct.ranks import Ranks
from mha2gqa.reconstruct.refit import refit, ridge_solution
from mha2gqa.reconstruct.regress import rate, relative_error, row_order

SPEC = AttentionSpec()
FEW = ReconstructConfig(
    steps=30, batch_size=4, check_every=10, learning_rate=1e-2, holdout=0.25, unit="attention"
)


def blocks(n: int = 24, t: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(64, (n, t), generator=torch.Generator().manual_seed(seed))


def gap(teacher: Any, student: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float((teacher(input_ids=ids).logits - student(input_ids=ids).logits).square().mean())


def attention_inputs(model: Any, layer: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of an output projection, by hooks of the test's own."""
    kept = {}
    handle = model.model.layers[layer].self_attn.o_proj.register_forward_hook(
        lambda m, args, out: kept.update(z=args[0].detach(), y=out.detach())
    )
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return kept["z"].flatten(0, 1).double(), kept["y"].flatten(0, 1).double()


def explicit_ridge(
    z: torch.Tensor, y: torch.Tensor, prior: torch.Tensor, ridge: float, bias: bool
) -> torch.Tensor:
    """Least squares with the pull as rows of their own; the last row of the result is the bias, if any."""
    pull = ridge * z.square().sum(0).mean()
    left, right = [z, pull.sqrt() * torch.eye(z.shape[1])], [y, pull.sqrt() * prior]
    if bias:
        left = [torch.cat([x, torch.full((len(x), 1), float(j == 0))], 1) for j, x in enumerate(left)]
    return torch.linalg.lstsq(torch.cat(left), torch.cat(right)).solution


@pytest.mark.parametrize(("bias", "ridge"), [(False, 1e-2), (True, 1e-2), (False, 1e-6), (True, 1e-6)])
def test_refit_is_the_ridge_solution_or_what_held_out_blocks_like_best_where_that_harms(
    bias: bool, ridge: float
) -> None:
    teacher = pico_llama(attention_bias=bias)
    student = convert_model(teacher, 2, method="joint")
    ids = blocks(24)
    merged = [copy.deepcopy(layer.self_attn.o_proj).requires_grad_(False) for layer in student.model.layers]
    config = ReconstructConfig(regress=False, ridge=ridge, batch_size=4, holdout=1 / 6)
    fits = reconstruct(teacher, student, SPEC, ids, config)
    for i, fit in enumerate(fits):  # later layers read what earlier refits left: check them in the result
        o = student.model.layers[i].self_attn.o_proj
        z, _ = attention_inputs(student, i, ids)
        _, y = attention_inputs(teacher, i, ids)
        seen, validate = slice(0, 20 * 12), slice(20 * 12, None)
        prior = merged[i].weight.double().T
        tried = {
            times * ridge: explicit_ridge(z[seen], y[seen], prior, times * ridge, bias)
            for times in (1.0, 10.0, 100.0, 1000.0)
        }
        own_bias = [merged[i].bias.double()[None]] if bias else []
        tried[None] = torch.cat([prior, *own_bias])
        errors = {
            pull: float((z[validate] @ w[:32] + (w[32] if bias else 0) - y[validate]).square().sum())
            for pull, w in tried.items()
        }
        helps = errors[ridge] < errors[None]
        assert fit.ridge == (ridge if helps else min(errors, key=errors.__getitem__))
        want = tried[fit.ridge]
        torch.testing.assert_close(o.weight.double(), want[:32].T, rtol=1e-4, atol=1e-5)
        if bias:
            torch.testing.assert_close(o.bias.double(), want[32], rtol=1e-4, atol=1e-5)
        spread = float((y[validate] - y[validate].mean(0)).square().sum())
        assert fit.after == fit.refitted == pytest.approx(errors[fit.ridge] / spread, rel=1e-3)


def test_a_refit_that_only_fits_noise_is_weakened_or_dropped() -> None:
    """Few tokens carry the output's energy: a weak pull fits those of the text, and is worse on any other."""
    teacher = pico_llama()
    student = convert_model(teacher, 2, method="joint")
    ids = blocks(6)  # 4 blocks of 12 tokens for 32 unknowns per output
    merged = student.model.layers[0].self_attn.o_proj.weight.detach().clone()
    z, y = attention_inputs(student, 0, ids)[0], attention_inputs(teacher, 0, ids)[1]
    weak = explicit_ridge(z[:48], y[:48], merged.double().T, 1e-6, False)
    spread = (y[48:] - y[48:].mean(0)).square().sum()
    fits = reconstruct(
        teacher, student, SPEC, ids, ReconstructConfig(regress=False, ridge=1e-6, batch_size=2)
    )
    assert (z[48:] @ weak - y[48:]).square().sum() / spread > 1.5 * fits[0].before
    assert fits[0].refitted <= fits[0].before + 1e-9
    held = Stream(student, ids, 2, ["model.layers.0", "model.layers.1"])
    module = student.model.layers[0].self_attn.o_proj
    old, noise = copy.deepcopy(module), torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))

    def wanted(i: int) -> torch.Tensor:
        """Noise where it solves; what it does already where it is judged."""
        return noise if i < 2 else old(next(iter(held.call(module, i, before=True).rows.values())))

    assert refit(held, module, wanted, (range(2), range(2, 3)), ridge=1e-6) is None
    assert torch.equal(module.weight, old.weight)


def test_ridge_shrinks_to_the_merged_projection_and_survives_dead_inputs() -> None:
    gram, cross, prior = torch.zeros(4, 4), torch.zeros(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(ridge_solution(gram, cross, prior, 1e-3), prior)
    gram = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    out = ridge_solution(gram.double(), cross.double(), prior.double(), 1e-3)
    torch.testing.assert_close(out[2:], prior[2:].double())
    assert float(out[:2].abs().max()) < 1e-2 * float(prior.abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inputs": "teacher"},
        {"unit": "layer"},
        {"unit": "layer", "inputs": "teacher"},
        {"relative": True, "learning_rate": 0.05},
    ],
)
def test_regression_lowers_the_error_of_every_module(changes: dict[str, Any]) -> None:
    teacher = pico_llama()
    student = convert_model(teacher, 2, method="joint")
    start, ids = gap(teacher, student, blocks(seed=7)), blocks(200)
    told: list[LayerFit] = []
    config = ReconstructConfig(**{**vars(FEW), "steps": 60, **changes})
    fits = reconstruct(teacher, student, SPEC, ids, config, told.append)
    assert [fit.path for fit in fits] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for fit in fits:
        assert fit.refitted < fit.before and fit.steps == 60
        if config.unit == "attention":  # else the layer's output is what gets closer
            assert fit.after < fit.before
        if config.inputs == "student" and config.unit == "attention":  # what was judged by is what is told
            assert fit.after < fit.refitted
    assert gap(teacher, student, blocks(seed=7)) < start
    assert told == fits
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*teacher.modules(), *student.modules()))
    assert all(p.requires_grad for p in student.parameters())


def test_only_projections_change_and_the_original_does_not() -> None:
    teacher = pico_llama()
    student = convert_model(teacher, 2, method="joint")
    old = {n: x.clone() for n, x in student.state_dict().items()}
    original = {n: x.clone() for n, x in teacher.state_dict().items()}
    reconstruct(teacher, student, SPEC, blocks(200), replace(FEW, steps=60))
    changed = {n for n, x in student.state_dict().items() if not torch.equal(x, old[n])}
    assert changed == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qkvo"}
    assert all(torch.equal(x, original[n]) for n, x in teacher.state_dict().items())


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    def run(seed: int) -> dict[str, torch.Tensor]:
        teacher = pico_llama()
        student = convert_model(teacher, 2, method="joint")
        reconstruct(teacher, student, SPEC, blocks(200), replace(FEW, learning_rate=3e-3, seed=seed))
        return student.state_dict()

    a, b, c = run(0), run(0), run(1)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], c[n]) for n in a)


def test_no_stage_makes_a_lossless_student_worse() -> None:
    teacher = pico_llama()
    with torch.no_grad():
        for layer in teacher.model.layers:
            for p in ("k_proj", "v_proj"):
                w = getattr(layer.self_attn, p).weight.view(2, 4, 4, 32)
                w[:] = w[:, :1]
    student = convert_model(teacher, 2, method="joint")
    fits = reconstruct(teacher, student, SPEC, blocks(), FEW)
    assert max(fit.after for fit in fits) < 1e-8
    assert all(fit.steps == 0 and fit.refitted is None for fit in fits)  # nothing is left but noise to fit
    assert gap(teacher, student, blocks(seed=3)) < 1e-8


def test_it_stops_when_held_out_blocks_no_longer_improve() -> None:
    teacher = pico_llama()
    student = convert_model(teacher, 2, method="joint")
    config = ReconstructConfig(
        refit=False, steps=500, batch_size=4, check_every=5, patience=2, learning_rate=3.0,
        schedule="constant", holdout=0.25,
    )  # fmt: skip
    fits = reconstruct(teacher, student, SPEC, blocks(), config)
    assert all(fit.after <= fit.before and fit.steps < 200 for fit in fits)


def test_half_precision_students_keep_their_dtype() -> None:
    teacher = pico_llama().bfloat16()
    student = convert_model(teacher, 2, method="joint")
    fits = reconstruct(teacher, student, SPEC, blocks(200), FEW)
    assert all(x.dtype == torch.bfloat16 for x in student.state_dict().values())
    assert all(fit.after < fit.before for fit in fits)


@pytest.mark.parametrize("chained", [True, False])
def test_streams_repeat_what_the_model_does(chained: bool) -> None:
    """Walking block by block gives the activations of the whole model, and so does the way without a chain."""
    model, ids = pico_llama(), blocks(8)
    stream = Stream(model, ids, 4, ["model.layers.0", "model.layers.1"])
    assert stream.chained
    stream.chained = chained
    stream.advance()
    module = model.model.layers[1].self_attn
    with torch.no_grad():
        want = model(input_ids=ids, output_hidden_states=True).hidden_states[1]
    for i in range(2):
        got = stream.call(model.model.layers[1], i, before=True).rows["hidden_states"]
        torch.testing.assert_close(got, want[4 * i : 4 * i + 4])
    calls = gather(stream, module, lambda i: stream.call(module, i).output, stream, module)
    assert len(calls) == 8 and set(calls.rows) == {"hidden_states"}
    assert relative_error(module, calls) < 1e-10


def test_encoder_decoder_modules_are_reconstructed_too() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    from mha2gqa.architectures import PerHeadParameter

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=4, d_ff=48, num_layers=2, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    teacher = T5ForConditionalGeneration(config).eval()
    spec = AttentionSpec(
        modules=(
            ("self", "decoder.block.{layer}.layer.0.SelfAttention"),
            ("cross", "decoder.block.{layer}.layer.1.EncDecAttention"),
        ),
        prefixes=("",), q="q", k="k", v="v", o="o", position="relative", key_symmetry="linear",
        per_head=(PerHeadParameter("relative_attention_bias.weight", "query", 1),),
    )  # fmt: skip
    inputs = {"input_ids": blocks(24, 9), "decoder_input_ids": blocks(24, 6, seed=2)}
    for side in ("teacher", "student"):
        student = T5ForConditionalGeneration(config).eval()
        student.load_state_dict(teacher.state_dict())
        with torch.no_grad():
            for block in student.decoder.block:
                for attention in (block.layer[0].SelfAttention, block.layer[1].EncDecAttention):
                    attention.v.weight.add_(torch.randn(32, 32) * 0.3)
                    attention.k.weight.mul_(0.5)
        knobs = ReconstructConfig(**{**vars(FEW), "inputs": side, "refit": False})
        fits = reconstruct(teacher, student, spec, inputs, knobs)
        assert [fit.path.split(".")[-1] for fit in fits] == ["SelfAttention", "EncDecAttention"] * 2
        assert all(fit.after < fit.before for fit in fits), fits


def test_too_few_blocks_and_bad_knobs_are_refused() -> None:
    with pytest.raises(DataError, match="7 blocks"):
        split_batches(blocks(7), FEW)
    assert split_batches(blocks(27), FEW) == (range(4), range(4, 6))
    for knob in (
        {"learning_rate": 0.0},
        {"holdout": 1.0},
        {"steps": -1},
        {"batch_size": -1},
        {"batch_tokens": 0},
    ):
        with pytest.raises(UsageError, match=next(iter(knob))):
            ReconstructConfig(**knob)


def test_activations_that_are_not_finite_name_the_module() -> None:
    teacher = pico_llama()
    student = convert_model(teacher, 2, method="joint")
    with torch.no_grad():
        teacher.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"layers\.1\.self_attn"):
        reconstruct(teacher, student, SPEC, blocks(), FEW)


def test_schedules_and_orders() -> None:
    config = ReconstructConfig(steps=100, warmup=0.1, schedule="cosine")
    assert rate(0, config) == pytest.approx(0.1) and rate(9, config) == 1.0 and rate(99, config) < 0.01
    assert rate(55, ReconstructConfig(steps=100, warmup=0.1, schedule="linear")) == pytest.approx(0.5)
    order = row_order(10, 4, 0)
    rounds = torch.cat([next(order) for _ in range(5)])
    assert sorted(rounds.tolist()) == sorted([*range(10), *range(10)])


def test_ranks_share_the_batches_of_one() -> None:
    """Rows rank, rank + n, … of each batch of one process are the batch of a process of n."""
    one, parts = row_order(24, 8, 3), [row_order(24, 8, 3, Ranks(rank, 4)) for rank in range(4)]
    for _ in range(9):
        whole = next(one)
        shares = [next(part) * 4 + rank for rank, part in enumerate(parts)]
        assert all(len(share) == 2 for share in shares)
        assert sorted(whole.tolist()) == sorted(torch.cat(shares).tolist())

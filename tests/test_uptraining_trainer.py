"""The trainer against a hand-written loop, accumulation, evaluation, guard, order of data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import pico_llama
from transformers import TrainerCallback

from mha2gqa.data.chat import hide
from mha2gqa.errors import TrainingError, UsageError
from mha2gqa.uptraining import train_model
from mha2gqa.uptraining.batches import (
    BlockOrder,
    BlockStream,
    Collator,
    Mixture,
    restarted_positions,
    share_out,
)
from mha2gqa.uptraining.budget import learning_rate_factor
from mha2gqa.uptraining.guard import SpikeGuard
from mha2gqa.uptraining.model_prep import one_document_a_row
from mha2gqa.uptraining.trainer import UptrainTrainer

BLOCKS = torch.randint(0, 64, (24, 17), generator=torch.Generator().manual_seed(0))
STEPS, PER_STEP = 6, 8
OPTIONS = {
    "tokens": STEPS * PER_STEP * 16,
    "batch_tokens": PER_STEP * 16,
    "device": "cpu",
    "learning_rate": 3e-3,
}


def by_hand(model: torch.nn.Module, teacher: torch.nn.Module | None) -> list[float]:
    """The recipe, written out: AdamW (0.9, 0.95), decay 0.1 on matrices, clip 1, warm-up, linear to 0."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    other = [p for n, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    order, losses = BlockOrder(BLOCKS, STEPS * PER_STEP, 0, Collator()), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * learning_rate_factor(step, STEPS, STEPS // 5, "linear")
        ids = BLOCKS[[order.row(step * PER_STEP + i) for i in range(PER_STEP)]]
        logits = model(input_ids=ids[:, :-1]).logits.flatten(0, 1)
        if teacher is None:
            loss = F.cross_entropy(logits, ids[:, 1:].flatten())
        else:
            with torch.no_grad():
                wanted = teacher(input_ids=ids[:, :-1]).logits.flatten(0, 1)
            loss = F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize("micro", [8, 2])  # U01: accumulation does not change the gradient
def test_equal_to_a_loop_written_by_hand(distil, micro):
    teacher = pico_llama() if distil else None
    ours, theirs = pico_llama(num_key_value_heads=2), pico_llama(num_key_value_heads=2)
    result = train_model(
        ours, BLOCKS, teacher=teacher, logging_steps=1, per_device_train_batch_size=micro, **OPTIONS
    )
    losses = by_hand(theirs, teacher)
    assert [e["loss"] for e in result.losses["train"]] == pytest.approx(losses, abs=2e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_model_is_left_as_it_was_but_trained():
    model = pico_llama()
    train_model(model, BLOCKS, **OPTIONS)
    assert "forward" not in model.__dict__ and "forward" not in model.lm_head.__dict__
    assert model(input_ids=BLOCKS[:1, :-1]).logits.shape == (1, 16, 64)


def test_held_out_loss_is_the_mean_over_tokens():
    model = pico_llama()
    result = train_model(model, BLOCKS, held_out=BLOCKS[:5], per_device_eval_batch_size=2, **OPTIONS)
    with torch.no_grad():
        logits = model(BLOCKS[:5, :-1]).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), BLOCKS[:5, 1:].flatten()).item()
    assert result.losses["held_out_end"] == pytest.approx(wanted, abs=1e-5)
    assert result.losses["held_out"][0]["step"] == 0


def test_teacher_stays_frozen_and_apart():
    model, teacher = pico_llama(), pico_llama()
    before = [p.clone() for p in teacher.parameters()]
    train_model(model, BLOCKS, teacher=teacher, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    with pytest.raises(UsageError, match="share parameters"):
        train_model(model, BLOCKS, teacher=model, **OPTIONS)


# --- order of data -----------------------------------------------------------------------------------


def test_order_is_a_permutation_each_pass():
    order = BlockOrder(BLOCKS, 60, 3, Collator())
    rows = [order.row(i) for i in range(60)]
    assert sorted(rows[:24]) == sorted(rows[24:48]) == list(range(24))
    assert rows[:24] != rows[24:48]
    again = BlockOrder(BLOCKS, 60, 3, Collator())
    assert [again.row(i) for i in reversed(range(60))] == rows[::-1]  # any access order, same rows


@pytest.mark.parametrize("start", [0, 3, 10, 17])
def test_stream_continues_from_any_step(start):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 99, rng.integers(1, 30)) for _ in range(40)]
    opened = lambda first: iter(documents[first:])  # noqa: E731
    whole = BlockStream(opened, 8, 2)
    blocks = [block for _, block in zip(range(60), whole, strict=False)]  # more than one pass
    joined = np.concatenate([*documents, *documents])
    for i, block in enumerate(blocks):
        assert np.array_equal(block, joined[i * 8 : i * 8 + 9])
    position = whole.position(start * 2)
    rest = BlockStream(opened, 8, 2, position, start * 2)
    for a, b in zip(blocks[start * 2 :], rest, strict=False):
        assert np.array_equal(a, b)


def test_positions_restart_after_the_end_of_text():
    ids = torch.tensor([[5, 6, 0, 7, 8, 0, 9], [0, 1, 2, 3, 4, 5, 6]])
    assert restarted_positions(ids, 0).tolist() == [[0, 1, 2, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_masked_labels_do_not_count():
    spoken = torch.ones(4, 17, dtype=torch.bool)
    spoken[:, ::2] = False
    stored = hide(BLOCKS[:4].numpy(), spoken.numpy())
    batch = Collator(counts_labels=True)(stored)
    assert torch.equal(batch["input_ids"], BLOCKS[:4, :-1])
    assert torch.equal(batch["labels"] == -100, ~spoken[:, 1:])
    assert torch.equal(batch["labels"][spoken[:, 1:]], BLOCKS[:4, 1:][spoken[:, 1:]])


def test_masked_labels_are_left_out_of_the_loss():
    """U01: rows with few and many labels weigh by tokens, not by rows, and across micro-batches."""
    spoken = torch.rand(24, 17, generator=torch.Generator().manual_seed(1)) < 0.3
    spoken[:4] = True
    stored = torch.from_numpy(hide(BLOCKS.numpy(), spoken.numpy()))
    curves = []
    for micro in (8, 1):
        model = pico_llama()
        collate = Collator(counts_labels=True)
        options = OPTIONS | {"logging_steps": 1, "per_device_train_batch_size": micro}
        result = train_model(model, stored, collate=collate, **options)
        curves.append([e["loss"] for e in result.losses["train"]])
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    order = BlockOrder(stored, STEPS * PER_STEP, 0, Collator(counts_labels=True))
    batch = order.__getitems__(range(PER_STEP))
    with torch.no_grad():
        logits = pico_llama()(batch["input_ids"]).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert curves[0][0] == pytest.approx(wanted.item(), abs=1e-5)


def test_mixture_keeps_its_shares_and_passes():
    sources = [torch.full((5, 17), 1), torch.arange(7 * 17).reshape(7, 17) + 100]
    mixture = Mixture(sources, (3.0, 1.0), 80, 0, Collator())
    rows = [tuple(row) for row in mixture.fetch(range(80)).tolist()]
    assert sum(row[0] == 1 for row in rows) == 60
    second = [row for row in rows if row[0] != 1]
    for turn in (second[:7], second[7:14]):
        assert sorted(turn) == sorted(map(tuple, sources[1].tolist()))
    assert mixture.fetch([41, 3]).tolist() == [list(rows[41]), list(rows[3])]
    assert share_out(10, (1, 1, 1)) == [4, 3, 3]


# --- guard --------------------------------------------------------------------------------------------


def test_divergence_stops_with_the_step_number():
    """U10: G = 1, learning rate 1000."""
    model = pico_llama(num_key_value_heads=1)
    with pytest.raises(TrainingError, match=r"at step [2-5]"):
        train_model(
            model, BLOCKS, **{**OPTIONS, "learning_rate": 1e3, "max_grad_norm": 0.0, "warmup_steps": 0}
        )


def test_guard_judges():
    guard = SpikeGuard(uniform=4.0, warmup=3, patience=2)
    assert all(guard.accept(i, 3.0, 1.0, 10) for i in range(1, 5))
    assert not guard.accept(5, 3.5, 50.0, 10)
    assert guard.accept(6, 2.0, 50.0, 10)  # a large gradient at a low loss is no spike
    assert not guard.accept(7, 0.0, 0.0, 0)
    assert (guard.skipped, guard.unlabelled) == ([5], [7])
    restored = SpikeGuard(uniform=4.0, warmup=3, patience=2)
    restored.load(guard.state())
    for judge in (guard, restored):
        assert not judge.accept(8, 3.5, 500.0, 10)
        with pytest.raises(TrainingError, match="2 steps in a row"):
            judge.accept(9, 3.5, 500.0, 10)
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (13.0, 1.0)):
        guard = SpikeGuard(uniform=4.0)
        assert guard.accept(9, 3.0, 1.0, 10)
        with pytest.raises(TrainingError, match="at step 10"):
            guard.accept(10, loss, norm, 10)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped_but_in_the_first_step(norm):
    guard = SpikeGuard(uniform=4.0, patience=2)
    with pytest.raises(TrainingError, match="no weight has moved yet"):
        guard.accept(1, 3.0, norm, 10)
    guard = SpikeGuard(uniform=4.0, patience=2)
    assert guard.accept(1, 3.0, 1.0, 10) and not guard.accept(2, 3.0, norm, 10)
    assert guard.accept(3, 3.0, 1.0, 10) and guard.skipped == [2]
    assert not guard.accept(4, 3.0, norm, 10)
    with pytest.raises(TrainingError, match="2 steps in a row"):
        guard.accept(5, 3.0, norm, 10)
    guard = SpikeGuard(uniform=4.0, factor=0)
    assert guard.accept(1, 3.0, 1.0, 10)
    with pytest.raises(TrainingError, match="at step 2"):
        guard.accept(2, 3.0, norm, 10)


def test_guard_judges_alike_on_the_device_and_later():
    """`rejects`, before the numbers have arrived, and `accept`, when they have."""
    generator = np.random.default_rng(0)
    guard, verdicts = SpikeGuard(uniform=4.0, warmup=5, history=8, patience=99), []
    for step in range(1, 200):
        loss, norm = 3 + 0.1 * generator.standard_normal(), float(np.exp(2 * generator.standard_normal()))
        labels = int(step % 50 != 0)
        refused = guard.rejects(torch.tensor(loss).double(), torch.tensor(norm).double(), labels)
        verdicts.append(bool(refused))
        loss, norm = float(torch.tensor(loss)), float(torch.tensor(norm))
        assert guard.accept(step, loss, norm, labels) is not verdicts[-1]
    assert 5 < sum(verdicts) < 100
    for loss, norm in ((math.nan, 1.0), (3.0, math.inf), (3.0, math.nan), (12.5, 1.0)):
        assert guard.rejects(torch.tensor(loss).double(), torch.tensor(norm).double(), 1)


@pytest.fixture(params=["adamw_torch_fused", "adamw_torch"])
def optim(request) -> str:
    """An optimiser that reads the verdict on the device, and one that must be told."""
    return request.param


def test_a_spike_leaves_weights_and_moments_alone(monkeypatch, optim):
    model = pico_llama()
    judged = []

    def rejects(self, loss, norm, labels):
        judged.append([p.detach().clone() for p in model.parameters()])
        return torch.tensor(len(judged) == 3)

    monkeypatch.setattr(SpikeGuard, "rejects", rejects)
    monkeypatch.setattr(SpikeGuard, "accept", lambda self, step, *rest: step != 3)
    train_model(model, BLOCKS, optim=optim, **OPTIONS)
    same = [all(torch.equal(a, b) for a, b in zip(judged[i], judged[i + 1], strict=True)) for i in range(5)]
    assert same == [False, False, True, False, False]


def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_alone(optim):
    """One batch whose backward pass overflows does not end a long run, nor touch what it has learnt."""
    model, before, steps = pico_llama(), [], []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps.append(state.global_step)
            before.append([p.detach().clone() for p in model.parameters()])

    first = next(model.parameters())
    first.register_hook(lambda grad: grad * math.nan if steps[-1] == 2 else grad)
    result = train_model(model, BLOCKS, optim=optim, callbacks=[Watch()], **OPTIONS)
    same = [all(torch.equal(a, b) for a, b in zip(before[i], before[i + 1], strict=True)) for i in range(5)]
    assert same == [False, False, True, False, False] and result.skipped_steps == [3]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("logging_steps", [1, 10])
def test_no_weight_moves_after_a_loss_that_is_not_finite(monkeypatch, optim, logging_steps):
    model, before, logged = pico_llama(), [], []
    rejects, log, compute = SpikeGuard.rejects, UptrainTrainer.log, UptrainTrainer.compute_loss

    def noting(self, *values):
        before.append([p.detach().clone() for p in model.parameters()])
        return rejects(self, *values)

    def poisoned(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        if self.state.global_step == 3:
            self._sums[0] *= math.nan  # what the guard reads
            return loss * math.nan
        return loss

    def logging(self, logs, *rest):
        log(self, logs, *rest)
        logged.append(logs.get("loss", 0.0))

    monkeypatch.setattr(SpikeGuard, "rejects", noting)
    monkeypatch.setattr(UptrainTrainer, "compute_loss", poisoned)
    monkeypatch.setattr(UptrainTrainer, "log", logging)
    with pytest.raises(TrainingError, match="at step 4"):
        train_model(model, BLOCKS, optim=optim, logging_steps=logging_steps, **OPTIONS)
    assert len(before) == 4 and all(map(math.isfinite, logged))
    for p, q in zip(model.parameters(), before[3], strict=True):
        assert torch.equal(p, q)


# --- options ------------------------------------------------------------------------------------------


def test_pass_through_options_are_checked():
    with pytest.raises(UsageError, match="did you mean adam_beta2"):
        train_model(pico_llama(), BLOCKS, adam_beta3=0.9, **OPTIONS)
    with pytest.raises(UsageError, match="use batch_tokens"):
        train_model(pico_llama(), BLOCKS, gradient_accumulation_steps=2, **OPTIONS)
    with pytest.raises(UsageError, match="use one of 1, 2, 4, 8"):
        train_model(pico_llama(), BLOCKS, per_device_train_batch_size=3, **OPTIONS)


def test_bf16_autocast_follows_float32():
    """Mixed precision: float32 weights, bf16 products, float32 losses; the stream in either."""
    curves, streams = [], []
    for bf16, stream in ((False, "float32"), (True, "float32"), (True, "bfloat16")):
        model = pico_llama()
        hook = model.model.layers[1].register_forward_pre_hook(lambda m, args: streams.append(args[0].dtype))
        result = train_model(
            model,
            BLOCKS,
            teacher=pico_llama(num_key_value_heads=1),
            bf16=bf16,
            logging_steps=1,
            residual_dtype=stream,
            **OPTIONS,
        )
        hook.remove()
        curves.append([e["loss"] for e in result.losses["train"]])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert streams[-1] == getattr(torch, stream)
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.02) and curve != curves[0]


@pytest.mark.slow
def test_compiled_layers_follow_eager_ones():
    curves = []
    for torch_compile in (False, True):
        model, teacher = pico_llama(num_hidden_layers=4), pico_llama(num_key_value_heads=1)
        result = train_model(
            model, BLOCKS, teacher=teacher, torch_compile=torch_compile, logging_steps=1, **OPTIONS
        )
        curves.append([e["loss"] for e in result.losses["train"]])
        assert "forward" not in model.model.layers[0].__dict__
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_activation_checkpointing_changes_nothing():
    a, b = pico_llama(), pico_llama()
    train_model(a, BLOCKS, **OPTIONS)
    train_model(b, BLOCKS, gradient_checkpointing=True, **OPTIONS)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_masks_are_the_same_when_rows_are_known_not_to_be_packed(monkeypatch, window):
    """transformers' look for packed documents costs a wait for the GPU; leaving it out changes nothing."""
    from transformers import MistralConfig, MistralForCausalLM, masking_utils

    looked = []
    found = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda p: (looked.append(1), found(p))[1]
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window}
    model = MistralForCausalLM(MistralConfig(**shape, **heads)).eval()
    ids = torch.arange(12)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    assert looked.pop()
    with one_document_a_row():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    assert not looked
    model(input_ids=ids, use_cache=False)
    assert looked

"""alpha -> tokens -> steps, refusals, schedules; no torch."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mha2gqa.config import UptrainConfig
from mha2gqa.errors import UsageError
from mha2gqa.uptraining.budget import (
    default_batch_tokens,
    default_learning_rate,
    learning_rate_factor,
    plan_budget,
    warmup_count,
)
from mha2gqa.uptraining.pretraining_tokens import PRETRAINING, known_pretraining


def config(**options) -> UptrainConfig:
    return UptrainConfig("m", "o", ("d",), **options)


def test_the_papers_five_percent():
    budget = plan_budget(config(alpha=0.05, original_steps=6000, original_batch_tokens=65536), window=512)
    assert (budget.steps, budget.tokens, budget.blocks_per_step) == (1200, 300 * 65536, 32)
    assert budget.original_tokens == 6000 * 65536
    assert "alpha 0.05" in budget.sentence() and "1,200 steps" in budget.sentence()


def test_known_families_and_implied_alpha():
    budget = plan_budget(config(tokens=10**9), window=2048, name="meta-llama/Llama-2-7b-hf")
    assert budget.alpha == pytest.approx(budget.tokens / 2e12)
    assert "2307.09288" in budget.original_source
    assert plan_budget(config(tokens=10**9), window=2048, name="in-house").alpha is None
    own = plan_budget(config(alpha=0.01, original_tokens=10**9), window=512, name="meta-llama/Llama-2-7b-hf")
    assert own.original_tokens == 10**9  # the user's number wins


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("meta-llama/Llama-2-13b-hf", 2e12),
        ("codellama/CodeLlama-7b-hf", 2.5e12),
        ("codellama/CodeLlama-13b-Python-hf", 2.6e12),
        ("codellama/CodeLlama-70b-hf", 3e12),
        ("huggyllama/llama-7b", 1e12),
        ("huggyllama/llama-65b", 1.4e12),
        ("openlm-research/open_llama_3b", 1e12),
        ("EleutherAI/pythia-1.4b", 299_892_736_000),
        ("allenai/OLMo-7B-hf", 2.46e12),
        ("allenai/OLMo-7B-Twin-2T-hf", 2e12),
        ("allenai/OLMo-1B-hf", 3e12),
        ("allenai/OLMo-2-1124-7B", 4.05e12),
        ("microsoft/phi-1_5", 1.5e11),
        ("microsoft/phi-2", 1.4e12),
        ("Qwen/Qwen1.5-7B", 3e12),
        ("HuggingFaceTB/SmolLM2-1.7B", 11e12),
    ],
)
def test_published_token_counts(name, tokens):
    assert known_pretraining(name).tokens == tokens


def test_every_known_count_has_a_source():
    assert all(known.source and known.tokens > 10**9 for known in PRETRAINING)
    for unknown in ("my/model", "allenai/OLMo-7B-0724-hf", "deepseek-ai/deepseek-coder-7b-base-v1.5"):
        assert known_pretraining(unknown) is None
    assert known_pretraining(None) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 0, "original_tokens": 10**9}, "alpha: must be > 0 and <= 1, not 0"),
        ({"alpha": -0.1, "original_tokens": 10**9}, "must be > 0"),
        ({"alpha": float("nan"), "original_tokens": 10**9}, "must be a finite number"),
        ({"alpha": 5, "original_tokens": 10**9}, r"did you mean 0\.05"),
        ({"alpha": 1.5, "original_tokens": 10**9}, "fraction"),
        ({"alpha": 0.05}, "give original_tokens"),
        ({"alpha": 0.05, "tokens": 100, "original_tokens": 10**9}, "not both"),
        ({}, "one of alpha and tokens is required"),
        ({"tokens": 0}, "tokens: must be >= 1"),
        ({"tokens": 1000}, "round to 0 steps"),
        ({"alpha": 1e-6, "original_tokens": 10**9}, "round to 0 steps"),
        ({"tokens": 10**6, "batch_tokens": 100}, "batch_tokens: must be at least one block of 512, not 100"),
        ({"alpha": 0.1, "original_steps": 100}, "original_steps: requires original_batch_tokens"),
        ({"alpha": 0.1, "original_batch_tokens": 100}, "original_batch_tokens: requires original_steps"),
        (
            {"alpha": 0.1, "original_steps": 10, "original_batch_tokens": 10, "original_tokens": 99},
            "is not 10 steps",
        ),
    ],
)
def test_impossible_budgets(options, words):
    with pytest.raises(UsageError, match=words):
        plan_budget(config(**options), window=512)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": "some"}, "train: must be one of all, attention, lora, qlora, not 'some'"),
        ({"train": "lorra"}, "did you mean lora"),
        ({"lr_scheduler_type": "fast"}, "lr_scheduler_type: must be one of linear"),
        ({"ce_weight": 2}, "ce_weight: must be >= 0 and <= 1, not 2"),
        ({"holdout": 1.0}, "holdout: must be >= 0 and < 1, not 1.0"),
        ({"window": True}, "window: must be a whole number, not True"),
        ({"window": "wide"}, "window: must be a whole number"),
        ({"streaming": "yes"}, "streaming: must be true or false, not 'yes'"),
        ({"seed": 2**32}, "seed: must be >= 0 and <= 4294967295"),
        ({"seed": None}, "seed: needs a value"),
        ({"save_steps": 2.5}, "save_steps: must be a whole number of steps, or a fraction < 1, not 2.5"),
        ({"data_weights": (1.0, 2.0)}, "data_weights: must be one weight for each of the 1 entries of data"),
        ({"data_weights": (1.0,), "streaming": True}, "data_weights: excludes streaming"),
        ({"teacher": "none", "teacher_top_k": 8}, "teacher_top_k: requires a teacher"),
        ({"learning_rate": 10**400}, "learning_rate: must be a number|must be at most"),
    ],
)
def test_impossible_options(options, words):
    with pytest.raises(UsageError, match=words):
        config(**options)


def test_values_take_their_types():
    found = config(tokens="1.4T", window=np.int64(64), eval_data=Path("held.txt"), data_weights=2, holdout=0)
    assert (found.tokens, found.window, found.eval_data) == (1_400_000_000_000, 64, ("held.txt",))
    assert found.data_weights == (2.0,) and isinstance(found.holdout, float)
    assert type(found.window) is int and config(eval_data=()).eval_data is None


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_schedules(schedule):
    curve = [learning_rate_factor(i, 100, 10, schedule) for i in range(100)]
    assert 0 < curve[0] < curve[5] < curve[9] < 1  # the first step already moves
    assert curve[10] == 1.0
    assert max(curve) == 1.0
    if schedule == "constant":
        assert curve[-1] == 1.0
    else:
        assert 0 <= curve[-1] < 0.05
        assert all(a >= b for a, b in pairwise(curve[10:]))
    assert learning_rate_factor(0, 1, 0, schedule) == 1.0  # a run of one step
    if schedule == "wsd":
        assert curve[60] == 1.0 and curve[85] == pytest.approx(0.5)


def test_warmup_and_rate():
    assert warmup_count(None, 300) == 50
    assert warmup_count(None, 60) == 12
    assert warmup_count(0.1, 300) == 30
    assert warmup_count(7, 300) == 7
    assert default_learning_rate(512) == 1e-3
    assert default_learning_rate(4096) == pytest.approx(1.25e-4)
    assert default_learning_rate(512, 16_384) == pytest.approx(5e-4)
    assert default_learning_rate(512, 1 << 20) == 1e-3
    assert default_learning_rate(512, 64) == pytest.approx(5e-4)
    assert default_learning_rate(512, speech=True) == 3e-5
    assert default_learning_rate(1 << 15, speech=True) == default_learning_rate(1 << 15) < 3e-5


@pytest.mark.parametrize(
    ("tokens", "window", "batch"),
    [
        (1e6, 512, 16_384),
        (4e6, 284, 57 * 284),  # whole blocks
        (39.3e6, 512, 16_384),
        (39.4e6, 512, 32_768),
        (78.7e6, 512, 65_536),
        (1e12, 512, 65_536),
        (1e6, 2048, 32_768),  # 16 blocks
        (1e6, 8192, 131_072),
    ],
)
def test_tokens_of_a_step_by_default(tokens, window, batch):
    assert default_batch_tokens(tokens, window) == batch


def test_no_torch():
    code = "import sys, mha2gqa.uptraining.budget, mha2gqa.uptraining; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

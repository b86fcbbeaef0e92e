"""Fixtures: pico models built on the spot, offline, deterministic."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the search for garbage: it stays until the process ends.

    Every evaluation and every run of the Trainer searches once, half a second each time otherwise.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_searched() -> None:
    """The same for what earlier modules imported and left: without it a search gets slower with every module."""
    gc.freeze()


PICO = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def pico_llama(**changes: object) -> torch.nn.Module:
    """T0 of the public fault cases: random Llama with 8 heads of 4, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**PICO, "num_key_value_heads": 8, **changes})).eval()


@pytest.fixture
def pico(tmp_path: Path) -> Path:
    """The folder of a saved pico Llama."""
    out = tmp_path / "pico"
    pico_llama().save_pretrained(out)
    return out


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight optimiser steps at most for what is fitted, whatever a command says: enough to see that it runs."""
    modules = [import_module(f"mha2gqa.reconstruct.{name}") for name in ("regress", "distill")]
    real = modules[0].minimise

    def minimise(parameters: Any, backward: Any, validate: Any, config: Any, rest: Any = ()) -> int:
        short = replace(config, steps=min(config.steps, 8), check_every=4)
        return real(parameters, backward, validate, short, rest)

    for module in modules:
        monkeypatch.setattr(module, "minimise", minimise)


def word_tokenizer(path: Path, bos: bool = False) -> Path:
    """Write an offline word-level tokenizer over 60 words `w0 … w59` (id 0 `<eos>`, 1 `<unk>`, 2 `<bos>`)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<unk>": 1, "<bos>": 2} | {f"w{i}": i + 3 for i in range(57)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        unk_token="<unk>",
        **({"bos_token": "<bos>"} if bos else {}),
    )
    fast.save_pretrained(path)
    return path


@pytest.fixture
def default_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP as a shell leaves them, also where the tests run under nohup, which ignores the second."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

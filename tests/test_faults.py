"""Faults that people met in public, one small case each, with the right value.

The fixtures follow the public cases: T0 is `pico_llama()`, BIGRAM is T0 without attention and MLP output.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import pico_llama, word_tokenizer
from transformers import AutoTokenizer

from mha2gqa.data import Document
from mha2gqa.errors import UsageError
from mha2gqa.evaluation import PROTOCOLS, EvaluateResult, LoadedModel, Settings, evaluate
from mha2gqa.evaluation.batching import Batch, collate
from mha2gqa.evaluation.metrics import MetricSums
from mha2gqa.evaluation.protocols import Window


def words(count: int, seed: int = 0) -> str:
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(0, 57, count))


def docs(*lengths: int) -> list[Document]:
    return [Document(words(n, i), f"text:{i + 1}") for i, n in enumerate(lengths)]


def tokenizer_at(path: Path, bos: bool = False) -> object:
    return AutoTokenizer.from_pretrained(word_tokenizer(path, bos))


def scored(
    model: torch.nn.Module, tokenizer: object, text: list[Document], **options: object
) -> EvaluateResult:
    return evaluate(LoadedModel("T0", model, tokenizer), text, device="cpu", **options)


def bigram() -> torch.nn.Module:
    model = pico_llama()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def tallied(nll: list[list[float]]) -> MetricSums:
    """The sums after batches of these losses, one window each."""
    tally = MetricSums()
    for unit, losses in enumerate(nll):
        batch: Batch = collate([Window(np.zeros(len(losses) + 1, dtype=np.int32), 0, unit, "")])
        tally.add(batch, np.array(losses, dtype=np.float32))
    return tally


# --- perplexity (P01 … P15) ----------------------------------------------------------------------------


def test_p01_windows_are_weighted_by_their_tokens(tmp_path: Path) -> None:
    """Not the mean of window means, which over-weights the short last window."""
    model, tokenizer = bigram(), tokenizer_at(tmp_path)
    full = scored(model, tokenizer, docs(57), window=64).models[0]
    for window, stride in ((16, 8), (16, 16), (10, 3), (56, 55)):
        part = scored(model, tokenizer, docs(57), window=window, stride=stride).models[0]
        assert part.tokens == full.tokens == 56
        assert part.loss == pytest.approx(full.loss, rel=1e-6)


def test_p01_the_list_of_the_case() -> None:
    tally = tallied([[2.0] * 1000, [2.0] * 1000, [2.0] * 1000, [4.0] * 10])
    perplexity = math.exp(tally.samples.nll.sum() / tally.tokens)
    assert perplexity == pytest.approx(7.438, abs=5e-4)  # the mean of means gives 12.182


def test_p03_short_texts_windows_and_strides(tmp_path: Path) -> None:
    model, tokenizer = pico_llama(), tokenizer_at(tmp_path)
    assert scored(model, tokenizer, docs(20), window=10, stride=5).models[0].tokens == 19
    first, *_ = PROTOCOLS["window"](tokenizer, docs(20), Settings(10, 5))
    assert first.scored == 10 and first.first == 0  # the first window uses its full length
    (only,) = PROTOCOLS["window"](tokenizer, docs(7), Settings(10, 5))
    assert only.scored == 6
    with pytest.raises(UsageError, match="between 1 and the window of 10"):
        scored(model, tokenizer, docs(20), window=10, stride=11)
    with pytest.raises(UsageError, match="longer than the context"):
        scored(model, tokenizer, docs(20), window=129)
    assert scored(model, tokenizer, docs(20)).warnings == ["window 128, the context of T0"]


def test_p04_every_window_starts_with_bos(tmp_path: Path) -> None:
    tokenizer = tokenizer_at(tmp_path, bos=True)
    windows = list(PROTOCOLS["window"](tokenizer, docs(40), Settings(16, 13, bos=2)))
    assert len(windows) == 3 and [int(w.ids[0]) for w in windows] == [2, 2, 2]
    assert all(2 not in w.ids[1:] for w in windows)  # never a target
    assert sum(w.scored for w in windows) == 40
    result = scored(pico_llama(), tokenizer, docs(40), window=16, stride=13)
    assert result.settings["bos"] == "<bos> starts every window, never scored"


@pytest.mark.parametrize("protocol", ["window", "blocks", "rolling", "wikitext2"])
def test_p06_a_tokenizer_without_bos(tmp_path: Path, protocol: str) -> None:
    tokenizer = tokenizer_at(tmp_path)
    assert tokenizer.bos_token_id is None
    result = scored(pico_llama(), tokenizer, docs(40, 30), protocol=protocol, window=16)
    assert math.isfinite(result.models[0].loss)
    documented = {"rolling": "<eos> (EOS, for want of a BOS) before each document, not scored"}
    assert result.settings["bos"] == documented.get(protocol, "none")


def test_p07_padding_is_never_scored(tmp_path: Path) -> None:
    model, tokenizer = pico_llama(), tokenizer_at(tmp_path)
    results = [scored(model, tokenizer, docs(4, 12), window=16, batch_size=n).models[0] for n in (1, 2)]
    assert [r.tokens for r in results] == [14, 14]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    batch = collate(list(PROTOCOLS["window"](tokenizer, docs(4, 12), Settings(16, 8))))
    assert batch.inputs.shape == (2, 11) and batch.inputs[0, 3:].tolist() == [0] * 8
    assert len(batch.targets) == 14


def test_p09_batches_are_weighted_by_their_tokens() -> None:
    tally = tallied([[2.0] * 100, [4.0] * 10])
    perplexity = math.exp(tally.samples.nll.sum() / tally.tokens)
    assert perplexity == pytest.approx(8.86, abs=5e-3)  # the mean of batch means gives exp(3) = 20.09


def test_p10_the_report_names_its_units(tmp_path: Path) -> None:
    tokenizer = tokenizer_at(tmp_path)
    out = scored(pico_llama(), tokenizer, docs(9, 14), window=16, stride=4).to_dict()
    assert out["protocol"] == "window"
    assert {"window": 16, "stride": 4, "bos": "none"}.items() <= out["settings"].items()
    model = out["models"][0]
    scored_text = sum(len(d.text) - len(d.text.split()[0]) for d in docs(9, 14))
    assert model["tokens"] == 8 + 13 == model["words"] and model["bytes"] == scored_text
    nats = model["loss"] * model["tokens"]
    assert model["perplexity"] == pytest.approx(math.exp(nats / 21))
    assert model["word_perplexity"] == pytest.approx(math.exp(nats / 21))
    assert model["byte_perplexity"] == pytest.approx(math.exp(nats / scored_text))
    assert model["bits_per_byte"] == pytest.approx(nats / math.log(2) / scored_text)
    joined = scored(pico_llama(), tokenizer, docs(9, 14), protocol="blocks", window=8).to_dict()
    assert joined["protocol"] == "blocks" and joined["models"][0]["tokens"] == 24


def test_p11_another_tokenizer_is_not_compared_by_perplexity(tmp_path: Path) -> None:
    folders = [tmp_path / "original", tmp_path / "converted"]
    for folder in folders:
        pico_llama().save_pretrained(folder)
        word_tokenizer(folder)
    file = folders[1] / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["x5"] = vocabulary.pop("w5")
    file.write_text(json.dumps(content))
    text = docs(60, 60)
    result = evaluate(folders, text, window=32, device="cpu")
    assert result.comparison == "bits_per_byte"
    assert all(m.loss is None and m.perplexity is None and m.bits_per_byte > 0 for m in result.models)
    assert any("tokenizers differ" in warning for warning in result.warnings)
    with pytest.raises(UsageError, match="tokenizers differ"):
        evaluate(folders[1], text, window=32, device="cpu", against=folders[0])


def test_p14_left_padding_changes_nothing(tmp_path: Path) -> None:
    model, results = pico_llama(), []
    for side in ("left", "right"):
        tokenizer = tokenizer_at(tmp_path / side)
        tokenizer.padding_side = side
        results.append(scored(model, tokenizer, docs(4, 12, 9), window=16, batch_size=3).models[0])
    assert results[0].loss == results[1].loss


def test_p15_all_models_see_the_same_tokens_in_one_dtype(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, dtype in zip(folders, (torch.float32, torch.bfloat16), strict=True):
        pico_llama().to(dtype).save_pretrained(folder)
        word_tokenizer(folder)
    result = evaluate(folders, docs(60, 50, 40, 30), window=32, device="cpu", max_tokens=100)
    a, b = result.models
    assert a.sha256 == b.sha256 == result.data["sha256"] and a.tokens == b.tokens == 100
    assert result.settings["dtype"] == "float32"  # for both, whatever is stored
    assert b.paired is not None and b.paired.difference == pytest.approx(b.loss - a.loss)
    assert b.paired.standard_error > 0 and b.paired.against == str(folders[0])

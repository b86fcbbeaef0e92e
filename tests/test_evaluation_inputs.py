"""Python as people type it: models in memory, texts and token ids; one BOS; what is not scored is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mha2gqa.data import encode_documents
from mha2gqa.errors import DataError, GateError, UsageError
from mha2gqa.evaluation import LoadedModel, check_limits, evaluate, measure_gates, require

TEXTS = ["w0 w1 w2 w3 w4", "w5 w6 w7 w8"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t")))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t"), bos=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pico_llama().save_pretrained(tmp_path / "m")
    return word_tokenizer(tmp_path / "m")


def scored(tokenizer: PreTrainedTokenizerBase, data: Any, **options: Any) -> Any:
    return evaluate(LoadedModel("m", pico_llama(), tokenizer), data, device="cpu", **options).models[0]


@pytest.mark.parametrize("protocol", ["window", "blocks", "rolling"])
def test_texts_token_ids_and_files_are_the_same(
    plain: PreTrainedTokenizerBase, tmp_path: Path, protocol: str
) -> None:
    (file := tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    ids = [plain(text)["input_ids"] for text in TEXTS]
    ids = [[*row, plain.eos_token_id] for row in ids] if protocol == "blocks" else ids
    options = {"protocol": protocol, "window": 4}
    right = scored(plain, file, **options)
    for data in (TEXTS, iter(TEXTS), ids, [torch.tensor(row) for row in ids]):
        found = scored(plain, data, **options)
        assert (found.loss, found.tokens, found.sha256) == (right.loss, right.tokens, right.sha256)
        assert found.bytes == right.bytes or protocol == "blocks"


@pytest.mark.parametrize("protocol", ["window", "blocks", "rolling", "wikitext2"])
def test_a_text_that_begins_with_bos_gets_one(with_bos: PreTrainedTokenizerBase, protocol: str) -> None:
    options = {"protocol": protocol, "window": 3}
    right = scored(with_bos, TEXTS, **options)
    texts = [f"<bos>{TEXTS[0]}", TEXTS[1] if protocol == "wikitext2" else f"<bos>{TEXTS[1]}"]
    found = scored(with_bos, texts, **options)
    assert (found.sha256, found.bytes, found.words) == (right.sha256, right.bytes, right.words)
    ids = [[2, *with_bos(t, add_special_tokens=False)["input_ids"]] for t in TEXTS]
    if protocol in ("window", "rolling"):
        assert scored(with_bos, ids, **options).sha256 == right.sha256


def test_training_and_calibration_get_one_bos_as_well(with_bos: PreTrainedTokenizerBase) -> None:
    twice = list(encode_documents(with_bos, ["<bos> w0 w1", "w0 w1"]))
    assert [ids.tolist() for ids in twice] == [[2, 3, 4, 0]] * 2


def test_what_is_not_scored_is_counted(plain: PreTrainedTokenizerBase) -> None:
    rows = ["w0 w1 w2", "", "w3", " ", "w4 w5", ""]
    model = LoadedModel("m", pico_llama(), plain)
    result = evaluate(model, rows, device="cpu", protocol="window", window=8)
    assert result.data["skipped"] == {"empty_rows": 3, "short_documents": 1, "tokens_after_last_block": 0}
    assert "not scored: 3 empty rows, 1 document of at most one token" in result.warnings
    result = evaluate(model, rows, device="cpu", protocol="blocks", window=4)
    assert result.data["skipped"]["tokens_after_last_block"] == 6 + 3 - 1 - 2 * 4
    result = evaluate(model, rows, device="cpu", protocol="blocks", window=5)
    assert "not scored: 3 empty rows, 3 tokens after the last whole block" in result.warnings
    assert result.to_dict()["notices"] == result.to_dict()["warnings"] == result.notices
    limited = evaluate(model, rows, device="cpu", protocol="window", window=8, max_tokens=2)
    assert limited.data["skipped"]["empty_rows"] == 0 and limited.data["documents"] == 1


def test_models_in_memory_beside_paths(folder: Path, plain: PreTrainedTokenizerBase) -> None:
    model = pico_llama()
    result = evaluate([folder, model, LoadedModel("mine", model)], TEXTS, against=folder, device="cpu")
    assert [m.path for m in result.models] == [str(folder), "LlamaForCausalLM", "mine"]
    assert len({m.loss for m in result.models}) == 1
    assert (
        evaluate(model.from_pretrained(folder), TEXTS, device="cpu").models[0].loss == result.models[0].loss
    )
    with pytest.raises(UsageError, match="LlamaForCausalLM: its tokenizer is not known"):
        evaluate(model, TEXTS, device="cpu")
    with pytest.raises(UsageError, match="a int is not a model"):
        evaluate([folder, 3], TEXTS, device="cpu")  # type: ignore[list-item]


def test_options_of_pairs_have_no_effect_on_text(folder: Path) -> None:
    found = evaluate(folder, TEXTS, device="cpu", beams=2, retry_temperatures=(0.2,))
    assert found.warnings[0] == "no pairs are read: --beams, --retry-temperatures have no effect"
    assert not any("written again" in warning for warning in found.warnings)


def test_a_text_for_a_path_is_no_system_error(folder: Path) -> None:
    for data in (["text"], "text", "once upon a time there was a very long text " * 40, 3, [""]):
        with pytest.raises(DataError):
            evaluate(folder, data, device="cpu")
    assert evaluate(folder, ["w0 w1 w2"], device="cpu").models[0].tokens == 2


# --- gates ---------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"path": "a", "loss": 3.0, "bits_per_byte": 1.2, "tokens": 9, "generation": {"wer": 8.0, "bleu": 30.0}},
    {"path": "b", "loss": 3.1, "bits_per_byte": 1.3, "tokens": 9, "generation": {"wer": 9.5, "bleu": 29.0}},
]


def test_gates_on_generated_text() -> None:
    require(measure_gates(ROWS, max_wer_delta=1.5, max_bleu_drop=1.0))
    with pytest.raises(
        GateError, match=r"b: max_wer_delta 1.5 against 1.0; b: max_bleu_drop 1.0 against 0.5"
    ):
        require(measure_gates(ROWS, max_wer_delta=1.0, max_bleu_drop=0.5))
    with pytest.raises(
        UsageError, match="--max-wer-delta: needs a figure that is not measured; score transcripts"
    ):
        measure_gates([{**row, "generation": None} for row in ROWS], max_wer_delta=1.0)
    with pytest.raises(UsageError, match="--max-bleu-drop -1: must be BLEU points >= 0"):
        check_limits(2, False, max_bleu_drop=-1.0, metrics=["bleu"])


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_fails(loss: float) -> None:
    rows = [ROWS[0], {**ROWS[1], "loss": loss, "top1_agreement": float("nan")}]
    for limits in ({"max_ppl_ratio": 2.0}, {"fail_if_worse": True}, {"min_agreement": 0.0}):
        with pytest.raises(GateError, match=r"inf against|nan against"):
            require(measure_gates(rows, **limits))  # type: ignore[arg-type]


def test_a_ratio_beyond_floats_is_infinite() -> None:
    (gate,) = measure_gates([ROWS[0], {**ROWS[1], "loss": 900.0}], fail_if_worse=True)
    assert gate["value"] == "inf" and not gate["ok"]

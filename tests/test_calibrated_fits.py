"""Calibrated conversion: what is stored is what was fitted, text is used once, and unusable input is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file

from mha2gqa.assets import heldout_path, tiny_model_path
from mha2gqa.checkpoints.loading import load_model, load_tokenizer
from mha2gqa.conversion import CalibrationOptions, calibration_inputs, convert_model
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.conversion.inputs import calibration_blocks
from mha2gqa.data import PairOptions
from mha2gqa.data.windows import calibration_window, default_window
from mha2gqa.errors import CheckpointError, DataError, UsageError
from mha2gqa.evaluation import block_loss
from mha2gqa.reconstruct import ReconstructConfig

FEW = ReconstructConfig(steps=20, batch_size=4, check_every=10, holdout=0.2, unit="attention")


def write_text(path: Path, documents: int = 40, length: int = 30, seed: int = 0) -> Path:
    """Documents of random words, some words far more often than others."""
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.geometric(0.08, (documents, length)), 56)
    lines = [json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in words]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A pico Llama with a tokenizer beside it."""
    folder = tmp_path / "source"
    pico_llama(attention_bias=True).save_pretrained(folder)
    word_tokenizer(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_text(tmp_path / "text.jsonl"))


def options(text: str, **changes: Any) -> dict[str, Any]:
    return {"calibration": [text], "calibration_window": 16, "fit": FEW, "device": "cpu"} | changes


def improved(result: Any) -> bool:
    """Whether every module came closer to the original (random models have no loss worth comparing)."""
    return all(layer["error_fitted"] < layer["error_merged"] for layer in result.layers)


def rows(source: Path, text: str) -> torch.Tensor:
    """The calibration text as blocks of 17 ids."""
    config = json.loads((source / "config.json").read_text())
    found = calibration_inputs(
        load_tokenizer(source), config, CalibrationOptions(texts=(text,), window=16)
    ).rows
    assert isinstance(found, torch.Tensor)
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_blocks_are_as_long_as_the_model_allows_where_the_text_does() -> None:
    config = {"model_type": "llama", "max_position_embeddings": 4096}
    assert [calibration_window(config, n) for n in (524_288, 65_536, 65_535, 32_768, 32_767, 99)] == [
        2048, 2048, 1024, 1024, 512, 512
    ]  # fmt: skip
    short = {"model_type": "llama", "max_position_embeddings": 300}
    assert calibration_window(short, 10**6) == calibration_window(short, 99) == 300
    assert default_window({"model_type": "t5"}) == calibration_window({"model_type": "t5"}, 10**6) == 568
    stream = [torch.arange(40_000).numpy() % 100]
    blocks = calibration_blocks(stream, lambda tokens: calibration_window(config, tokens), 33_000, 1)
    assert blocks.shape == (32, 1025)  # of what is used of the text, not of all of it


def test_convert_cuts_blocks_by_the_model_and_the_text_unless_it_is_told(text: str, tmp_path: Path) -> None:
    short, long = (word_tokenizer(tmp_path / name) for name in ("short", "long"))
    pico_llama().save_pretrained(short)
    pico_llama(max_position_embeddings=4096).save_pretrained(long)

    def window(source: Path, **asked: Any) -> int:
        words = {"calibration": [text], "refit": False, "reconstruct": False, "device": "cpu", "force": True}
        return int(convert(source, tmp_path / "out", 2, **words | asked).calibration["window"])

    assert (window(short), window(long)) == (128, 512)  # a few thousand tokens
    assert (window(short, calibration_window=16), window(long, calibration_window=16)) == (16, 16)
    assert window(short, calibration_window=1000) == 128


def test_options_of_pairs_have_no_effect_on_text(source: Path, text: str) -> None:
    config = json.loads((source / "config.json").read_text())
    asked = CalibrationOptions(texts=(text,), window=16, pairs=PairOptions(targets="generate"))
    said = "no pairs are read: --targets has no effect"
    assert said in calibration_inputs(load_tokenizer(source), config, asked).warnings
    result = convert(source, source.with_name("out"), 2, source_lang="de")
    assert "no pairs are read: --source-lang has no effect" in result.warnings


def test_text_gives_joint_search_refit_and_regression(source: Path, text: str, tmp_path: Path) -> None:
    seen: list[str] = []
    out = tmp_path / "out"
    result = convert(source, out, 2, **options(text), stage=lambda *x: seen.append(x[0]))
    assert result.method == "joint" and set(seen) >= {"fitting"}
    loss = result.calibration["losses"]
    assert set(loss) == {"original", "merged", "fitted"}
    about = result.calibration
    kept = len(rows(source, text)) // 16
    assert about["unique_tokens"] == (len(rows(source, text)) - kept) * 16 and about["texts"] == [text]
    assert about["token_visits"] == 20 * 4 * 16
    for layer in result.layers:
        assert layer["residual"] <= layer["residual_neighbours"]
        assert layer["error_fitted"] < layer["error_merged"]
        assert layer["error_refitted"] < layer["error_merged"]
    manifest = json.loads((out / "mha2gqa.json").read_text())
    assert manifest["calibration"]["losses"] == loss
    assert manifest["grouping"] == {layer["path"]: layer["grouping"] for layer in result.layers}
    assert all(check.ok for check in result.verification)
    held = rows(source, text)[-kept:]
    for folder, name in ((out, "fitted"), (source, "original")):
        assert block_loss(load_model(folder, device="cpu"), held) == pytest.approx(loss[name], abs=1e-4)


def test_the_file_equals_the_model_converted_in_memory(source: Path, text: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 2, **options(text))
    model = load_model(source, device="cpu")
    blocks = rows(source, text)
    small = convert_model(model, 2, calibration=blocks, fit=FEW)
    written = load_model(tmp_path / "out", device="cpu").state_dict()
    for name, x in small.state_dict().items():
        assert torch.equal(x, written[name]), name


def test_statistics_are_paid_once(source: Path, text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.statistics"
    plain = {"refit": False, "reconstruct": False, "statistics": file}
    first = convert(source, tmp_path / "a", 2, **options(text, **plain))
    assert file.exists()
    seen: list[str] = []
    again = convert(
        source, tmp_path / "b", 2, device="cpu", statistics=file, stage=lambda *x: seen.append(x[0])
    )
    assert "grouping" in seen and "statistics" not in seen and again.method == "joint"
    assert again.calibration["statistics"]["tokens"] == first.calibration["unique_tokens"]
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    other = convert(source, tmp_path / "c", 4, statistics=file, device="cpu")
    assert other.num_kv_heads == {"before": 8, "after": 4}
    torch.manual_seed(1)
    stranger = pico_llama()
    stranger.model.layers[0].self_attn.q_proj.weight.data += 1
    stranger.save_pretrained(tmp_path / "stranger")
    with pytest.raises(UsageError, match="another model"):
        convert(tmp_path / "stranger", tmp_path / "d", 2, statistics=file, device="cpu")
    with pytest.raises(UsageError, match=r"^statistics "):
        convert(source, tmp_path / "d", 2, statistics=tmp_path / "missing", device="cpu")
    assert not (tmp_path / "d").exists()


def test_a_manifest_is_a_grouping_file(source: Path, text: str, tmp_path: Path) -> None:
    plain = {"refit": False, "reconstruct": False}
    first = convert(source, tmp_path / "a", 2, **options(text, **plain))
    assert any(layer["regrouped"] for layer in first.layers)
    convert(source, tmp_path / "b", 2, **options(text, **plain, grouping=str(tmp_path / "a/mha2gqa.json")))
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["mean", "align", "first"])
def test_every_method_can_be_fitted(method: str, source: Path, text: str, tmp_path: Path) -> None:
    result = convert(source, tmp_path / "out", 2, method=method, **options(text))
    assert improved(result)
    if method != "align":
        assert not any(layer["regrouped"] for layer in result.layers)
    # what the manifest says is what is stored: queries and outputs moved as well
    kept = len(rows(source, text)) // 16
    loss = block_loss(load_model(tmp_path / "out", device="cpu"), rows(source, text)[-kept:])
    assert loss == pytest.approx(result.calibration["losses"]["fitted"], abs=1e-4)


def test_joint_beats_align_and_mean_on_a_trained_model(tmp_path: Path) -> None:
    """Merged and refitted; the model is the one the package brings along."""
    losses = {}
    for method in ("joint", "align", "mean"):
        result = convert(
            tiny_model_path(), tmp_path / method, 2, method=method, calibration=[str(heldout_path())],
            calibration_tokens=3072, calibration_window=128, reconstruct=False, device="cpu",
        )  # fmt: skip
        losses[method] = result.calibration["losses"]
    for stage in ("merged", "fitted"):
        assert losses["joint"][stage] < losses["align"][stage] < losses["mean"][stage], (stage, losses)
    assert losses["joint"]["original"] < losses["joint"]["fitted"] < losses["joint"]["merged"]


def test_as_many_groups_as_heads_is_a_copy_whatever_else_was_asked(
    source: Path, text: str, tmp_path: Path
) -> None:
    result = convert(source, tmp_path / "out", 8, **options(text))
    old, new = tensors(source), tensors(tmp_path / "out")
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert any("not used" in warning for warning in result.warnings)


def test_grouped_sources_are_shared_further(source: Path, text: str, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "four", 4, **options(text))
    second = convert(tmp_path / "four", tmp_path / "two", 2, **options(text))
    assert first.num_kv_heads == {"before": 8, "after": 4}
    assert second.num_kv_heads == {"before": 4, "after": 2}
    loss = second.calibration["losses"]
    assert loss["original"] == pytest.approx(first.calibration["losses"]["fitted"], abs=1e-4)
    assert improved(second)


def test_qk_norms_of_every_kind_convert(text: str, tmp_path: Path) -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "eos_token_id": 0,
        "pad_token_id": None, "bos_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    for name, config, cls in (
        ("olmo2", Olmo2Config, Olmo2ForCausalLM),
        ("qwen3", Qwen3Config, Qwen3ForCausalLM),
    ):
        torch.manual_seed(0)
        model = cls(config(**shape))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name)
        word_tokenizer(tmp_path / name)
        result = convert(tmp_path / name, tmp_path / f"{name}-2", 2, **options(text))
        assert improved(result), name
        if name == "qwen3":
            assert any("sign flips" in note for layer in result.layers for note in layer["notes"])


def test_alibi_heads_stay_and_t5_keeps_one_order() -> None:
    from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=8)).eval()
    same = convert_model(bloom, 2, method="joint")
    assert same.config.num_key_value_heads == 2
    ids = torch.arange(12)[None]
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=4, d_ff=48, num_layers=2, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    t5 = T5ForConditionalGeneration(config).eval()
    hidden = [0, 1, 0, 1, 0, 1, 0, 1]  # copies that only another order brings together
    with torch.no_grad():
        for block in t5.decoder.block:
            for attention in (block.layer[0].SelfAttention, block.layer[1].EncDecAttention):
                for p in (attention.k, attention.v):
                    p.weight.copy_(p.weight.view(8, 4, 32)[hidden].flatten(0, 1))
        want = t5(input_ids=ids, decoder_input_ids=ids).logits
        got = convert_model(t5, 2, method="joint")(input_ids=ids, decoder_input_ids=ids).logits
        wrong = convert_model(t5, 2, method="joint", grouping="neighbours")(
            input_ids=ids, decoder_input_ids=ids
        )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert float((wrong.logits - want).abs().max()) > 1e-3


# --- bad input -----------------------------------------------------------------------------------------


def test_one_short_document_is_enough_to_merge_but_not_to_fit(source: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "one.jsonl", documents=1, length=70)
    result = convert(source, tmp_path / "out", 2, **options(str(text), calibration_window=32))
    assert any("too few to fit" in warning for warning in result.warnings)
    assert result.calibration["unique_tokens"] == 64 and "losses" not in result.calibration
    long = convert(source, tmp_path / "long", 2, **options(str(text), calibration_window=512))
    assert long.calibration["unique_tokens"] == 70  # one block of what there is
    narrow = convert(source, tmp_path / "narrow", 2, **options(str(text), calibration_tokens=20))
    assert any("cannot fill a moment of 32 dims" in warning for warning in narrow.warnings)
    for folder in ("out", "long", "narrow"):
        assert all(bool(x.isfinite().all()) for x in tensors(tmp_path / folder).values())


@pytest.mark.parametrize(
    ("content", "column", "error", "says"),
    [
        (b'{"text": "w1 w2"}\n', "text", DataError, "3 tokens of text are too few"),
        (b'{"body": "w1"}\n', "text", DataError, "body"),
        (b'{"text": "w1", "body": "w2"}\n', "bodies", DataError, "bodies"),
        (b'{"text": "\xff\xfe"}\n', "text", DataError, "UTF-8"),
        (b"{broken\n", "text", DataError, "jsonl"),
        (b"", "text", DataError, "tokens of text|no text|empty|nothing"),
    ],
)
def test_unusable_text_is_refused(
    content: bytes, column: str, error: type, says: str, source: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(error, match=says):
        convert(source, tmp_path / "out", 2, calibration=[str(file)], text_column=column, device="cpu")
    assert not (tmp_path / "out").exists()


def test_options_follow_from_what_is_there() -> None:
    for words in ({"refit": True}, {"reconstruct": True}):
        with pytest.raises(UsageError, match="give calibration"):
            CalibrationOptions(**words).fitting(False)
    assert CalibrationOptions().fitting(False) is None
    assert CalibrationOptions(refit=False, reconstruct=False).fitting(True) is None
    for words, refit, regress in (
        ({}, True, True),
        ({"refit": False}, False, True),
        ({"reconstruct": False}, True, False),
    ):
        fit = CalibrationOptions(seed=3, **words).fitting(True)
        assert fit is not None and (fit.refit, fit.regress, fit.seed) == (refit, regress, 3)


def test_encoder_decoders_calibrate_on_corrupted_spans(text: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=80, d_model=32, d_kv=4, d_ff=48, num_layers=2, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    word_tokenizer(tmp_path / "t5")
    with pytest.raises(DataError, match="needs the columns source and target"):
        convert(tmp_path / "t5", tmp_path / "out", 2, **options(text))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t5")
    tokenizer.add_tokens([f"<extra_id_{i}>" for i in range(20)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "t5")
    result = convert(tmp_path / "t5", tmp_path / "out", 2, **options(text, calibration_window=24))
    assert {layer["kind"] for layer in result.layers} == {"self", "cross"}
    assert improved(result)
    assert set(result.calibration["losses"]) == {"original", "merged", "fitted"}
    orders = {str(layer["grouping"]) for layer in result.layers if layer["kind"] == "self"}
    assert len(orders) == 1  # the bias of layer 0 serves all


def test_nan_weights_name_the_layer(source: Path, text: str, tmp_path: Path) -> None:
    model = pico_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    word_tokenizer(tmp_path / "nan")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn"):
        convert(tmp_path / "nan", tmp_path / "out", 2, **options(text))


def test_dead_heads_convert(text: str, tmp_path: Path) -> None:
    model = pico_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            for p in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, p).weight[4:12] = 0
            layer.self_attn.o_proj.weight[:, 16:20] = 0
    model.save_pretrained(tmp_path / "dead")
    word_tokenizer(tmp_path / "dead")
    result = convert(tmp_path / "dead", tmp_path / "out", 2, **options(text))
    assert all(bool(x.isfinite().all()) for x in tensors(tmp_path / "out").values())
    assert improved(result)

"""`plan` for encoder-decoders: their own lengths, the right command to copy; and encoders alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import word_tokenizer
from families import stock_model

from mha2gqa.checkpoints.loading import load_model
from mha2gqa.commands.estimate import plan
from mha2gqa.commands.run_recipe import run
from mha2gqa.config import ConvertConfig, recipe_from_dict
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.conversion.recommended import next_command
from mha2gqa.errors import UnsupportedModelError, UsageError
from mha2gqa.evaluation import evaluate
from mha2gqa.report.terminal import render


def saved(name: str, folder: Path) -> Path:
    stock_model(name).save_pretrained(folder)
    return folder


# Bytes by hand: 2 layers x (k, v) x 8 heads x 4 (T5: 6) dims x 4 bytes, for the decoder and for the encoder's states.
@pytest.mark.parametrize(
    ("name", "context", "kv_bytes", "words"),
    [
        (
            "whisper",
            64,
            512 * (64 + 12),
            "--calibration RECORDINGS --targets generate --source-lang LANGUAGE",
        ),  # it hears as much however little it writes
        ("bart", 64, 512 * (64 + 64), "--calibration PAIRS.jsonl"),
        ("t5", 512, 768 * (512 + 512), "--calibration TEXT.jsonl"),
    ],
)
def test_lengths_are_the_models_own(
    name: str, context: int, kv_bytes: int, words: str, tmp_path: Path
) -> None:
    source = saved(name, tmp_path / name)
    found = plan(source, groups=2)
    assert found.decode["context"] == context
    assert found.decode["kv_bytes"] == {"before": kv_bytes, "after": kv_bytes // 4}
    assert found.recommended == f"mha2gqa convert {source} {name}-gqa2 --groups 2 {words}"
    convert(source, tmp_path / "out", 4)
    again = plan(tmp_path / "out", groups=2)  # exported: another model type
    assert again.decode["context"] == context
    assert again.decode["kv_bytes"] == {"before": kv_bytes // 2, "after": kv_bytes // 4}
    assert again.recommended.endswith(words)


def test_uptraining_of_an_encoder_decoder_has_no_price_in_blocks_of_text(tmp_path: Path) -> None:
    found = plan(saved("whisper", tmp_path / "in"), groups=2)
    assert found.memory["sets"]["all"]["bytes"] and not found.memory["sets"]["all"]["prices"]
    text = render(found.to_dict())
    assert "blocks of 2,048 tokens" not in text and "`uptrain` counts target tokens of pairs" in text
    assert "recall" not in text  # measured on decoders alone
    assert not any("--uptrain-tokens" in warning for warning in found.warnings)
    again = plan(tmp_path / "in", groups=2, uptrain_tokens=2000)
    assert "--uptrain-tokens 2,000 has no effect" in again.warnings[-1]


def test_the_cache_of_a_sequence_is_told_by_its_parts(tmp_path: Path) -> None:
    """By hand: 2 layers x (k, v) x 8 heads x 4 dims x 4 bytes; 64 tokens of its own, 12 positions of the encoder."""
    source = saved("whisper", tmp_path / "in")
    found = plan(source, groups=2)
    each = 2 * 2 * 8 * 4 * 4
    lengths = {"context": 64, "source": 12}
    assert found.sequence["before"] == {"self": each * 64, "cross": each * 12} | lengths
    assert found.sequence["after"] == {"self": each * 16, "cross": each * 3} | lengths
    said = "Cache of a sequence (64 target tokens, 12 encoder positions), self + cross: before 32 KiB + 6 KiB = 38 KiB"
    assert said in render(found.to_dict())
    longer = plan(source, groups=2, context=10).sequence["before"]
    assert (longer["self"], longer["cross"], longer["context"]) == (each * 10, each * 12, 10)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "whisper",
            {"source_lang": "en", "task": "translate"},
            "HELDOUT_RECORDINGS --source-lang en --task translate",
        ),
        ("bart", {"source_column": "a.b"}, "HELDOUT_PAIRS.jsonl --source-column a.b"),
        ("t5", {"source_prefix": "to de: "}, "HELDOUT_PAIRS.jsonl --source-prefix 'to de: '"),
        ("t5", {}, "HELDOUT.jsonl"),
        (
            "m2m_100",
            {"target_lang": "fr", "targets": "generate", "retry_temperatures": (0.2, 1.0)},
            "HELDOUT_PAIRS.jsonl --target-lang fr --targets generate --retry-temperatures 0.2,1.0 "
            "--source-lang LANGUAGE",
        ),
    ],
)
def test_convert_ends_with_the_data_that_the_model_is_scored_on(
    name: str, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    source = saved(name, tmp_path / "in")
    done = convert(source, tmp_path / "out", 2, **options)
    assert done.recommended == f"mha2gqa evaluate {source} {tmp_path / 'out'} --data {words}"
    assert render(done.to_dict()).rstrip().endswith(f"Next: {done.recommended}")
    assert "recommended" not in json.loads((tmp_path / "out" / "mha2gqa.json").read_text())


def test_a_whisper_that_knows_english_only_is_told_no_language() -> None:
    source = {"model_type": "whisper", "is_encoder_decoder": True, "vocab_size": 51864}
    words = next_command(ConvertConfig("whisper", "small", 4), source)
    assert words == "mha2gqa evaluate whisper small --data HELDOUT_RECORDINGS"


def test_a_context_beyond_the_decoders_positions_is_said(tmp_path: Path) -> None:
    warnings = plan(saved("whisper", tmp_path / "in"), groups=2, context=100).warnings
    assert "--context 100 is longer than the 64 tokens the model was built for" in warnings


def test_an_encoder_alone_is_no_model_to_run(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    T5EncoderModel(T5Config(**sizes)).save_pretrained(tmp_path / "in")
    word_tokenizer(tmp_path / "in")
    with pytest.raises(UnsupportedModelError, match="T5EncoderModel is an encoder alone"):
        load_model(tmp_path / "in", device="cpu")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "w1 w2 w3"}) + "\n" for _ in range(50)))
    with pytest.raises(UnsupportedModelError, match="take the full encoder-decoder checkpoint"):
        evaluate(tmp_path / "in", str(text), window=8, device="cpu")


def test_a_kind_of_attention_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="attention: must be one of self, cross, not"):
        convert(saved("t5", tmp_path / "in"), tmp_path / "out", 2, attention=("encoder",))


def test_a_rehearsal_names_the_protocol_of_pairs(tmp_path: Path) -> None:
    source, pairs = saved("bart", tmp_path / "in"), tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"source": "w1", "target": "w2"}) + "\n")
    sections = {"convert": {"groups": 2}, "evaluate": {"data": [str(pairs)]}}
    recipe = recipe_from_dict({"source": str(source), "output": str(tmp_path / "out"), **sections})
    (evaluation,) = (stage for stage in run(recipe, dry_run=True).stages if stage["name"] == "evaluate")
    assert evaluation["detail"] == f"protocol pairs on {pairs}"


def test_a_rehearsal_reads_the_pairs_of_one_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "a.jsonl").write_text(
            json.dumps({"source": "w1", "target": "w2"}) + "\n"
        )
    source, name = saved("bart", tmp_path / "in"), f"{tmp_path / 'data'}::test"
    sections = {"convert": {"groups": 2}, "evaluate": {"data": [name]}}
    recipe = recipe_from_dict({"source": str(source), "output": str(tmp_path / "out"), **sections})
    (evaluation,) = (stage for stage in run(recipe, dry_run=True).stages if stage["name"] == "evaluate")
    assert evaluation["detail"] == f"protocol pairs on {name}"


def test_calibrating_on_recordings_is_priced_by_those_that_are_read(tmp_path: Path) -> None:
    source = saved("whisper", tmp_path / "in")
    found = plan(source, groups=2)
    assert (found.calibration["recordings"], found.calibration["tokens"]) == (1000, 1000 * 12)
    assert "Calibrating on at most 1,000 recordings (12k encoder positions), layer" in render(found.to_dict())
    assert plan(source, groups=2, calibration_tokens=100).calibration["recordings"] == 100
    assert "recordings" not in plan(saved("bart", tmp_path / "bart"), groups=2).calibration


def test_uptraining_is_priced_in_blocks_as_they_are_cut(tmp_path: Path) -> None:
    assert plan(saved("t5", tmp_path / "t5"), groups=2).memory["window"] == 568
    assert plan(saved("bart", tmp_path / "bart"), groups=2).memory["window"] == 64  # all that its decoder has

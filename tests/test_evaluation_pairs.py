"""Encoder-decoders scored on pairs: the model's own loss of every target, and the texts it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import sacrebleu
import torch
from seq2seq_models import audio_folder, saved, saved_whisper
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from mha2gqa import convert, run
from mha2gqa.cli.commands import cli
from mha2gqa.cli.exit_codes import run_command
from mha2gqa.data import Pair, PairOptions
from mha2gqa.data.generation import decode, generate_ids
from mha2gqa.data.seq2seq import PairEncoder, open_encoder
from mha2gqa.errors import DataError, GateError, UsageError
from mha2gqa.evaluation import LoadedModel, evaluate, measure_gates
from mha2gqa.evaluation.generation_metrics import Texts, bleu_tokenizer, compare_texts, normaliser
from mha2gqa.report.generation_scores import generation_differences
from mha2gqa.report.terminal import render

RNG = np.random.default_rng(0)
ROWS = [
    {"source": " ".join(f"w{i}" for i in RNG.integers(0, 60, n)), "target": " ".join(f"w{i}" for i in RNG.integers(0, 60, m))}
    for n, m in zip(RNG.integers(1, 9, 12), RNG.integers(1, 9, 12), strict=True)
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    for kind in ("marian", "bart"):
        saved(root / kind, kind)
        convert(root / kind, root / f"{kind}-g2", 2, method="mean")
    saved(root / "t5", "t5", [f"<extra_id_{i}>" for i in range(8)])
    saved_whisper(root / "whisper")
    convert(root / "whisper", root / "whisper-g2", 2, method="mean")
    audio_folder(root / "audio", ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w9"])
    (root / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return root


def load(folder: Path) -> Any:
    kind = AutoModelForSpeechSeq2Seq if "whisper" in folder.name else AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def by_hand(folder: Path, data: Any) -> tuple[float, int]:
    """Mean loss over real targets, example by example, by the model's own `labels`."""
    encoder, model = open_encoder(folder, PairOptions()), load(folder)
    total, count = 0.0, 0
    for pair in encoder.options.open(data, encoder.audio):
        batch = encoder.collate([encoder.encode(pair)])
        total += float(model(**batch.rows(), labels=batch.labels).loss) * batch.target_tokens
        count += batch.target_tokens
    return total / count, count


@pytest.mark.parametrize("kind", ["marian", "bart", "t5", "whisper"])
def test_the_score_is_the_models_own_loss(root: Path, kind: str) -> None:
    data = root / ("audio" if kind == "whisper" else "pairs.jsonl")
    loss, count = by_hand(root / kind, data)
    for batch_size in (1, 4):
        result = evaluate(root / kind, data, batch_size=batch_size, window=16, device="cpu")
        assert result.protocol == "pairs" and "encoder-decoder: scored by pairs" in result.warnings
        assert result.models[0].tokens == count
        assert result.models[0].loss == pytest.approx(loss, rel=1e-5)
    limited = evaluate(root / kind, data, max_examples=2, device="cpu", protocol="pairs")
    assert limited.data["documents"] == 2
    if kind != "whisper":
        targets = [r["target"] for r in ROWS]
        assert result.models[0].bytes == sum(map(len, targets))
        assert result.models[0].words == sum(len(t.split()) for t in targets)


def test_features_of_a_recording_are_made_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two models, the texts they write and their scores."""
    made, features = [], PairEncoder.features

    def counted(self: PairEncoder, samples: np.ndarray, place: str) -> np.ndarray:
        made.append(place)
        return features(self, samples, place)

    monkeypatch.setattr(PairEncoder, "features", counted)
    models = [root / "whisper", root / "whisper-g2"]
    evaluate(models, root / "audio", against=models[0], metrics=["wer"], device="cpu")
    assert made and len(made) == len(set(made))


@pytest.mark.parametrize("kind", ["marian", "bart", "whisper"])
def test_original_and_converted_side_by_side(root: Path, kind: str) -> None:
    data = root / ("audio" if kind == "whisper" else "pairs.jsonl")
    models = [root / kind, root / f"{kind}-g2"]
    result = evaluate(models, data, against=models[0], metrics=["auto"], device="cpu")
    original, converted = result.models
    assert original.sha256 == converted.sha256 and converted.kl is not None and converted.kl > 0
    assert converted.top1_agreement is not None and converted.paired is not None
    for i, model in enumerate(result.models):
        assert model.loss == pytest.approx(by_hand(models[i], data)[0], rel=1e-4)
    assert original.generation is not None and converted.generation is not None
    assert original.generation.exact_match is None and converted.generation.exact_match is not None
    encoder = open_encoder(models[1], PairOptions())
    pairs = list(encoder.options.open(data, encoder.audio))
    written = [
        decode(encoder, ids) for ids in generate_ids(load(models[1]), encoder, map(encoder.encode, pairs))
    ]
    assert [row.text for row in converted.generation.shown] == written[:5]
    references = [pair.target or "" for pair in pairs]
    if kind == "whisper":
        plain = normaliser(encoder)
        right = 100 * jiwer.wer([plain(t).strip() for t in references], [plain(t).strip() for t in written])
        assert converted.generation.wer == pytest.approx(right)
        (gate,) = measure_gates(result.to_dict()["models"], max_wer_delta=0.0)
        assert gate["value"] == pytest.approx(right - (original.generation.wer or 0), abs=1e-5)
        assert converted.generation.paired["wer"].difference == pytest.approx(gate["value"], abs=1e-5)
    else:
        assert converted.generation.bleu == pytest.approx(sacrebleu.corpus_bleu(written, [references]).score)
        assert converted.generation.chrf == pytest.approx(sacrebleu.corpus_chrf(written, [references]).score)
        assert measure_gates(result.to_dict()["models"], max_bleu_drop=100.0)[0]["ok"]
    same = evaluate([models[0], models[0]], data, metrics=["exact_match"], device="cpu").models[1].generation
    assert same is not None and same.exact_match == 100 and same.wer is None


def test_text_that_t5_was_pretrained_on_is_still_scored_by_spans(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "w1 w2 " * 60}) + "\n")
    assert evaluate(root / "t5", tmp_path / "a.jsonl", window=20, device="cpu").protocol == "span-corruption"
    with pytest.raises(UsageError, match="texts are generated from pairs only"):
        evaluate(root / "t5", tmp_path / "a.jsonl", window=20, device="cpu", metrics=["bleu"])


def test_the_original_writes_the_targets(root: Path, tmp_path: Path) -> None:
    models = [root / "marian", root / "marian-g2"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": r["source"]}) + "\n" for r in ROWS))
    result = evaluate(models, tmp_path / "a.jsonl", targets="generate", device="cpu")
    original, converted = result.models
    assert result.protocol == "pairs" and original.loss is not None and converted.loss is not None
    assert original.loss < converted.loss  # its own text is likelier to itself
    assert result.settings["pairs"] == {"targets": "generate"}
    assert ", targets that the original wrote, " in render(result.to_dict())
    beams = evaluate(models[0], tmp_path / "a.jsonl", targets="generate", beams=2, device="cpu")
    assert beams.models[0].tokens


def exit_code(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(cli, [str(word) for word in words])
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_gates_know_what_auto_measures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speech = ("evaluate", root / "whisper", root / "whisper", "--data", root / "audio", "--metrics", "auto")
    text = ("evaluate", root / "marian", root / "marian", "--data", root / "pairs.jsonl", "--metrics", "auto")
    assert exit_code(*speech, "--max-wer-delta", 0) == 0
    assert "gate max_wer_delta 0.0: " in capsys.readouterr().out
    assert exit_code(*text, "--max-bleu-drop", 0) == 0
    assert "has 0.0: ok" in capsys.readouterr().out  # not -0.0
    for words in ((*text, "--max-wer-delta", 1), (*speech, "--max-bleu-drop", 1)):
        assert exit_code(*words) == 2
        assert "needs a figure that is not measured" in capsys.readouterr().err


def test_recipes_have_the_gates_of_texts(root: Path, tmp_path: Path) -> None:
    def recipe(metric: str, **report: float) -> dict[str, Any]:
        return {
            "source": str(root / "whisper"),
            "output": str(tmp_path / "out"),
            "convert": {"groups": 8, "method": "mean"},  # a copy, which writes what the original writes
            "evaluate": {"data": [str(root / "audio")], "metrics": [metric]},
            "report": {"formats": ["json"], **report},
        }

    for wrong in (recipe("cer", max_wer_delta=1), recipe("auto", max_bleu_drop=1)):
        for dry_run in (True, False):
            with pytest.raises(
                UsageError,
                match=r"report\.max_.*: needs a figure that is not measured; score .* with evaluate\.metrics",
            ):
                run(wrong, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    assert run(recipe("auto", max_wer_delta=0)).written
    lost = recipe("wer", max_wer_delta=0) | {"convert": {"groups": 1, "method": "random"}}
    with pytest.raises(GateError, match=r"converted: max_wer_delta .* against 0"):
        run(lost | {"output": str(tmp_path / "lost"), "evaluate": lost["evaluate"] | {"targets": "generate"}})


def test_what_a_later_section_lacks_is_told_before_the_first_stage(root: Path, tmp_path: Path) -> None:
    saved_whisper(tmp_path / "many", multilingual=True)
    audio, text = str(root / "audio"), tmp_path / "text.jsonl"
    text.write_text('{"text": "w1"}\n')

    def recipe(evaluate: dict[str, Any], uptrain: dict[str, Any]) -> dict[str, Any]:
        spoken = {"source_lang": "de"}
        return {
            "source": str(tmp_path / "many"),
            "output": str(tmp_path / "out"),
            "convert": {"groups": 2, "calibration": [audio], **spoken},
            "evaluate": {"data": [audio], **spoken, **evaluate},
            "uptrain": {"data": [audio], "tokens": 100, **spoken, **uptrain},
        }

    for evaluated, trained, message in (
        ({"source_lang": None}, {}, "evaluate: .*many: needs the language that is spoken"),
        ({}, {"source_lang": "fr"}, "uptrain: --source-lang fr: .* has no language fr; it has de, en"),
        (
            {"data": [str(text)]},
            {},
            "evaluate: .*text.jsonl: no column 'audio' or 'text'|evaluate: .*no column 'audio'",
        ),
        ({"beams": 4}, {}, "evaluate: --beams: nothing is generated here"),
    ):
        given = recipe(evaluated, trained)
        given["evaluate"] = {k: v for k, v in given["evaluate"].items() if v is not None}
        for dry_run in (True, False):
            with pytest.raises((UsageError, DataError), match=message):
                run(given, dry_run=dry_run)
    assert not (tmp_path / "out" / "converted").exists()
    assert run(recipe({}, {}), dry_run=True).stages


def test_options_about_text_have_no_effect_on_pairs_and_that_is_said(root: Path) -> None:
    model, data = root / "bart", root / "pairs.jsonl"
    plain = evaluate(model, data, device="cpu")
    assert plain.settings["window"] is plain.settings["bos"] is None
    given = {"window": 4, "stride": 2, "text_column": "x", "bos": "always"}
    found = evaluate(model, data, device="cpu", metrics=["exact_match"], **given)
    assert found.models[0].loss == plain.models[0].loss
    assert set(found.warnings) - set(plain.warnings) == {
        "pairs are read, no text: --window, --stride, --text-column, --bos have no effect",
        "exact_match compares texts with the first model's, and only one model is given",
    }


def test_models_in_memory(root: Path) -> None:
    right = evaluate(root / "whisper", root / "audio", device="cpu").models[0]
    model = load(root / "whisper")
    given = evaluate([model, LoadedModel("m", model)], root / "audio", device="cpu")
    assert [m.loss for m in given.models] == [right.loss] * 2


@pytest.mark.parametrize(
    ("model", "data", "options", "error", "message"),
    [
        ("marian", "text", {}, DataError, "an encoder-decoder needs the columns source and target"),
        (
            "whisper",
            "text",
            {},
            DataError,
            r"no column 'audio'; the columns are text; .*a speech model: give a folder of recordings",
        ),
        (
            "marian",
            "pairs.jsonl",
            {"protocol": "blocks"},
            UsageError,
            "protocol blocks does not fit an encoder-d",
        ),
        (
            "marian",
            "pairs.jsonl",
            {"metrics": ["rouge"]},
            UsageError,
            "metrics: must be one of auto, wer",
        ),
        ("marian", "pairs.jsonl", {"target_lang": "de"}, UsageError, "knows no languages"),
        ("marian", "pairs.jsonl", {"beams": 0}, UsageError, "must be at least 1|must be >= 1"),
        (
            "marian",
            "pairs.jsonl",
            {"target_column": "x"},
            DataError,
            "no column 'x'; the columns are source, target",
        ),
        ("whisper", "audio", {"source_lang": "de"}, UsageError, "transcribes English only"),
    ],
)
def test_bad_input_is_refused_before_any_model_is_loaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, data: str, options: dict[str, Any],
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2"}\n')
    monkeypatch.setattr("mha2gqa.evaluation.comparison.load_model", None)
    with pytest.raises(error, match=message):
        evaluate(
            root / model, tmp_path / "a.jsonl" if data == "text" else root / data, device="cpu", **options
        )


@pytest.mark.parametrize(("first", "second"), [("marian", "whisper"), ("whisper", "marian")])
def test_a_speech_model_is_not_compared_with_one_that_reads_text(root: Path, first: str, second: str) -> None:
    data = root / ("audio" if first == "whisper" else "pairs.jsonl")
    with pytest.raises(
        UsageError,
        match=rf"{second}: reads (recordings, and \S*{first} text|text, and \S*{first} recordings): no data suits both",
    ):
        evaluate([root / first, root / second], data, device="cpu")


def test_the_result_says_at_which_temperatures_loops_were_written_again(root: Path) -> None:
    given = {"metrics": ["wer"], "device": "cpu", "retry_temperatures": (0.2, 1.0)}
    result = evaluate(root / "whisper", root / "audio", **given)
    assert "texts that repeat themselves were written again at temperature 0.2, 1" in result.warnings
    (found,) = result.to_dict()["models"]
    assert list(found["generation"]["retry_temperatures"]) == [0.2, 1.0]
    with pytest.raises(UsageError, match="nothing is generated here"):
        evaluate(root / "whisper", root / "audio", device="cpu", retry_temperatures=(0.2,))


@pytest.mark.parametrize(("library", "metric"), [("jiwer", "wer"), ("sacrebleu", "bleu")])
def test_a_missing_library_is_named_first(
    root: Path, monkeypatch: pytest.MonkeyPatch, library: str, metric: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"^metrics {metric}: {library} is not installed; run pip install"):
        evaluate(root / "marian", root / "pairs.jsonl", metrics=[metric], device="cpu")


# --- metrics -------------------------------------------------------------------------------------------

RIGHT = ["the cat sat on the mat today", "it is a test of the tool", "one more line of words here"]
FIRST = ["the cat sat on the mat today", "it is a test of a tool", "one more line of words"]
SECOND = ["a cat sat on a mat", "it is the test", "one more line of words here"]


def texts(*metrics: str) -> Texts:
    return Texts(["a", "b", "c"], RIGHT, metrics, lambda text: text)


def test_loops_are_counted_and_left_out_beside() -> None:
    loop = "one more line of words here " * 40
    found = compare_texts(texts("wer"), [*SECOND[:2], loop], FIRST, "first")
    assert (found.looped, found.paired["wer"].units) == (1, 3)
    two = Texts(["a", "b"], RIGHT[:2], ("wer",), lambda text: text)
    sound = compare_texts(two, SECOND[:2], FIRST[:2], "first")
    assert found.paired["wer_without_loops"] == sound.paired["wer"]
    assert sound.looped == 0 and "wer_without_loops" not in sound.paired
    assert compare_texts(texts("bleu"), SECOND, FIRST, "first").looped is None
    said = list(generation_differences("m", {"generation": asdict(found)}))
    assert (
        "points of WER where neither loops, against the original" in said[1] and "over 2 examples" in said[1]
    )


def test_metrics_are_those_of_the_libraries() -> None:
    found = compare_texts(texts("wer", "cer", "bleu", "chrf", "exact_match"), SECOND, FIRST, "first")
    assert found.wer == pytest.approx(100 * jiwer.wer(RIGHT, SECOND))
    assert found.cer == pytest.approx(100 * jiwer.cer(RIGHT, SECOND))
    assert found.bleu == pytest.approx(sacrebleu.corpus_bleu(SECOND, [RIGHT]).score)
    assert found.chrf == pytest.approx(sacrebleu.corpus_chrf(SECOND, [RIGHT]).score)
    assert found.exact_match == 0
    assert found.paired["wer"].difference == pytest.approx(
        100 * (jiwer.wer(RIGHT, SECOND) - jiwer.wer(RIGHT, FIRST))
    )
    bleu = found.paired["bleu"]
    right = sacrebleu.corpus_bleu(SECOND, [RIGHT]).score - sacrebleu.corpus_bleu(FIRST, [RIGHT]).score
    assert bleu.difference == pytest.approx(right) and bleu.low <= bleu.difference <= bleu.high
    assert compare_texts(texts("bleu"), SECOND, FIRST, "first").paired["bleu"] == bleu  # the seed decides
    chrf = found.paired["chrf"]
    right = sacrebleu.corpus_chrf(SECOND, [RIGHT]).score - sacrebleu.corpus_chrf(FIRST, [RIGHT]).score
    assert chrf.difference == pytest.approx(right) and chrf.low <= chrf.difference <= chrf.high
    same = compare_texts(texts("chrf"), FIRST, FIRST, "first").paired["chrf"]
    assert (same.difference, same.low, same.high, same.p_value, same.units) == (0, 0, 0, 1, 3)


def test_the_interval_of_chrf_is_that_of_whole_corpora_resampled() -> None:
    """sacrebleu's own figure of the lines that each resample draws."""
    found = compare_texts(texts("chrf"), SECOND, FIRST, "first").paired["chrf"]
    drawn = np.random.default_rng(0).multinomial(3, np.full(3, 1 / 3), size=1000)
    differences = []
    for counts in drawn[:200]:
        rows = np.repeat(np.arange(3), counts)
        right = [[RIGHT[i] for i in rows]]
        ours, theirs = (sacrebleu.corpus_chrf([t[i] for i in rows], right).score for t in (SECOND, FIRST))
        differences.append(ours - theirs)
    assert np.quantile(differences, 0.025) == pytest.approx(found.low, abs=0.5)
    assert np.quantile(differences, 0.975) == pytest.approx(found.high, abs=0.5)


def test_a_transcript_of_signs_only_counts_what_is_said() -> None:
    given = Texts(["a", "b"], ["(laughs)", "yes no"], ("wer",), normaliser(FakeEncoder()))  # type: ignore[arg-type]
    assert compare_texts(given, ["oh well", "yes no"], None, "").wer == pytest.approx(100 * 2 / 2)
    assert compare_texts(given, ["", "Yes, no."], None, "").wer == 0


class FakeEncoder:
    options = PairOptions()
    tokenizer = None


def test_the_normaliser_is_whispers() -> None:
    english = normaliser(FakeEncoder())  # type: ignore[arg-type]
    assert english("Mr. Smith won't pay twenty dollars!") == "mister smith will not pay $20"
    german = FakeEncoder()
    german.options = PairOptions(source_language="de")
    assert normaliser(german)("Äh, zwei!").strip() == "äh zwei"  # type: ignore[arg-type]
    assert [bleu_tokenizer(x) for x in (None, "deu_Latn", "zh", "zho_Hans", "ja_XX")] == [
        "13a",
        "13a",
        "zh",
        "zh",
        "char",
    ]


def test_pairs_given_by_hand(root: Path) -> None:
    pairs = [Pair(r["source"], r["target"], "p") for r in ROWS]
    right = evaluate(root / "marian", root / "pairs.jsonl", device="cpu").models[0]
    assert evaluate(root / "marian", pairs, device="cpu").models[0].loss == right.loss
    assert evaluate(root / "marian", iter(pairs), device="cpu").models[0].loss == right.loss

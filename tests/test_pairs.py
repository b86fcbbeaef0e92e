"""Pairs and recordings: read from every container, encoded as each family of models reads them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
import torch
from seq2seq_models import RATE, audio_folder, saved, saved_nllb, saved_whisper, tone
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from mha2gqa.checkpoints.loading import load_tokenizer
from mha2gqa.data import Pair, PairOptions, PairSource
from mha2gqa.data.audio import Audio, to_audio
from mha2gqa.data.generation import _room, _Sampled, decode, generate_ids, repeats, with_targets
from mha2gqa.data.prompts import _some_of, languages
from mha2gqa.data.recordings import recordings
from mha2gqa.data.seq2seq import PairEncoder, open_encoder, pad_encoder
from mha2gqa.errors import CheckpointError, DataError, UsageError

ROWS = [{"source": "w1 w2 w3", "target": "w4 w5"}, {"source": "w6", "target": "w7 w8 w9"}]
PAIRS = [Pair(r["source"], r["target"], f"p:{i}") for i, r in enumerate(ROWS)]


def contents(data: Any, **options: Any) -> list[tuple[Any, Any]]:
    source = PairSource(data, audio=False, **options)
    found = [(p.source, p.target) for p in source]
    assert [(p.source, p.target) for p in source] == found
    return found


# --- reading -------------------------------------------------------------------------------------------

RIGHT = [(r["source"], r["target"]) for r in ROWS]


def test_pairs_from_every_table_and_value(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (tmp_path / "b.csv").write_text(
        "source,target\n" + "".join(f"{r['source']},{r['target']}\n" for r in ROWS)
    )
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    frame = datasets.Dataset.from_list(ROWS)
    frame.save_to_disk(str(tmp_path / "d"))
    for data in (*sorted(tmp_path.iterdir()), ROWS, iter(ROWS), RIGHT, PAIRS, frame):
        assert contents(data) == RIGHT, data
    renamed = [{"en": r["source"], "de": r["target"]} for r in ROWS]
    assert contents(renamed, source_column="en", target_column="de") == RIGHT
    nested = [{"translation": row} for row in renamed]
    assert contents(nested, source_column="translation.en", target_column="translation.de") == RIGHT


def test_text_alone_is_enough_where_the_model_writes_the_targets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n{"text": ""}\n{"text": "w2"}\n')
    source = PairSource(tmp_path / "a.jsonl", audio=False, targets=False)
    assert [(p.source, p.target) for p in source] == [("w1", None), ("w2", None)] and source.empty == 1
    assert contents(["w1 w2", "w3 w4"], targets=False) == [("w1 w2", None), ("w3 w4", None)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [{"text": "w1"}],
            r"no column 'source' or 'target'; the columns are text; .*needs the columns source and",
        ),
        ([{"source": "w1"}], r"no column 'target'; the columns are source; .*--targets generate"),
        (["w1 w2", "w3 w4"], "plain text is not a pair"),
        (
            [{"source": "", "target": "w1"}, {"source": "w1", "target": " "}],
            "all its 2 rows lack a source or",
        ),
        ([{"source": 3, "target": "w1"}], "column 'source' holds a int, not text"),
        ([("w1", "w2", "w3")], "plain text is not a pair"),
    ],
)
def test_what_is_no_pair(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(PairSource(data, audio=False))


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    for row in ({"source": "w1 \ud800", "target": "w2"}, {"source": "w1", "target": "w2 \udfff"}):
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=r"a.jsonl:1: invalid UTF-16 surrogate \\ud\w+; repair the text"):
            contents(tmp_path / "a.jsonl")


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(
        DataError, match=r"p\.jsonl: a pipe can be read only once, .*; write them to a file first"
    ):
        PairSource(tmp_path / "p.jsonl", audio=False)


def test_plain_text_for_an_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1")
    with pytest.raises(
        DataError, match=r"a.txt: plain text is not a pair; an encoder-decoder needs the columns"
    ):
        list(PairSource(tmp_path / "a.txt", audio=False))
    with pytest.raises(DataError, match=r"not a pair; give a table .* with a column source or text"):
        list(PairSource(tmp_path / "a.txt", audio=False, targets=False))


def test_a_language_that_the_nested_columns_lack_is_named() -> None:
    rows = [{"translation": {"en": "w1", "de": "w2"}}]
    columns = {"source_column": "translation.fr", "target_column": "translation.de"}
    with pytest.raises(DataError, match=r"see that they have 'translation.fr' and 'translation.de'"):
        list(PairSource(rows, audio=False, **columns))


# --- recordings ----------------------------------------------------------------------------------------


def test_audio_folders(tmp_path: Path) -> None:
    for column in ("text", "transcription", "sentence"):
        folder = audio_folder(tmp_path / column, ["w1 w2", "", "w3"], column)
        source = PairSource(folder, audio=True)
        found = list(source)
        assert [p.target for p in found] == ["w1 w2", "w3"] and source.empty == 1 and not source.warnings
        assert all(isinstance(p.source, Audio) and p.source.path for p in found)
    alone = PairSource(tmp_path / "text" / "a0.wav", audio=True, targets=False)
    assert [p.target for p in alone] == [None]
    (tmp_path / "text" / "metadata.csv").unlink()
    assert len(list(PairSource(tmp_path / "text", audio=True, targets=False))) == 3
    with pytest.raises(DataError, match=r"recordings without transcripts; add metadata\.csv"):
        list(PairSource(tmp_path / "text", audio=True))


def test_a_recording_is_no_text(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "a", ["w1"])
    for audio, name in ((False, "a0.wav"), (True, "*")):  # the glob has the table, too
        with pytest.raises(
            DataError, match=r"a0\.wav: a recording, where text or a table is read; give text"
        ):
            list(PairSource(str(folder / name), audio=audio))


def test_recordings_in_columns(tmp_path: Path) -> None:
    import datasets

    folder = audio_folder(tmp_path / "a", ["w1"])
    data = (folder / "a0.wav").read_bytes()
    right = soundfile.read(folder / "a0.wav", dtype="float32")[0]
    rows = [{"audio": {"bytes": data, "path": None}, "text": "w1"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"audio": "a/a0.wav", "text": "w1"}))
    hub = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio())
    hub.save_to_disk(str(tmp_path / "saved"))
    decoded = [{"audio": {"array": right, "sampling_rate": RATE}, "text": "w1"}]
    for given in (tmp_path / "a.parquet", tmp_path / "b.jsonl", tmp_path / "saved", rows, decoded, hub):
        (pair,) = PairSource(given, audio=True)
        assert isinstance(pair.source, Audio) and pair.target == "w1"
        np.testing.assert_array_equal(pair.source.load(RATE)[0], right)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_another_rate_is_brought_to_the_models(tmp_path: Path, rate: int, kind: str) -> None:
    stereo = np.stack([tone(0.5, rate=rate), -0.5 * tone(0.5, rate=rate)], axis=1)
    soundfile.write(tmp_path / f"a.{kind}", stereo, rate)
    samples, own = to_audio(str(tmp_path / f"a.{kind}"), "a:1").load(RATE)
    assert own == rate and samples.dtype == np.float32 and abs(len(samples) - RATE // 2) <= 1
    right = 0.25 * tone(0.5)  # the mean of both channels
    inner = slice(400, 7600)
    assert np.abs(samples[: RATE // 2][inner] - right[: len(samples)][inner]).max() < 2e-3


def test_recordings_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.wav").write_text("not sound")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, dtype=np.float32), RATE)
    for name, message in (
        ("text.wav", r"a:1: not a recording that can be read \(.*\); convert it to WAV or FLAC"),
        ("empty.wav", "a:1: a recording of no samples"),
    ):
        with pytest.raises(DataError, match=message):
            to_audio(name, "a:1", tmp_path).load(RATE)
        with pytest.raises(DataError, match=message):
            to_audio(name, "a:1", tmp_path).check(RATE)
    with pytest.raises(DataError, match=r"a:1: no such recording: none.wav"):
        to_audio("none.wav", "a:1", tmp_path)
    with pytest.raises(DataError, match="a int is not a recording"):
        to_audio(3, "a:1")
    soundfile.write(tmp_path / "low.wav", tone(0.1, rate=8000), 8000)
    for module, name in (("soundfile", "low.wav"), ("scipy.signal", "low.wav")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            UsageError, match=rf"{module.split('.')[0]}.* is not installed; run pip install 'mha2gqa.audio.'"
        ):
            to_audio(name, "a:1", tmp_path).load(RATE)
        with pytest.raises(UsageError, match="is not installed"):  # before the work already
            to_audio(name, "a:1", tmp_path).check(RATE)
        monkeypatch.undo()


def test_samples_that_are_no_sound(tmp_path: Path) -> None:
    for number, (value, message) in enumerate(
        (
            (np.nan, "a:1: a recording with samples of nan or inf; convert it anew, or remove it"),
            (np.inf, "a:1: a recording with samples of nan or inf"),
            (
                -12_000.0,
                "samples up to 12,000, where full scale is 1; divide them by their full scale, 32,768",
            ),
        )
    ):
        samples = np.where(np.arange(400) == 7, value, 0.1).astype(np.float32)
        soundfile.write(tmp_path / f"{number}.wav", samples, RATE, subtype="FLOAT")
        for given in (f"{number}.wav", {"array": samples, "sampling_rate": RATE}):
            with pytest.raises(DataError, match=message):
                to_audio(given, "a:1", tmp_path).load(RATE)
    for array, message in (
        (np.zeros((2, 3, 4)), "a:1: an array of 3 axes is not a recording"),
        ([1, 2], "a:1: samples of int64 have no known full scale; give floats between -1 and 1, or int16"),
    ):
        with pytest.raises(DataError, match=message):
            to_audio({"array": array, "sampling_rate": RATE}, "a:1")
    with pytest.raises(DataError, match="a:1: a recording of no samples; remove it"):
        to_audio({"array": np.zeros(0), "sampling_rate": RATE}, "a:1").check(RATE)


def test_arrays_of_every_shape_and_scale() -> None:
    right = tone(0.1)
    whole = np.rint(right * 32_768)
    stereo = np.stack([2 * right, np.zeros_like(right)])
    for array in (
        right.astype(np.float64),
        stereo,
        stereo.T,
        right[None],
        whole.astype(np.int16),
        (whole * 65_536).astype(np.int32),
        (whole // 256 + 128).astype(np.uint8),
    ):
        samples, own = to_audio({"array": array, "sampling_rate": RATE}, "a:1").load(RATE)
        tolerance = 1 / 127 if array.dtype == np.uint8 else 1 / 32_000
        assert own == RATE and samples.dtype == np.float32 and samples.shape == right.shape
        np.testing.assert_allclose(samples, right, atol=tolerance)


def test_tables_of_recordings_with_gaps_and_odd_headers(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "a", ["w1", "w2", "w3"])
    table = folder / "metadata.csv"

    def found(**options: Any) -> tuple[list[str | None], int]:
        source = PairSource(folder, audio=True, **options)
        return [pair.target for pair in source], source.empty

    table.write_bytes(b'\xef\xbb\xbf"file_name","text"\r\n"a0.wav","w1, ""w2"""\r\n,w2\r\na1.wav,\r\n')
    assert found() == (['w1, "w2"'], 2) and found(targets=False) == ([None, None], 1)
    table.write_text("file_name,said.de\na0.wav,w1\n")
    assert found(target_column="said.de") == (["w1"], 0)
    for text, message in (
        ("file_name,text\n", "there are no pairs in it"),
        ("", "there are no pairs in it"),
        (
            "file_name,text,text\na0.wav,w1,w2\n",
            "metadata.csv: two columns 'text'; give each a name of its own",
        ),
        ("file_name, text\na0.wav,w1\n", "no column 'text'; the columns are ' text', file_name"),
        ('file_name,"text" a\na0.wav,w1\n', "metadata.csv:1: not CSV"),
        ("file_name,text\n,w1\n,w2\n", "all its 2 rows lack a source or a target"),
    ):
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            found()
    table.write_text("file_name,text,note,note\na0.wav,w1,x,y\n")  # which nobody reads
    assert found() == (["w1"], 0)


# --- encoding ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {kind: saved(root / kind, kind) for kind in ("marian", "t5", "bart")}
    return made | {"whisper": saved_whisper(root / "whisper"), "many": saved_whisper(root / "many", True)}


def examples_of(
    folder: Path, tmp_path: Path, options: PairOptions | None = None
) -> tuple[PairEncoder, list[Any]]:
    encoder = open_encoder(folder, options or PairOptions())
    pairs: Any = PAIRS
    if encoder.audio:
        pairs = PairSource(audio_folder(tmp_path / "audio", ["w4 w5", "w7 w8 w9"]), audio=True)
    return encoder, [encoder.encode(pair) for pair in pairs]


def load(folder: Path) -> Any:
    kind = (
        AutoModelForSpeechSeq2Seq if (folder / "preprocessor_config.json").exists() else AutoModelForSeq2SeqLM
    )
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["marian", "t5", "bart", "whisper"])
@torch.no_grad()
def test_padding_changes_nothing(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Each example alone gives the logits that it gives in a padded batch, and masks say what is real."""
    encoder, examples = examples_of(models[kind], tmp_path)
    model, batch = load(models[kind]), encoder.collate(examples)
    together = model(**batch.rows()).logits
    for row, example in enumerate(examples):
        one = encoder.collate([example])
        n = one.decoder_input_ids.shape[1]
        alone = model(**one.rows()).logits[0]
        torch.testing.assert_close(together[row, :n], alone, atol=1e-4, rtol=1e-4)
        assert batch.decoder_mask[row].tolist() == [1] * n + [0] * (batch.decoder_mask.shape[1] - n)
        if batch.encoder_mask is not None:
            assert int(batch.encoder_mask[row].sum()) == len(example.encoder)
    assert (batch.encoder_mask is None) == (kind == "whisper")
    loss = model(**batch.rows(), labels=batch.labels).loss
    chosen = batch.labels != -100
    nll = torch.nn.functional.cross_entropy(together[chosen], batch.labels[chosen])
    torch.testing.assert_close(loss, nll, atol=1e-5, rtol=1e-5)
    assert batch.target_tokens == int(chosen.sum()) == 2 + 3 + 2  # the words and an end each


def test_targets_follow_the_models_own_labels(models: dict[str, Path], tmp_path: Path) -> None:
    """What the decoder reads is what transformers makes of the labels."""
    for kind in ("marian", "t5", "bart"):
        encoder, examples = examples_of(models[kind], tmp_path)
        model, batch = load(models[kind]), encoder.collate(examples)
        own = model.prepare_decoder_input_ids_from_labels(batch.labels)
        assert torch.equal(own[batch.decoder_mask == 1], batch.decoder_input_ids[batch.decoder_mask == 1])


def test_the_prompt_of_whisper(models: dict[str, Path], tmp_path: Path) -> None:
    encoder, examples = examples_of(models["whisper"], tmp_path)
    ids = encoder.tokenizer.convert_tokens_to_ids
    assert encoder.prompt == ids(["<|startoftranscript|>", "<|notimestamps|>"])
    assert (
        examples[0].decoder.tolist() == [*encoder.prompt, *ids(["w4", "w5"]), 1] and examples[0].prompt == 2
    )
    assert examples[0].encoder.shape == (16, 200)
    many = open_encoder(models["many"], PairOptions(source_language="German", task="translate"))
    assert many.prompt == ids(["<|startoftranscript|>", "<|de|>", "<|translate|>", "<|notimestamps|>"])
    for options, message in (
        (PairOptions(), "needs the language that is spoken; name it with --source-lang"),
        (PairOptions(source_language="xx"), "--source-lang xx: is not a language of Whisper; it has af, am,"),
        (PairOptions(source_language="Deutsch"), "is not a language of Whisper; it has de and 99 more"),
        (PairOptions(source_language="fr"), "--source-lang fr: .* has no language fr; it has de, en$"),
        (PairOptions(source_language="en", task="sing"), "--task sing: must be transcribe or translate"),
        (
            PairOptions(source_language="de", target_language="fr"),
            "--target-lang fr: Whisper writes the language that is spoken, or English with --task translate",
        ),
        (PairOptions(source_language="de", source_prefix="say "), "--source-prefix: recordings have no text"),
    ):
        with pytest.raises(UsageError, match=message):
            open_encoder(models["many"], options)
    with pytest.raises(UsageError, match="transcribes English only"):
        open_encoder(models["whisper"], PairOptions(source_language="de"))
    with pytest.raises(UsageError, match="--task translate: is a task of Whisper's; leave it out"):
        open_encoder(models["marian"], PairOptions(task="translate"))
    both = PairOptions(source_language="de", target_language="English", task="translate")
    assert open_encoder(models["many"], both).prompt == many.prompt


def test_languages_of_translation_models(models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    class Nllb:
        """The parts of a tokenizer with languages that are used: codes before the text, `src_lang`, `tgt_lang`."""

        src_lang, tgt_lang, eos_token_id, pad_token_id, unk_token_id = "eng_Latn", None, 1, 0, 2
        model_max_length = 64
        ids = {"eng_Latn": 10, "deu_Latn": 11}  # noqa: RUF012

        def convert_tokens_to_ids(self, token: str) -> int:
            return self.ids.get(token, 2)

        def get_added_vocab(self) -> dict[str, int]:
            return self.ids

        def __call__(
            self, text: str | None = None, text_target: str | None = None, **_: Any
        ) -> dict[str, list[int]]:
            code = self.src_lang if text_target is None else str(self.tgt_lang)
            words = (text if text_target is None else text_target) or ""
            return {"input_ids": [self.ids[code], *(20 + len(w) for w in words.split()), 1]}

    raw = json.loads((models["marian"] / "config.json").read_text()) | {"model_type": "m2m_100"}
    options = PairOptions(target_language="deu_Latn")
    encoder = PairEncoder(Nllb(), raw | {"decoder_start_token_id": 1}, options)  # type: ignore[arg-type]
    example = encoder.encode(Pair("a bb", "ccc", "p:1"))
    assert encoder.prompt == [1, 11] and example.decoder.tolist() == [1, 11, 23, 1] and example.prompt == 2
    assert example.encoder.tolist() == [10, 21, 22, 1]
    with pytest.raises(UsageError, match="needs the language of the targets; name it with --target-lang"):
        PairEncoder(Nllb(), raw, PairOptions())  # type: ignore[arg-type]
    with pytest.raises(
        UsageError,
        match="--target-lang: the tokenizer of model has no language xxx_Latn; it has deu_Latn, eng_Latn",
    ):
        PairEncoder(Nllb(), raw, PairOptions(target_language="xxx_Latn"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="knows no languages"):
        PairEncoder(AutoTokenizer.from_pretrained(models["marian"]), raw, options)


def test_a_piece_of_a_word_is_no_language(tmp_path: Path) -> None:
    """NLLB's vocabulary has `en`, which is not its English."""
    from transformers import MBartTokenizer, NllbTokenizer

    folder = saved_nllb(tmp_path / "nllb")
    assert open_encoder(folder, PairOptions(target_language="deu_Latn")).prompt[1:] == [
        NllbTokenizer.from_pretrained(folder).convert_tokens_to_ids("deu_Latn")
    ]
    for options in (
        {"target_language": "w"},
        {"target_language": "deu_Latn", "source_language": "1"},
        {"target_language": "<s>"},
    ):
        with pytest.raises(
            UsageError, match=r"-lang: the tokenizer of .* has no language .*; it has deu_Latn, "
        ):
            open_encoder(folder, PairOptions(**options))
    pieces = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", "de"])}
    many = languages(NllbTokenizer(pieces))
    assert len(many) == 202 and "de" not in many
    assert _some_of(many, "de") == "it has deu_Latn and 201 more"
    assert _some_of(many, "xx").startswith("it has ace_Arab, ace_Latn, ") and "and 194 more" in _some_of(
        many, "xx"
    )
    mbart = languages(MBartTokenizer(vocab=[(piece, 0.0) for piece in pieces]))
    assert len(mbart) == 25 and {"de_DE", "en_XX"} <= set(mbart)


def test_long_sources_are_cut_and_long_targets_refused(models: dict[str, Path], tmp_path: Path) -> None:
    encoder = open_encoder(models["marian"], PairOptions())
    assert encoder.source_limit == encoder.target_limit == 128
    example = encoder.encode(Pair("w1 " * 300, "w2", "p:1"))
    assert len(example.encoder) == 128 and encoder.cut == 1
    assert encoder.report() == [
        "1 sources longer than the model takes, cut as its processor does (the targets are not)"
    ]
    with pytest.raises(DataError, match="p:2: the target needs 301 positions, the decoder has 128"):
        encoder.encode(Pair("w1", "w2 " * 300, "p:2"))
    whisper = open_encoder(models["whisper"], PairOptions())
    soundfile.write(tmp_path / "long.wav", np.zeros(5 * 8000, dtype=np.float32), 8000)
    whisper.encode(Pair(Audio("a", tmp_path / "long.wav"), "w1", "a"))
    assert (whisper.cut, whisper.resampled, whisper.silent) == (1, 1, 1)
    assert "1 recordings of another sampling rate, brought to 16000 Hz" in whisper.report()


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ({"feature_size": 80}, "80 x 200"),
        ({"sampling_rate": 8000}, "16 x 100"),
        ({"chunk_length": 4}, "16 x 400"),
    ],
)
def test_a_feature_extractor_of_another_model_is_refused(
    models: dict[str, Path], tmp_path: Path, changes: dict[str, int], made: str
) -> None:
    from transformers import WhisperFeatureExtractor

    folder = tmp_path / "w"
    shutil.copytree(models["whisper"], folder)
    WhisperFeatureExtractor(**{"feature_size": 16, "chunk_length": 2} | changes).save_pretrained(folder)
    with pytest.raises(
        DataError, match=f"its feature extractor makes {made} of 1 samples, the encoder takes 16 x 200; copy"
    ):
        open_encoder(folder, PairOptions())


def test_targets_may_have_a_vocabulary_of_their_own(models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(models["marian"])
    raw = json.loads((models["marian"] / "config.json").read_text())
    pair = Pair("w1", "w50", "p:1")
    ids = PairEncoder(tokenizer, raw, PairOptions()).encode(pair).decoder
    small = raw | {"vocab_size": int(ids.max())}
    with pytest.raises(
        DataError, match=rf"p:1: the tokenizer gives id {ids.max()}, the model has {ids.max()} emb"
    ):
        PairEncoder(tokenizer, small | {"decoder_vocab_size": None}, PairOptions()).encode(pair)
    found = PairEncoder(tokenizer, small | {"decoder_vocab_size": raw["vocab_size"]}, PairOptions())
    assert found.encode(pair).decoder.tolist() == ids.tolist()


def test_features_of_several_lengths_are_padded() -> None:
    features = [np.ones((3, 2), dtype=np.float32), np.ones((5, 2), dtype=np.float32)]
    x, mask = pad_encoder(features)
    assert x.shape == (2, 5, 2) and mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5] and float(x[0, 3:].sum()) == 0
    samples = [np.ones(4, dtype=np.float32), np.ones(2, dtype=np.float32)]
    assert pad_encoder(samples)[1].tolist() == [[1] * 4, [1, 1, 0, 0]]
    assert pad_encoder([np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)], 9)[0].tolist() == [
        [5, 6],
        [7, 9],
    ]


# --- generation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["marian", "t5", "whisper"])
@torch.no_grad()
def test_greedy_text_is_the_likeliest_next_token(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    encoder, examples = examples_of(models[kind], tmp_path)
    model = load(models[kind])
    written = list(generate_ids(model, encoder, examples, max_new_tokens=6))
    for example, ids in zip(examples, written, strict=True):
        row = encoder.collate([example])
        inputs = {k: v for k, v in row.rows().items() if not k.startswith("decoder_")}
        expected = list(encoder.prompt)
        while len(expected) < 6 + len(encoder.prompt) and expected[-1] != 1:
            logits = model(**inputs, decoder_input_ids=torch.tensor([expected])).logits[0, -1]
            expected.append(int(logits.argmax()))
        while len(expected) > 1 and expected[-1] == 0:  # a random T5 may end in padding
            expected.pop()
        assert ids == expected[len(encoder.prompt) :]
    encoder.options = replace(encoder.options, beams=3)
    wide = list(generate_ids(model, encoder, examples, max_new_tokens=6, batch_size=1))
    assert len(wide) == len(examples)


@pytest.mark.parametrize(
    "own",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "temperature": 9.0},
        {"num_beams": 3, "num_return_sequences": 3},
        {"max_time": 1e-9},
        {"prompt_lookup_num_tokens": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"decoder_start_token_id": None, "bos_token_id": None},
    ],
    ids=lambda own: next(iter(own)),
)
def test_what_a_generation_config_adds_changes_no_search(
    models: dict[str, Path], tmp_path: Path, own: dict[str, Any]
) -> None:
    encoder, examples = examples_of(models["marian"], tmp_path)
    right = list(generate_ids(load(models["marian"]), encoder, examples, max_new_tokens=6))
    model = load(models["marian"])
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert list(generate_ids(model, encoder, examples, max_new_tokens=6)) == right


def test_texts_are_as_long_as_the_generation_config_lets_them(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(models["marian"], folder)
    file = folder / "generation_config.json"
    raw = json.loads(file.read_text())
    for own, most in (
        ({"max_length": 5}, 4),
        ({"max_new_tokens": 3}, 3),
        ({"max_length": 20}, 127),
        ({}, 127),
    ):
        file.write_text(json.dumps(raw | own))
        assert _room(open_encoder(folder, PairOptions())) == most
    for text, message in (
        ("{", "generation_config.json: not valid JSON .*; restore the original file"),
        ('{"decoder_start_token_id": 0, "forced_bos_token_id": 9999}', "gives id 9999, the model has 128"),
    ):
        file.write_text(text)
        with pytest.raises((CheckpointError, DataError), match=message):
            open_encoder(folder, PairOptions())


@torch.no_grad()
def test_only_texts_that_repeat_themselves_are_written_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repeats("one more time " * 40) and not repeats("ask not what your country can do for you")
    encoder, examples = examples_of(models["whisper"], tmp_path)
    model = load(models["whisper"])

    def written(*temperatures: float) -> list[list[int]]:
        encoder.options = replace(encoder.options, retry_temperatures=temperatures)
        return list(generate_ids(model, encoder, examples, max_new_tokens=12))

    greedy = written()
    monkeypatch.setattr("mha2gqa.data.generation.repeats", lambda text: text == decode(encoder, greedy[0]))
    state = torch.get_rng_state()
    again = written(1.0, 2.0)
    assert torch.equal(torch.get_rng_state(), state) and written(1.0, 2.0) == again
    assert len(greedy) > 1 and again[0] != greedy[0] and again[1:] == greedy[1:]
    monkeypatch.setattr("mha2gqa.data.generation.repeats", lambda text: False)
    assert written(1.0) == greedy


@pytest.mark.parametrize("kind", ["marian", "whisper"])
@torch.no_grad()
def test_what_is_sampled_depends_on_no_other_text_of_the_batch(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    encoder, examples = examples_of(models[kind], tmp_path)
    model = load(models[kind])
    encoder.options = replace(encoder.options, beams=2, retry_temperatures=(0.5, 1.5))
    monkeypatch.setattr("mha2gqa.data.generation.repeats", lambda text: True)
    together = list(generate_ids(model, encoder, examples, max_new_tokens=8))
    alone = list(generate_ids(model, encoder, examples[::-1], max_new_tokens=8, batch_size=1))
    assert len(together) > 1 and together == alone[::-1]


@torch.no_grad()
def test_samples_have_the_distribution_of_the_temperature() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, -torch.inf]] * 2)
    sampled = _Sampled(temperature=0.7, seed=0)
    drawn = torch.stack([sampled(torch.empty(2, 0), logits).argmax(-1) for _ in range(4000)])
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    shares = torch.bincount(drawn[:, 0], minlength=4) / len(drawn)
    assert torch.allclose(shares, (logits[0] / 0.7).softmax(-1), atol=0.03)


def test_temperatures_without_generated_text_are_refused() -> None:
    options = PairOptions(retry_temperatures=(0.2,))
    with pytest.raises(UsageError, match="nothing is generated here; add --targets generate"):
        options.check_used()
    with pytest.raises(UsageError, match=r"^--beams: nothing is generated here"):
        PairOptions(beams=2).check_used()
    options.check_used(generates=True)
    replace(options, targets="generate").check_used()
    with pytest.raises(UsageError, match=r"--retry-temperatures 0.0: must be > 0"):
        PairOptions(retry_temperatures=(0.0,))


def test_options_of_pairs_are_told_where_none_are_read() -> None:
    assert PairOptions().without_effect() == []
    (said,) = PairOptions(source_language="de", retry_temperatures=(0.2,)).without_effect()
    assert said == "no pairs are read: --retry-temperatures, --source-lang have no effect"


def test_a_model_writes_the_targets(models: dict[str, Path], tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "audio", ["w1", "w2"])
    for kind, data in (("marian", ["w1 w2", "w3 w4"]), ("whisper", folder)):
        encoder = open_encoder(models[kind], PairOptions(targets="generate"))
        model = load(models[kind])
        pairs = list(with_targets(model, encoder, encoder.options.open(data, encoder.audio)))
        assert pairs and all(pair.target and pair.target_ids for pair in pairs)
        for pair in pairs:
            example = encoder.encode(pair)
            assert example.decoder.tolist() == [*encoder.prompt, *(pair.target_ids or ())]
            assert example.prompt == len(encoder.prompt)


def test_recordings_whose_targets_are_written_count_once(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = audio_folder(tmp_path / "audio", ["w1", "w2", "w3"])
    soundfile.write(folder / "mute.wav", np.zeros(RATE // 2, dtype=np.float32), RATE // 2)
    with (folder / "metadata.csv").open("a") as table:
        table.write("mute.wav,\n")
    encoder, model = open_encoder(models["whisper"], PairOptions(targets="generate")), load(models["whisper"])
    source = encoder.options.open(folder, encoder.audio)
    pairs = list(with_targets(model, encoder, source))
    assert len(pairs) == 4 and encoder.report() == []
    list(map(encoder.encode, pairs))
    assert (encoder.resampled, encoder.silent) == (1, 1)
    monkeypatch.setattr("mha2gqa.data.generation.decode", lambda encoder, ids: " ")
    assert list(with_targets(model, encoder, source)) == []
    assert "4 recordings left out, for which the model writes nothing" in encoder.report()


def test_recordings_are_found_by_a_glob(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "audio", ["w1", "w2", "w3"])
    pattern = str(folder / "*.wav")
    assert recordings(pattern) == sorted(folder.glob("*.wav"))
    assert len(list(PairSource(pattern, audio=True, targets=False))) == 3
    with pytest.raises(DataError, match=r"recordings without transcripts; add metadata\.csv"):
        list(PairSource(pattern, audio=True))
    assert recordings(str(folder / "*")) == []  # a table is among them
    with pytest.raises(DataError, match="no file matches"):
        PairSource(str(folder / "*.flac"), audio=True)


def test_folders_of_splits_are_not_mixed(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        (audio_folder(tmp_path / "a" / split, ["w1"] * count) / "metadata.csv").unlink()
    audio_folder(tmp_path / "b", ["w1"])
    (tmp_path / "b" / "a0.wav").rename(tmp_path / "b" / "microphone_test.wav")  # names of files are no splits
    (tmp_path / "b" / "metadata.csv").unlink()
    for hidden in ("b/._microphone_test.wav", "b/.cache/x.wav", "b/metadata.txt"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("not sound")

    def found(name: str) -> int:
        return len(list(PairSource(str(tmp_path / name), audio=True, targets=False)))

    assert (found("a::train"), found("a::test"), found("a::all"), found("b")) == (3, 2, 5, 1)
    with pytest.raises(
        UsageError, match=r"several splits, which are not mixed: test \(2\), train \(3\); choose one"
    ):
        found("a")
    with pytest.raises(DataError, match="no files of a split validation"):
        found("a::validation")
    with pytest.raises(DataError, match="no such file or folder"):  # is not looked for on the Hub
        found("b/none.wav")


def test_recordings_of_kinds_that_are_not_read_are_told(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "a", ["w1", "w2"])
    (folder / "metadata.csv").unlink()
    (folder / "b.M4A").write_bytes(b"x")
    source = PairSource(folder, audio=True, targets=False)
    assert len(list(source)) == 2
    assert source.warnings == [f"{folder}: not read: b.M4A; convert them to WAV or FLAC"]
    for name in ("a0.wav", "a1.wav"):
        (folder / name).unlink()
    with pytest.raises(
        DataError, match=r"no recordings in this folder, and no table of them \(\.M4A are not read\)"
    ):
        PairSource(folder, audio=True, targets=False)


def test_tables_beside_recordings(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "a", ["w1", "w2"])
    (folder / "speakers.csv").write_text("name,age\nx,1\n")
    source = PairSource(folder, audio=True)
    assert [pair.target for pair in source] == ["w1", "w2"]
    assert source.warnings == [
        f"{folder}: not read beside its metadata: speakers.csv; name a file to read it"
    ]
    (folder / "speakers.csv").unlink()
    (folder / "metadata.csv").rename(folder / "said.csv")
    with pytest.raises(
        DataError, match=r"recordings without transcripts; name \S*said.csv itself, with the columns"
    ):
        list(PairSource(folder, audio=True))
    assert [pair.target for pair in PairSource(folder / "said.csv", audio=True)] == ["w1", "w2"]


def test_an_empty_folder_is_told_in_words_of_recordings(tmp_path: Path) -> None:
    (tmp_path / "notes.md5").write_text("x")
    with pytest.raises(
        DataError, match=r"no recordings in this folder, .* known are \.wav, .* with metadata\.csv"
    ):
        PairSource(str(tmp_path), audio=True)
    with pytest.raises(DataError, match="no data file in this folder"):
        PairSource(str(tmp_path), audio=False)

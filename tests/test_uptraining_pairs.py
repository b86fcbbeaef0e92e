"""Encoder-decoders uptrained on pairs and recordings: Hugging Face's own loss and step, exact resume, budgets in targets."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from seq2seq_models import audio_folder, saved, saved_whisper
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from mha2gqa import convert, evaluate, train_model, uptrain
from mha2gqa.config import UptrainConfig
from mha2gqa.data import PairOptions
from mha2gqa.data.generation import generate_ids
from mha2gqa.data.seq2seq import open_encoder
from mha2gqa.errors import DataError, Mha2gqaError, UsageError
from mha2gqa.uptraining.budget import PairBudget, plan_pair_budget
from mha2gqa.uptraining.guard import SpikeGuard
from mha2gqa.uptraining.model_prep import set_dropout
from mha2gqa.uptraining.pair_corpus import PairCollator, SplitPairs
from mha2gqa.uptraining.pair_store import StoredPairs, write_pairs
from tests.conftest import pico_llama

TEXTS = [f"w{i} w{i + 7} w{(3 * i) % 50}" + " w5" * (i % 4) for i in range(12)]
ROWS = [{"source": f"w{59 - i} w{i} w2" + " w8" * (i % 5), "target": text} for i, text in enumerate(TEXTS)]
SGD = {
    "optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "max_grad_norm": 1e6, "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}  # fmt: skip
POSITIONS = {f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")}  # sinusoids
FIXED = {"marian": POSITIONS, "whisper": {"model.encoder.embed_positions.weight"}, "t5": set()}
QUIET = {"device": "cpu", "logging_steps": 1}
# Every model and every share of the cross entropy once; the other pairs of the two are slow.
TELLING = (("marian", 0.5), ("t5", None), ("whisper", 0.0))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pico models with their conversions, pairs and recordings."""
    root = tmp_path_factory.mktemp("pairs")
    saved(root / "marian", "marian", max_position_embeddings=64)
    saved(root / "t5", "t5", extra=[f"<extra_id_{i}>" for i in range(20)])
    saved_whisper(root / "whisper")
    for kind in ("marian", "t5", "whisper"):
        convert(root / kind, root / f"{kind}-g2", 2, method="mean")
    audio_folder(root / "audio", TEXTS[:8])
    audio_folder(root / "other", TEXTS[8:], pitch=170)
    for name, rows in (("pairs", ROWS), ("train", ROWS[:8]), ("eval", ROWS[8:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": row["source"]}) + "\n" for row in ROWS))
    return root


def data_of(root: Path, kind: str) -> tuple[str, str]:
    """Training and held-out pairs."""
    names = ("audio", "other") if kind == "whisper" else ("train.jsonl", "eval.jsonl")
    return str(root / names[0]), str(root / names[1])


def load(folder: Path) -> Any:
    hears = (folder / "preprocessor_config.json").exists()
    kind = AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder, trust_remote_code=True).float().eval()


def passes(folder: Path, model: Any, data: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and targets `[T, V]`, `[T]` of each pair alone, unpadded: the class's own forward."""
    encoder = open_encoder(folder, PairOptions())
    found = []
    for pair in encoder.options.open(data, encoder.audio):
        batch = encoder.collate([encoder.encode(pair)])
        kept = batch.labels[0] != -100
        found.append((model(**batch.rows()).logits[0][kept], batch.labels[0][kept]))
    return found


def loss_of(kind: str, results: Any, teachers: Any = None, weight: float = 1.0) -> torch.Tensor:
    """Cross-entropy, KL to the teacher's, or the mixture, by real target token."""
    total, count = torch.zeros(()), 0
    for i, (logits, labels) in enumerate(results):
        total = total + weight * F.cross_entropy(logits, labels, reduction="sum")
        if teachers is not None:
            other = teachers[i][0].detach().log_softmax(-1)
            total = total + (1 - weight) * F.kl_div(
                logits.log_softmax(-1), other, log_target=True, reduction="sum"
            )
        count += len(labels)
    return total / count


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        case if case in TELLING else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(("marian", "t5", "whisper"), (None, 0.0, 0.5))
    ],
)
def test_a_step_is_the_step_of_the_loss_written_by_hand(
    root: Path, tmp_path: Path, kind: str, weight: float | None
) -> None:
    folder, (train, held_out) = root / f"{kind}-g2", data_of(root, kind)
    model, teachers = load(folder), None
    if weight is not None:
        with torch.no_grad():
            teachers = passes(folder, load(root / kind), train)
    results = passes(folder, model, train)
    targets = sum(len(labels) for _, labels in results)
    loss = loss_of(kind, results, teachers, 1.0 if weight is None else weight)
    loss.backward()
    with torch.no_grad():
        before = loss_of(kind, passes(folder, model, held_out))
        wanted = {n: p - 0.1 * p.grad for n, p in model.named_parameters() if p.grad is not None}
        fixed = {n: p for n, p in model.named_parameters() if n in FIXED[kind]}
    result = uptrain(
        folder, tmp_path / "up", train, tokens=targets, batch_tokens=targets, eval_data=(held_out,),
        objective="pairs", per_device_train_batch_size=2,
        **({"teacher": "none"} if weight is None else {"ce_weight": weight}), **SGD, **QUIET,
    )  # fmt: skip
    assert result.budget["tokens"] == result.budget["unique_tokens"] == targets
    assert result.budget["steps"] == 1 and result.budget["pairs"]["per_step"] == 8
    assert result.losses["train"][0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.losses["held_out_start"] == pytest.approx(float(before), rel=1e-5)
    parameters = dict(load(tmp_path / "up").named_parameters())
    assert len(wanted) > 20 and fixed.keys() == FIXED[kind]
    for name, tensor in (wanted | fixed).items():
        torch.testing.assert_close(parameters[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    scored = evaluate([folder, tmp_path / "up"], held_out, protocol="pairs", device="cpu").models
    assert result.losses["held_out_start"] == pytest.approx(scored[0].loss, rel=1e-5)
    assert result.losses["held_out_end"] == pytest.approx(scored[1].loss, rel=1e-5)


@pytest.mark.parametrize(("kind", "distils"), [("marian", True), ("whisper", False), ("t5", True)])
def test_pairs_in_memory_train_as_pairs_from_files(
    root: Path, tmp_path: Path, kind: str, distils: bool
) -> None:
    """Oracle: one step over all pairs, whatever their order, gives what `uptrain` writes."""
    folder, (train, held_out) = root / f"{kind}-g2", data_of(root, kind)
    encoder = open_encoder(folder, PairOptions())
    seen, kept = (
        [encoder.encode(pair) for pair in encoder.options.open(data, encoder.audio)]
        for data in (train, held_out)
    )
    targets = sum(len(example.decoder) - example.prompt for example in seen)
    run = {"tokens": targets, "batch_tokens": targets, "per_device_train_batch_size": 4, **SGD, **QUIET}
    teacher = {"teacher": str(root / kind) if distils else "none"}
    files = uptrain(
        folder, tmp_path / "up", train, eval_data=(held_out,), objective="pairs", **teacher, **run
    )
    model = load(folder)
    result = train_model(
        model, seen, held_out=kept, encoder=encoder, teacher=load(root / kind) if distils else None, **run
    )
    assert result.budget == files.budget | {"window": result.budget["window"]}
    assert result.losses["train"][0]["loss"] == pytest.approx(files.losses["train"][0]["loss"], rel=1e-5)
    assert result.losses["held_out_end"] == pytest.approx(files.losses["held_out_end"], rel=1e-5)
    for (name, mine), theirs in zip(
        model.named_parameters(), load(tmp_path / "up").parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_padded_pairs_train_without_cudnns_attention(root: Path) -> None:
    """Behind a mask its backward pass gives NaN where the keys end 64 past a multiple of 128."""
    kernels, seen = torch.backends.cuda, []
    model, encoder = load(root / "marian-g2"), open_encoder(root / "marian-g2", PairOptions())
    examples = [encoder.encode(pair) for pair in encoder.options.open(data_of(root, "marian")[0], False)]
    model.model.register_forward_hook(lambda *_: seen.append(kernels.cudnn_sdp_enabled()))
    assert kernels.cudnn_sdp_enabled()
    train_model(model, examples, encoder=encoder, tokens=20, batch_tokens=20, teacher=None, **SGD, **QUIET)
    assert set(seen) == {False} and kernels.cudnn_sdp_enabled()


@pytest.mark.parametrize(("window", "kept"), [(128, True), (64, False)])
def test_blocks_keep_it_where_it_is_right(window: int, kept: bool) -> None:
    kernels, seen = torch.backends.cuda, []
    model = pico_llama(max_position_embeddings=256)
    model.model.register_forward_hook(lambda *_: seen.append(kernels.cudnn_sdp_enabled()))
    blocks = torch.randint(0, model.config.vocab_size, (4, window + 1), generator=torch.manual_seed(0))
    train_model(model, blocks, tokens=window, batch_tokens=window, teacher=None, **SGD, **QUIET)
    assert set(seen) == {kept} and kernels.cudnn_sdp_enabled()


def test_what_cannot_train_in_memory_on_pairs(root: Path) -> None:
    encoder = open_encoder(root / "marian", PairOptions())
    (pair, *_) = encoder.options.open(str(root / "pairs.jsonl"), False)
    example = encoder.encode(pair)
    model = load(root / "marian")
    run: dict[str, Any] = {"tokens": 50, "batch_tokens": 10, **QUIET}
    with pytest.raises(UsageError, match=r"blocks: must be examples of pairs, .*; encode them"):
        train_model(model, [pair], encoder=encoder, **run)  # type: ignore[list-item]
    with pytest.raises(DataError, match="there are no pairs"):
        train_model(model, [], encoder=encoder, **run)
    with pytest.raises(UsageError, match="collate: has no meaning with encoder"):
        train_model(model, [example], encoder=encoder, collate=PairCollator(encoder), **run)
    with pytest.raises(UsageError, match="encoder: pairs need an encoder-decoder"):
        train_model(pico_llama(), [example], encoder=encoder, **run)


class Killed(BaseException):
    """Stands for a process that is gone."""


@pytest.mark.parametrize("kind", ["marian", "whisper"])
def test_a_killed_run_goes_on_to_the_bit(
    root: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (train, held_out) = root / f"{kind}-g2", data_of(root, kind)
    run = {
        "tokens": 150, "batch_tokens": 18, "save_steps": 3, "eval_data": (held_out,), "dropout": 0.1, **QUIET,
    }  # fmt: skip
    straight = uptrain(folder, tmp_path / "a", train, **run)
    with monkeypatch.context() as patch:
        accept = SpikeGuard.accept
        patch.setattr(SpikeGuard, "accept", lambda self, at, *a: _kill() if at == 5 else accept(self, at, *a))
        with pytest.raises(Killed):
            uptrain(folder, tmp_path / "b", train, **run)
    if kind == "whisper":  # what was encoded is what goes on
        monkeypatch.setattr(SplitPairs, "train", lambda *_: pytest.fail("read again"))
    resumed = uptrain(folder, tmp_path / "b", train, **run)
    assert resumed.resumed_from == 3 and straight.budget["steps"] > 5
    assert resumed.losses["train"][-1]["loss"] == straight.losses["train"][-1]["loss"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    logged = [entry["tokens"] for entry in straight.losses["train"]]
    assert logged[-1] == straight.budget["tokens"] == pytest.approx(150, rel=0.15)
    assert uptrain(folder, tmp_path / "b", train, **run).finished_before


def _kill() -> None:
    raise Killed


def test_the_original_writes_the_targets(root: Path, tmp_path: Path) -> None:
    result = uptrain(
        root / "marian-g2", tmp_path / "up", str(root / "text.jsonl"), tokens=400, batch_tokens=100, holdout=0.0,
        targets="generate", beams=2, keep_checkpoints=True, **QUIET,
    )  # fmt: skip
    assert result.teacher is not None and result.output is not None
    folder = root / "marian"
    options = PairOptions(targets="generate", beams=2)
    encoder, model = open_encoder(folder, options), load(folder)
    pairs = list(options.open(str(root / "text.jsonl"), audio=False))
    written = generate_ids(model, encoder, [encoder.encode(pair) for pair in pairs])
    wanted = {tuple(ids) for ids in written}
    rows = StoredPairs(tmp_path / "up.uptrain" / "train-0", encoder)
    assert {tuple(row.decoder[row.prompt :].tolist()) for row in rows} <= wanted and len(rows) > 1
    assert result.budget["unique_tokens"] == int(rows.targets.sum())


def test_rows_that_lack_a_side_are_counted_once(root: Path, tmp_path: Path) -> None:
    rows = [*ROWS, *({"source": "w1", "target": ""} for _ in range(3))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: dict[str, Any] = {"tokens": 100, "batch_tokens": 40, "holdout": 0.3, **QUIET}
    result = uptrain(root / "marian-g2", tmp_path / "up", str(tmp_path / "a.jsonl"), **run)
    assert "3 rows without a source or a target were left out" in result.warnings


def test_recordings_without_a_table_are_enough(root: Path, tmp_path: Path) -> None:
    sounds = tmp_path / "sounds"
    shutil.copytree(root / "audio", sounds)
    (sounds / "metadata.csv").unlink()
    run: dict[str, Any] = {"tokens": 100, "batch_tokens": 40, "holdout": 0.0, "targets": "generate", **QUIET}
    folder = root / "whisper-g2"
    uptrain(folder, tmp_path / "up", str(sounds), keep_checkpoints=True, **run)
    stamped = json.loads((tmp_path / "up.uptrain" / "sources.json").read_text())
    assert {Path(name).name for name in stamped} == {path.name for path in sounds.iterdir()}


@pytest.mark.parametrize("train", ["attention", "lora"])
@pytest.mark.parametrize("kind", ["marian", "whisper"])
def test_attention_alone_and_adapters(root: Path, tmp_path: Path, kind: str, train: str) -> None:
    if train == "lora":
        pytest.importorskip("peft")
    folder, (data, held_out) = root / f"{kind}-g2", data_of(root, kind)
    result = uptrain(
        folder, tmp_path / "up", data, tokens=120, batch_tokens=30, train=train, eval_data=(held_out,),
        learning_rate=1e-2, **QUIET,
    )  # fmt: skip
    assert result.losses["train"][-1]["loss"] < result.losses["train"][0]["loss"]
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "up"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("attn" in name for name in moved)
    assert any("encoder_attn" in name for name in moved)
    if train == "lora":
        assert result.merge is not None and result.merge["exact"] < 1e-4
    load(tmp_path / "up")


def test_sources_have_shares_and_lengths_differ(root: Path, tmp_path: Path) -> None:
    long = [{"source": "w1 w2", "target": " ".join(["w3"] * 11)}] * 4
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    result = uptrain(
        root / "marian-g2", tmp_path / "up", [str(root / "pairs.jsonl"), str(tmp_path / "long.jsonl")],
        data_weights=(1, 3), tokens=1200, batch_tokens=50, holdout=0.0, teacher="none", learning_rate=1e-4, **QUIET,
    )  # fmt: skip
    # A quarter of the target tokens come from pairs of 5.4, the rest from pairs of 12.
    mean = result.budget["pairs"]["targets"]
    short = np.mean([len(row["target"].split()) + 1 for row in ROWS])
    assert mean == pytest.approx(1 / (0.25 / short + 0.75 / 12), rel=1e-6)
    assert result.budget["tokens"] == pytest.approx(1200, rel=0.05)
    assert any("long.jsonl has 48 target tokens: 18.75 passes over it" in w for w in result.warnings)


def test_budgets_count_target_tokens() -> None:
    lengths = PairBudget(1, 1500, 25.0, 20.0)

    def plan(**options: Any) -> Any:
        return plan_pair_budget(UptrainConfig("m", "o", ("d",), **options), lengths)

    assert plan(tokens=100_000).steps == round(100_000 / (16 * 20))
    assert plan(tokens=2_000_000).blocks_per_step == 64  # 1,562 steps; of 128 pairs they would be 781
    assert plan(tokens=10**9).blocks_per_step == 256
    alpha = plan(alpha=0.05, original_tokens=1_000_000, batch_tokens=1000)
    assert (alpha.steps, alpha.blocks_per_step, alpha.window) == (50, 50, 1525)
    assert (
        plan_pair_budget(UptrainConfig("m", "o", ("d",), tokens=9999), lengths, multiple=6).pairs.per_step
        == 18
    )
    with pytest.raises(UsageError, match="gives 90 target tokens, which round to 0 steps of 320"):
        plan(tokens=90)


def test_recordings_come_back_as_they_were(root: Path, tmp_path: Path) -> None:
    encoder = open_encoder(root / "whisper", PairOptions())
    pairs = list(encoder.options.open(str(root / "audio"), audio=True))
    assert write_pairs(tmp_path / "x", encoder, pairs) == 8
    rows = StoredPairs(tmp_path / "x", encoder)
    assert rows.targets.sum() == sum(len(text.split()) + 1 for text in TEXTS[:8])
    for row, pair in zip(rows, pairs, strict=True):
        example = encoder.encode(pair)
        assert np.array_equal(row.encoder, example.encoder) and np.array_equal(row.decoder, example.decoder)
        assert row.prompt == example.prompt
    assert write_pairs(tmp_path / "y", encoder, pairs, targets=10) < 8


def test_features_are_made_once_while_there_is_room(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = open_encoder(root / "whisper", PairOptions())
    write_pairs(tmp_path / "x", encoder, encoder.options.open(str(root / "audio"), audio=True))
    size, made = StoredPairs(tmp_path / "x", encoder)[0].encoder.nbytes, []
    features = encoder.features
    monkeypatch.setattr(
        encoder, "features", lambda samples, place: made.append(place) or features(samples, place)
    )
    monkeypatch.setattr("mha2gqa.data.audio.FEATURE_BYTES", 2 * size)
    rows = StoredPairs(tmp_path / "x", encoder)
    first, again = rows[[0, 1, 2]], rows[[0, 1, 2]]
    assert made == ["pair 0", "pair 1", "pair 2", "pair 2"]
    assert all(np.array_equal(a.encoder, b.encoder) for a, b in zip(first, again, strict=True))


def test_layers_are_not_left_out_at_random(root: Path) -> None:
    model = load(root / "marian")
    model.model.encoder.layerdrop = 0.3
    assert set_dropout(model, 0.0) == pytest.approx(0.3)
    assert model.model.encoder.layerdrop == 0


@pytest.mark.parametrize(
    ("kind", "data", "options", "message"),
    [
        ("marian", "text.jsonl", {}, "no column 'source' or 'target'; the columns are text"),
        ("whisper", "text.jsonl", {}, "no column 'audio' or 'text'|no column 'audio'; the columns are text"),
        ("marian", "pairs.jsonl", {"window": 64}, "window 64: has no meaning for objective pairs; pairs have lengths"),
        ("marian", "pairs.jsonl", {"streaming": True}, "streaming True: has no meaning for objective pairs"),
        ("marian", "pairs.jsonl", {"assistant_only_loss": False}, "assistant_only_loss False: has no meaning for objective pairs"),
        ("marian", "pairs.jsonl", {"text_column": "a"}, "name the columns with source_column and target_column"),
        ("marian", "pairs.jsonl", {"teacher_top_k": 8}, "teacher_top_k: not possible with pairs; leave it out"),
        (
            "marian", "pairs.jsonl", {"targets": "generate", "teacher": "none"},
            "targets generate: requires the original, which generates them; name it with teacher",
        ),
        ("marian", "pairs.jsonl", {"target_lang": "fr"}, "knows no languages"),
        ("marian", "pairs.jsonl", {"objective": "next-token"}, "use span-corruption or pairs"),
        ("marian", "pairs.jsonl", {"objective": "span-corruption"}, "no sentinels; train on pairs"),
        ("t5", "text.jsonl", {"retry_temperatures": (0.2, 0.4)}, "retry_temperatures 0.2,0.4: has no meaning for objective span-corruption"),
        ("t5", "text.jsonl", {"source_column": "b"}, "source_column b: has no meaning for objective span-corruption"),
        ("marian", "long.jsonl", {}, "the target needs 70 positions, the decoder has 64; split the example"),
        ("marian", "pairs.jsonl", {"tokens": 2}, "round to 0 steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(
    root: Path, tmp_path: Path, kind: str, data: str, options: dict[str, Any], message: str
) -> None:
    (root / "long.jsonl").write_text(json.dumps({"source": "w1", "target": "w1 " * 69}) + "\n")
    with pytest.raises(Mha2gqaError) as caught:
        uptrain(root / f"{kind}-g2", tmp_path / "up", str(root / data), **{"tokens": 200, **options, **QUIET})
    text = str(caught.value)
    assert "\n" not in text and any(part in text for part in message.split("|")), text
    assert caught.value.exit_code in (1, 2)
    assert not (tmp_path / "up").exists() and not (tmp_path / "up.uptrain").exists()


def test_all_pairs_held_out(root: Path, tmp_path: Path) -> None:
    data = str(root / "pairs.jsonl")
    with pytest.raises(DataError, match="all its pairs are held out"):
        uptrain(root / "marian-g2", tmp_path / "up", data, tokens=100, eval_data=(data,), **QUIET)
    assert not (tmp_path / "up.uptrain").exists()


def test_a_teacher_in_sixteen_bits_hears(root: Path, tmp_path: Path) -> None:
    """Features come in float32; the teacher of a run in bfloat16 holds bfloat16 weights and has no autocast."""
    result = uptrain(
        root / "whisper-g2", tmp_path / "out", data=[str(root / "audio")], tokens=64, batch_tokens=32,
        eval_data=[str(root / "other")], teacher=root / "whisper", training_args={"bf16": True}, **QUIET,
    )  # fmt: skip
    assert np.isfinite(result.losses["held_out_end"])

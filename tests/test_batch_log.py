"""Hours of sampling and of writing targets: interrupted, they go on after the last whole batch and end the same."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seq2seq_models import saved
from transformers import AutoModelForSeq2SeqLM

from mha2gqa import convert, uptrain
from mha2gqa.assets import tiny_model_path
from mha2gqa.calibration import sampling
from mha2gqa.calibration.sampling import generate_text
from mha2gqa.checkpoints.batch_log import MARK, BatchLog, remove_left
from mha2gqa.conversion import checkpoint, inputs, through_model
from mha2gqa.data import Pair, PairOptions
from mha2gqa.data import generation as writing
from mha2gqa.data.generation import kept_targets, targets_work, with_targets
from mha2gqa.data.seq2seq import PairEncoder, open_encoder
from mha2gqa.errors import CheckpointError, UsageError
from mha2gqa.uptraining import run

SOURCES = [f"w{i} w{i + 1}" for i in range(10)]
TEXT: dict[str, Any] = {"tokens": 200, "window": 16, "device": "cpu"}


def stopping(inner: Callable[..., Any], after: int) -> Callable[..., Any]:
    """`inner`, interrupted when it is called once more."""
    calls = 0

    def stopped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return inner(*args, **kwargs)

    return stopped


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("done again")


# --- the file ------------------------------------------------------------------------------------------


def test_batches_are_kept_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.batches"
    with BatchLog(path, {"seed": 0}) as log:
        log.append({"n": 1})
        log.append({"n": "é"})
    kept = path.read_bytes()
    for torn in (b'{"n": 3}', b'{"n": 3', b"\x00\x00\n", b'{"n": \n{"n": 4}\n'):
        path.write_bytes(kept + torn)
        with BatchLog(path, {"seed": 0}) as log:
            assert [batch["n"] for batch in log] == [1, "é"]
            assert path.read_bytes() == kept
            log.append({"n": 3})
            assert [batch["n"] for batch in log] == [1, "é", 3]
    for other in (kept[:5], kept[: kept.index(b"\n")], b"", kept):
        path.write_bytes(other)
        with BatchLog(path, {"seed": 1}) as log:
            assert len(log) == 0
            log.append(1)


def test_a_file_without_batches_does_not_stay(tmp_path: Path) -> None:
    BatchLog(tmp_path / "a", {}).close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_or_in_use_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("notes\n")
    with pytest.raises(UsageError, match="is in the way and was not made here; move it away"):
        BatchLog(mine, {})
    remove_left(mine)
    assert mine.read_text() == "notes\n"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        BatchLog(tmp_path / "file" / "a", {})
    with BatchLog(tmp_path / "a", {}) as log:
        log.append(1)
    with (tmp_path / "a").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="in use by another process; wait for it"):
            BatchLog(tmp_path / "a", {})
        remove_left(tmp_path / "a")
        assert (tmp_path / "a").exists()
    remove_left(tmp_path / "a")
    remove_left(tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- text ----------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, bytes]:
    """Text of two seeds that nothing disturbs, in batches of 4 documents."""
    monkeypatch.setattr(sampling, "CPU_ROWS", 4)
    found = {}
    for seed in (0, 1):
        out = tmp_path / f"{seed}" / "whole.jsonl"
        generate_text(tiny_model_path(), out, seed=seed, **TEXT)
        found[seed] = out.read_bytes()
    return found


def interrupted(out: Path, after: int, patch: pytest.MonkeyPatch, **words: Any) -> Path:
    """The file of batches that sampling leaves which is interrupted after so many."""
    with patch.context() as broken:
        broken.setattr(sampling, "_sample", stopping(sampling._sample, after))
        with pytest.raises(KeyboardInterrupt):
            generate_text(tiny_model_path(), out, **TEXT | words)
    assert not out.exists()
    return out.with_name(f"{out.name}.batches")


def test_sampling_goes_on_and_gives_the_same_text(
    tmp_path: Path, whole: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "text.jsonl"
    kept = interrupted(out, 2, monkeypatch)
    assert len(kept.read_bytes().splitlines()) == 3
    with kept.open("ab") as file:
        file.write(b'{"tokens": 60, "te')
    interrupted(out, 1, monkeypatch)
    assert len(kept.read_bytes().splitlines()) == 4
    monkeypatch.setattr(sampling, "CPU_ROWS", 7)  # as where there is more memory now
    facts = generate_text(tiny_model_path(), out, **TEXT)
    assert out.read_bytes() == whole[0]
    record = tmp_path / "0" / "whole.jsonl.json"
    assert json.loads(record.read_text()) == facts
    assert (tmp_path / "out" / "text.jsonl.json").read_bytes() == record.read_bytes()
    assert sorted(path.name for path in out.parent.iterdir()) == ["text.jsonl", "text.jsonl.json"]


def test_text_of_another_seed_or_size_begins_afresh(
    tmp_path: Path, whole: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "text.jsonl"
    interrupted(out, 2, monkeypatch, tokens=300)
    interrupted(out, 2, monkeypatch)
    generate_text(tiny_model_path(), out, seed=1, **TEXT)
    assert out.read_bytes() == whole[1]


def test_text_that_is_sampled_is_only_published(
    tmp_path: Path, whole: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "text.jsonl"
    kept = out.with_name("text.jsonl.batches")
    with monkeypatch.context() as broken:
        broken.setattr(sampling, "replacing", stopping(sampling.replacing, 1))  # before the record
        with pytest.raises(KeyboardInterrupt):
            generate_text(tiny_model_path(), out, **TEXT)
    assert [path.name for path in out.parent.iterdir()] == [kept.name]
    left = kept.read_bytes()
    monkeypatch.setattr(sampling, "load_model", never)
    facts = generate_text(tiny_model_path(), out, **TEXT)
    assert out.read_bytes() == whole[0] and not kept.exists()
    kept.write_bytes(left)  # killed before it was removed
    assert generate_text(tiny_model_path(), out, **TEXT) == facts
    assert not kept.exists()


# --- targets -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "marian"
    saved(folder, "marian")
    (folder.parent / "text.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in SOURCES * 2))
    return folder


def pairs(*sources: str) -> list[Pair]:
    return [Pair(source, None, f"{number}") for number, source in enumerate(sources)]


def written(
    encoder: PairEncoder, load: Callable[[], Any], path: Path, given: list[Pair]
) -> list[tuple[str | None, tuple[int, ...] | None]]:
    with BatchLog(path, targets_work(encoder, "model")) as log:
        found = list(kept_targets(load, encoder, given, log, batch_size=3))
    return [(pair.target, pair.target_ids) for pair in found]


def test_targets_go_on_and_other_sources_are_written_anew(
    marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(marian).eval()
    encoder = open_encoder(marian, PairOptions(targets="generate"))
    given = pairs(*SOURCES)
    right = [(p.target, p.target_ids) for p in with_targets(model, encoder, given, batch_size=3)]
    path = tmp_path / "targets"
    with monkeypatch.context() as broken:
        broken.setattr(writing, "generate_ids", stopping(writing.generate_ids, 2))
        with pytest.raises(KeyboardInterrupt):
            written(encoder, lambda: model, path, given)
    assert len(path.read_bytes().splitlines()) == 3
    path.write_bytes(path.read_bytes() + b'{"sour')
    with monkeypatch.context() as rest:
        rest.setattr(writing, "generate_ids", stopping(writing.generate_ids, 2))
        assert written(encoder, lambda: model, path, given) == right
    assert written(encoder, never, path, given) == right
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as broken:
        broken.setattr(writing, "generate_ids", stopping(writing.generate_ids, 0))
        written(encoder, lambda: model, path, pairs("w9", *SOURCES[1:]))
    wider = open_encoder(marian, PairOptions(targets="generate", beams=2))
    with BatchLog(path, targets_work(wider, "model")) as log:
        assert len(log) == 0


CONVERTED: dict[str, Any] = {
    "targets": "generate",
    "calibration_tokens": 200,
    "fit": {"steps": 1, "batch_size": 2},
    "device": "cpu",
}


def test_a_conversion_that_goes_on_has_its_targets(
    marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = CONVERTED | {"calibration": str(marian.parent / "text.jsonl")}
    convert(marian, tmp_path / "right", 2, **words)
    out = tmp_path / "out"
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(through_model, "_through", stopping(through_model._through, 0))
        convert(marian, out, 2, **words)
    kept = tmp_path / "out.targets.batches"
    assert kept.read_bytes().startswith(MARK)
    monkeypatch.setattr(inputs, "load_model", never)
    convert(marian, out, 2, **words)
    name = "model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "right" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "right"]


def test_targets_of_a_conversion_killed_when_it_was_published_go(
    marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = CONVERTED | {"calibration": str(marian.parent / "text.jsonl")}
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(checkpoint, "remove_left", stopping(remove_left, 0))
        convert(marian, tmp_path / "out", 2, **words)
    assert (tmp_path / "out.targets.batches").exists() and (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="is not empty"):
        convert(marian, tmp_path / "out", 2, **words)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_uptraining_that_goes_on_has_its_targets(
    marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gqa, data = tmp_path / "gqa", str(marian.parent / "text.jsonl")
    convert(marian, gqa, 2)
    words: dict[str, Any] = {"tokens": 100, "batch_tokens": 40, "targets": "generate", "device": "cpu"}
    uptrain(gqa, tmp_path / "right", data, holdout=0.3, **words)
    out = tmp_path / "up"
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(run, "_load_student", stopping(run._load_student, 0))
        uptrain(gqa, out, data, holdout=0.3, **words)
    assert (tmp_path / "up.targets.batches").exists() and not (tmp_path / "up.uptrain").exists()
    monkeypatch.setattr(writing, "generate_ids", never)
    uptrain(gqa, out, data, holdout=0.3, **words)
    name = "model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "right" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gqa", "right", "up"]

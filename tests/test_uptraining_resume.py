"""Killed at any step, the same command gives the same losses and the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import TINY, family, write_text

from mha2gqa.checkpoints.fingerprints import file_fingerprint
from mha2gqa.errors import CheckpointError, UsageError
from mha2gqa.uptraining import trainer as trainer_module
from mha2gqa.uptraining import uptrain
from mha2gqa.uptraining.guard import SpikeGuard
from mha2gqa.uptraining.interruption import Interrupted, stop_signals
from mha2gqa.uptraining.run_dir import RunDirectory

STEPS = 10
RUN = {"tokens": 64 * STEPS, "save_steps": 3, "learning_rate": 3e-3, "eval_steps": 4, **TINY}


class Killed(BaseException):
    """Stands for a process that is gone: nothing of ours may catch it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    _, student, text = family(tmp_path_factory.mktemp("family"), attention_dropout=0.1)
    return student, text


@pytest.fixture(scope="module")
def straight(models, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, list]]:
    """The uninterrupted runs, in memory and streaming: weights and losses."""
    student, text = models
    found = {}
    for streaming in (False, True):
        out = tmp_path_factory.mktemp("straight") / "up"
        result = uptrain(student, out, text, streaming=streaming, **RUN)
        found[streaming] = (out, losses(result))
    return found


def losses(result) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in result.losses["train"]]


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    accept = SpikeGuard.accept

    def killing(self, at, *args):
        if at == step:
            raise Killed
        return accept(self, at, *args)

    patch.setattr(SpikeGuard, "accept", killing)


def equal(a: Path, b: Path) -> bool:
    x, y = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


# Before anything is saved, right before and after a save, and at the end; even steps stream their text.
TELLING = (1, 3, 4, 6, STEPS)


@pytest.mark.parametrize(
    "step",
    [at if at in TELLING else pytest.param(at, marks=pytest.mark.slow) for at in range(1, STEPS + 1)],
)
def test_killed_at_any_step(models, straight, tmp_path, step):
    student, text = models
    streaming = step % 2 == 0
    out, options = tmp_path / "up", RUN | {"streaming": streaming}
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            uptrain(student, out, text, **options)
    assert not out.exists()
    result = uptrain(student, out, text, **options)
    assert result.resumed_from == ((step - 1) // 3 * 3 or None)
    reference, wanted = straight[streaming]
    assert losses(result) == wanted
    assert equal(out, reference)


def test_log_entries_over_several_steps_survive(models, tmp_path):
    """Killed between two log entries: the next one still is the mean since the last."""
    student, text = models
    options = RUN | {"logging_steps": 4, "save_steps": 3}
    wanted = uptrain(student, tmp_path / "straight", text, **options).losses["train"]
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 8)
        with pytest.raises(Killed):
            uptrain(student, tmp_path / "up", text, **options)
    found = uptrain(student, tmp_path / "up", text, **options).losses["train"]
    for a, b in zip(found, wanted, strict=True):
        assert (a["step"], a["tokens"]) == (b["step"], b["tokens"])
        assert (a["loss"], a["ce_loss"]) == pytest.approx((b["loss"], b["ce_loss"]), abs=1e-5)


def test_killed_twice_with_other_bookkeeping(models, straight, tmp_path):
    """Micro-batch and saving may change between the pieces of a run; the data position does not."""
    student, text = models
    for step, more in ((5, {"per_device_train_batch_size": 2}), (8, {"save_steps": 2})):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                uptrain(student, tmp_path / "up", text, **{**RUN, **more})
    result = uptrain(student, tmp_path / "up", text, **RUN)
    wanted = straight[False][1]
    assert [step for step, _ in losses(result)] == [step for step, _ in wanted]
    # another micro-batch draws other dropout masks: equal in expectation only
    assert losses(result)[-1][1] == pytest.approx(wanted[-1][1], abs=0.3)


def test_killed_while_saving(models, straight, tmp_path, monkeypatch):
    student, text = models
    out, mark_complete = tmp_path / "up", trainer_module.mark_complete

    def killing(folder):
        if folder.name == "checkpoint-6":
            raise Killed
        mark_complete(folder)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "mark_complete", killing)
        with pytest.raises(Killed):
            uptrain(student, out, text, **RUN)
    result = uptrain(student, out, text, **RUN)
    assert result.resumed_from == 3
    assert losses(result) == straight[False][1] and equal(out, straight[False][0])


def test_disk_full_while_saving_loses_nothing_earlier(models, straight, tmp_path, monkeypatch):
    student, text = models
    out = tmp_path / "up"
    save = torch.save

    def full(thing, path, *args, **kwargs):
        if "checkpoint-6" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return save(thing, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are kept"):
            uptrain(student, out, text, **RUN)
    assert RunDirectory(out).last().name == "checkpoint-3"
    result = uptrain(student, out, text, **RUN)
    assert result.resumed_from == 3 and equal(out, straight[False][0])


@pytest.mark.parametrize("first_refused", ["model.safetensors", "optimizer.pt"])
def test_a_real_file_system_that_takes_no_more(models, straight, tmp_path, monkeypatch, first_refused):
    """Neither safetensors nor torch.save then raises an OSError: real writes, stopped by a limit of the process."""
    student, text = models
    out, mark_complete = tmp_path / "up", trainer_module.mark_complete
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limiting(folder):
        mark_complete(folder)
        size = (folder / first_refused).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(trainer_module, "mark_complete", limiting)
            with pytest.raises(CheckpointError, match=r"checkpoint-6: cannot be saved .*free disk space"):
                uptrain(student, out, text, **RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [p.name for p in RunDirectory(out).root.glob("checkpoint-*")] == ["checkpoint-3"]
    result = uptrain(student, out, text, **RUN)
    assert result.resumed_from == 3 and equal(out, straight[False][0])


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_stop(models, straight, tmp_path, number):
    """SIGTERM, or a terminal that closes: the step is finished, saved, and the error says how to go on (exit 130)."""
    student, text = models
    accept = SpikeGuard.accept

    def stopping(self, at, *args):
        if at == 4:
            os.kill(os.getpid(), number)
        return accept(self, at, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpikeGuard, "accept", stopping)
        with pytest.raises(Interrupted, match=r"stopped at step 5 of 10.*same command") as raised:
            uptrain(student, tmp_path / "up", text, **RUN)
    assert raised.value.exit_code == 130
    assert signal.getsignal(number) == signal.SIG_DFL
    result = uptrain(student, tmp_path / "up", text, **RUN)
    assert result.resumed_from == 5
    assert losses(result) == straight[False][1] and equal(tmp_path / "up", straight[False][0])


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow  # `make kills` does so before many events of the file system
def test_kill_minus_nine(models, straight, tmp_path):
    """A real SIGKILL of a real process."""
    student, text = models
    out = tmp_path / "up"
    code = (
        "import sys, json, time; from mha2gqa.uptraining import uptrain, guard\n"
        "accept = guard.SpikeGuard.accept\n"
        "def slow(self, at, *args):\n"
        "    time.sleep(60 if at == 8 else 0)\n"
        "    return accept(self, at, *args)\n"
        "guard.SpikeGuard.accept = slow\n"
        f"uptrain({str(student)!r}, {str(out)!r}, {str(text)!r}, **json.loads(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(RUN)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (RunDirectory(out).root / "checkpoint-6" / "complete.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    result = uptrain(student, out, text, **RUN)
    assert result.resumed_from == 6
    assert losses(result) == straight[False][1] and equal(out, straight[False][0])


# --- another run's folder ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output whose run was killed at step 5."""
    student, text = models
    out = tmp_path_factory.mktemp("killed") / "up"
    interrupted(student, out, text, 5)
    return out


@pytest.fixture
def begun(killed, tmp_path) -> Path:
    """A copy of that output, with the folder of its run."""
    out = tmp_path / "up"
    shutil.copytree(RunDirectory(killed).root, RunDirectory(out).root)
    return out


def test_changed_recipe_is_named(models, begun):
    student, text = models
    with pytest.raises(UsageError, match=r"learning_rate: 0.003 -> 0.001; seed: 0 -> 7"):
        uptrain(student, begun, text, **{**RUN, "learning_rate": 1e-3, "seed": 7})
    with pytest.raises(UsageError, match=r"adam_beta2: None -> 0.99"):
        uptrain(student, begun, text, adam_beta2=0.99, **RUN)


def test_another_model_is_another_run(models, begun, tmp_path):
    _, other, _ = family(tmp_path / "other", groups=4)
    with pytest.raises(UsageError, match="model contents"):
        uptrain(other, begun, models[1], **RUN)


DAMAGE = {"cut": lambda text: text[: len(text) // 2], "not JSON": lambda text: b"\0" * len(text)}
DAMAGE |= {"a list": lambda text: b"[1]", "another object": lambda text: b'{"a": 1}'}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(  # each file, and what to do
    ("name", "fix"),
    [
        ("run.json", "delete {root} to start over"),
        ("sources.json", "delete it"),
        ("train-0.npy", "delete it: the text is cut again"),
        (
            "checkpoint-3/complete.json",
            "delete {root}/checkpoint-3: the run goes on from the checkpoint before",
        ),
        ("checkpoint-3/mha2gqa_state.json", "delete {root}/checkpoint-3: the run goes on from"),
        ("checkpoint-3/trainer_state.json", "delete {root}/checkpoint-3: the run goes on from"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(models, begun, name, fix, damage):
    student, text = models
    root = RunDirectory(begun).root
    path = root / name
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    if path.parent != root and path.name != "complete.json":  # of the right size, as a bad disk has it
        sizes = json.loads((path.parent / "complete.json").read_text())
        (path.parent / "complete.json").write_text(json.dumps(sizes | {path.name: path.stat().st_size}))
    if (name, damage) == ("run.json", "another object"):
        with pytest.raises(UsageError, match="another recipe"):
            uptrain(student, begun, text, **RUN)
        return
    if (name, damage) == ("checkpoint-3/complete.json", "another object"):  # it lists what is not there
        assert uptrain(student, begun, text, **RUN).resumed_from is None
        return
    if (name, damage) == ("sources.json", "another object"):
        assert "since this run began" in " ".join(uptrain(student, begun, text, **RUN).warnings)
        return
    with pytest.raises(CheckpointError) as caught:
        uptrain(student, begun, text, **RUN)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and fix.format(root=root) in message and "\n" not in message
    assert not begun.exists() and (root / "checkpoint-3").exists()


def test_after_a_damaged_checkpoint_is_deleted_the_run_goes_on(models, begun, straight):
    student, text = models
    shutil.rmtree(RunDirectory(begun).root / "checkpoint-3")
    (RunDirectory(begun).root / "train-0.npy").unlink()
    result = uptrain(student, begun, text, **RUN)
    assert result.resumed_from is None
    assert losses(result) == straight[False][1] and equal(begun, straight[False][0])


def test_force_starts_over(models, begun, straight):
    student, text = models
    changed = {**RUN, "learning_rate": 1e-3}
    result = uptrain(student, begun, text, force=True, **changed)
    assert result.resumed_from is None
    assert not equal(begun, straight[False][0])


def test_output_of_another_run_is_not_touched(models, straight, tmp_path):
    student, _ = models
    reference = straight[False][0]
    before = (reference / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="not empty"):
        uptrain(student, reference, write_text(tmp_path / "other.jsonl", seed=5), **RUN)
    assert (reference / "model.safetensors").read_bytes() == before


def test_zero_shards_are_not_dealt_out_anew(tmp_path):
    from mha2gqa.uptraining.distributed_training import check_zero_shards

    folder = tmp_path / "checkpoint-4"
    check_zero_shards(folder, 0)
    with pytest.raises(CheckpointError, match=r"state of 0 processes .* has 2; continue without deepspeed"):
        check_zero_shards(folder, 2)
    (folder / "global_step4").mkdir(parents=True)
    for rank in range(2):
        (folder / "global_step4" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    check_zero_shards(folder, 2)
    for processes in (0, 1):
        with pytest.raises(CheckpointError, match=r"state of 2 processes .*; continue on 2 with the same"):
            check_zero_shards(folder, processes)


def interrupted(student: Path, out: Path, text: Path, step: int, **more) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            uptrain(student, out, text, **{**RUN, **more})


def test_a_streamed_file_that_changed_is_refused_by_name(models, tmp_path):
    """Reading on at the saved place would skip or repeat text without a word."""
    student, folder = models[0], tmp_path / "texts"
    folder.mkdir()
    one, two = write_text(folder / "a.jsonl", 60, 0), write_text(folder / "b.jsonl", 60, 1)
    wanted = uptrain(student, tmp_path / "straight", folder, streaming=True, **RUN)
    interrupted(student, tmp_path / "up", folder, 5, streaming=True)
    kept = two.read_bytes()
    two.write_bytes(kept.replace(b"w1 w2", b"w2 w1"))  # of the same size
    with pytest.raises(UsageError, match=rf"^{two}: has changed since .*checkpoint-3 was saved, .*delete"):
        uptrain(student, tmp_path / "up", folder, streaming=True, **RUN)
    two.unlink()
    write_text(folder / "c.jsonl", 60, 1)
    with pytest.raises(UsageError, match=rf"^{two}: is gone since .* \(and 1 other files\)"):
        uptrain(student, tmp_path / "up", folder, streaming=True, **RUN)
    (folder / "c.jsonl").unlink()
    two.write_bytes(kept)
    os.utime(one)  # a copy with other times is the same text
    found = uptrain(student, tmp_path / "up", folder, streaming=True, **RUN)
    assert found.resumed_from == 3 and losses(found) == losses(wanted)
    assert equal(tmp_path / "up", tmp_path / "straight")


def test_text_that_changed_after_it_was_cut(models, tmp_path):
    """With a checkpoint the run goes on with what it cut, and says so; without one it cuts anew."""
    student, text = models[0], write_text(tmp_path / "text.jsonl")
    wanted = uptrain(student, tmp_path / "straight", text, **RUN)
    interrupted(student, tmp_path / "late", text, 5)
    interrupted(student, tmp_path / "early", text, 2)
    write_text(text, seed=5)
    late = uptrain(student, tmp_path / "late", text, **RUN)
    assert losses(late) == losses(wanted) and equal(tmp_path / "late", tmp_path / "straight")
    assert f"{text} has changed since this run began: it goes on" in " ".join(late.warnings)
    early = uptrain(student, tmp_path / "early", text, **RUN)
    assert losses(early) == losses(uptrain(student, tmp_path / "new", text, **RUN)) != losses(wanted)
    assert early.losses["held_out"] == uptrain(student, tmp_path / "new", text, **RUN).losses["held_out"]


def test_large_files_are_sampled_throughout(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(5 << 20))
    before = file_fingerprint(file)
    for place in (0, (1 << 20) + 10, 5 * (1 << 20) - 1):
        with file.open("r+b") as handle:
            handle.seek(place)
            handle.write(b"x")
        assert file_fingerprint(file) != before
        before = file_fingerprint(file)


def test_another_teacher_on_resuming_is_a_changed_recipe(tmp_path):
    """Also where the command is the same, and where only its attention differs; it may lie elsewhere."""
    original, student, text = family(tmp_path)
    options = RUN | {"ce_weight": 0.5}
    wanted = uptrain(student, tmp_path / "straight", text, **options)
    interrupted(student, tmp_path / "up", text, 5, ce_weight=0.5)
    kept = tmp_path / "kept"
    original.rename(kept)
    with pytest.raises(UsageError, match=r"is not here; give teacher=PATH"):
        uptrain(student, tmp_path / "up", text, **options)
    with pytest.raises(UsageError, match="requires a teacher"):
        uptrain(student, tmp_path / "up", text, teacher="none", **options)
    with pytest.raises(UsageError, match=r"teacher: '[0-9a-f]{16}' -> None"):
        uptrain(student, tmp_path / "up", text, teacher="none", **{**options, "ce_weight": 1.0})
    shutil.copytree(kept, original)
    weights = load_file(original / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] *= 1.5
    save_file(weights, original / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"\(teacher: '[0-9a-f]{16}' -> '[0-9a-f]{16}'\)"):
        uptrain(student, tmp_path / "up", text, **options)
    shutil.rmtree(original)
    found = uptrain(student, tmp_path / "up", text, teacher=str(kept), **options)
    assert found.resumed_from == 3 and losses(found) == losses(wanted)
    assert equal(tmp_path / "up", tmp_path / "straight")
    assert uptrain(student, tmp_path / "up", text, **options).finished_before  # without its teacher
    with pytest.raises(UsageError, match="is not empty"):
        uptrain(student, tmp_path / "up", text, teacher="none", **{**options, "ce_weight": 1.0})

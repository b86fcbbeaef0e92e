"""Two processes (gloo): DDP, FSDP2 (of compiled layers, and with its state on the host) and ZeRO-3 give the curve, the resumed run and the checkpoint of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import OF_MODE, RUN, in_memory
from launching import launch
from safetensors.torch import load_file
from training import family

from mha2gqa.distributed import lost_processes
from mha2gqa.errors import TrainingError
from mha2gqa.uptraining import uptrain

MODES = ("ddp", "fsdp", "offload")
WORKER = str(Path(__file__).with_name("distributed_worker.py"))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of what one pair of processes finds, see `distributed_worker`."""
    root = tmp_path_factory.mktemp("two")
    for mode in MODES:
        family(root / mode)
    launch([WORKER, *(str(root / mode) for mode in MODES)], root)
    return root


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds: the curve in memory, and losses and weights from a checkpoint."""
    folder = tmp_path_factory.mktemp("one")
    _, student, text = family(folder)
    found: dict[str, Any] = {"in memory": in_memory()}
    for mode in MODES:
        result = uptrain(student, folder / mode, text, **OF_MODE.get(mode, {}), **RUN)
        found[mode] = [e["loss"] for e in result.losses["train"]], folder / mode
    return found


@pytest.mark.parametrize("mode", [*MODES, "zero3"])
def test_two_processes_equal_one(one_process, two_processes, mode, tmp_path):
    losses, reference = one_process["fsdp" if mode == "zero3" else mode]
    folder = two_processes / mode
    if mode == "zero3":
        pytest.importorskip("deepspeed")
        folder = tmp_path / mode
        family(folder)
        launch([WORKER, str(folder)], folder)
    found = json.loads((folder / "found.json").read_text())
    assert found["in memory"] == pytest.approx(one_process["in memory"], abs=1e-5)
    assert found["checkpoint"]["resumed"] == 4
    assert found["checkpoint"]["losses"] == pytest.approx(losses, abs=1e-5)
    ours, theirs = (
        load_file(folder / "up" / "model.safetensors"),
        load_file(reference / "model.safetensors"),
    )
    assert {n: x.shape for n, x in ours.items()} == {n: x.shape for n, x in theirs.items()}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=name)
    assert not list(folder.glob("up.partial*"))
    if mode == "ddp":  # a spike that one process meets is skipped by both, a NaN stops both
        first, second = ((folder / f"guard-{rank}.json").read_text() for rank in range(2))
        skipped, stopped = json.loads(first)
        assert first == second and skipped == [4]
        assert stopped.startswith("uptrain: loss nan, gradient norm nan at step 4; lower learning_rate")


@pytest.mark.slow  # test_cli.py asks each process alone which speaks
def test_torchrun_prints_a_refusal_once(tmp_path):
    _, student, _ = family(tmp_path)
    words = ["uptrain", student, tmp_path / "up", "--data", tmp_path / "nowhere.jsonl", "--tokens", "640"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "mha2gqa", *words]
    done = subprocess.run(
        [
            sys.executable,
            *map(str, command),
            "--device",
            "cpu",
            "--window",
            "16",
            "--batch-tokens",
            "64",
            "--json",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = f"{tmp_path / 'nowhere.jsonl'}: no such file or folder"
    assert [line for line in done.stderr.splitlines() if "nowhere" in line] == [f"error: {said}"]
    assert json.loads(done.stdout)["error"] == {"message": said, "exit_code": 1}
    assert done.returncode == 1 and not (tmp_path / "up.uptrain").exists()


UPTRAIN = ("uptrain", "the last checkpoint", TrainingError)


def test_a_lost_process_is_said_in_plain_words(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"^Connection reset by peer$"),
        lost_processes(*UPTRAIN),
    ):  # nothing distributed
        raise RuntimeError("Connection reset by peer")
    place = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        with (
            pytest.raises(
                TrainingError, match=r"another process of the run has ended .* same command resumes"
            ),
            lost_processes(*UPTRAIN),
        ):
            raise RuntimeError("[pair.cc:537] Read error: Connection reset by peer. GLHF!")
        with pytest.raises(RuntimeError, match="mat1"), lost_processes(*UPTRAIN):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    finally:
        torch.distributed.destroy_process_group()

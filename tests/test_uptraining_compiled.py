"""`torch_compile` compiles the decoder layers: one program for all of them, plain names, the numbers of eager layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import Killed, killed_at
from safetensors.torch import load_file
from training import TINY, family

from mha2gqa.uptraining import uptrain
from mha2gqa.uptraining.guard import SpikeGuard

RUN: dict[str, Any] = {"tokens": 64 * 6, "save_steps": 2, "learning_rate": 3e-3, **TINY}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of every graph that a compiler was given; it runs them as they are."""
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return found


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("train", ["all", "attention", "lora"])
def test_compiled_layers_publish_what_eager_ones_do(tmp_path, graphs, train):
    """However many layers: one program each of the teacher's and the student's, one of its first layer, one of the loss."""
    teacher, student, text = family(tmp_path, num_hidden_layers=4)
    more = {"teacher": teacher, "train": train}
    eager = uptrain(student, tmp_path / "eager", text, **RUN, **more, torch_compile=False)
    assert not graphs
    compiled = uptrain(student, tmp_path / "compiled", text, **RUN, **more, torch_compile=True)
    assert 2 <= len(graphs) <= 4
    one, other = (weights(tmp_path / name) for name in ("eager", "compiled"))
    assert list(one) == list(other) == list(weights(student))
    for name, x in one.items():
        torch.testing.assert_close(other[name], x, rtol=1e-4, atol=1e-6, msg=name)
    for a, b in zip(eager.losses["train"], compiled.losses["train"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_a_compiled_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path, graphs):
    teacher, student, text = family(tmp_path)
    more = {"teacher": teacher, "torch_compile": True}
    uptrain(student, tmp_path / "straight", text, **RUN, **more)
    accept, SpikeGuard.accept = killed_at(5)
    try:
        with pytest.raises(Killed):
            uptrain(student, tmp_path / "up", text, **RUN, **more)
    finally:
        SpikeGuard.accept = accept
    assert uptrain(student, tmp_path / "up", text, **RUN, **more).resumed_from == 4
    one, other = (weights(tmp_path / name) for name in ("straight", "up"))
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert graphs

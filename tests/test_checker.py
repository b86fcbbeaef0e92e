"""Checks made by another process: the same verdicts, whatever becomes of that process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import pico_llama

from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError
from mha2gqa.verification import background
from mha2gqa.verification.background import Checker


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and its conversion."""
    root = tmp_path_factory.mktemp("checker")
    pico_llama().save_pretrained(root / "pico")
    convert(root / "pico", root / "out", 2)
    return root / "pico", root / "out"


def question(folders: tuple[Path, Path]) -> list[dict[str, Any]]:
    """Configs of result and source, and the tensors of the result."""
    from mha2gqa.checkpoints.reader import open_checkpoint

    source, out = ({**json.loads((folder / "config.json").read_text())} for folder in folders)
    tensors = open_checkpoint(folders[1]).tensors
    return [out, source, {name: (info.dtype, info.shape) for name, info in tensors.items()}]


def names(folder: Path) -> list[str]:
    from mha2gqa.checkpoints.reader import open_checkpoint

    return list(open_checkpoint(folder).tensors)


def process(code: str = "") -> subprocess.Popen[str]:
    """The checking process, or another that runs `code` in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "_SERVE", code or background._SERVE)
        started = background._start()
    assert started is not None
    return started


def test_both_ways_find_the_same(folders: tuple[Path, Path]) -> None:
    with Checker() as here, Checker() as there:
        assert here._process is None  # transformers is loaded
        there._process = process()
        for each in (here, there):
            each.expect(*question(folders))
        found = [each.check(folders[1], names(folders[1])) for each in (here, there)]
    assert found[0] == found[1]
    assert [check.ok for check in found[0]] == [True] * 5


def test_the_other_process_sees_what_is_wrong(folders: tuple[Path, Path]) -> None:
    with Checker() as there:
        there._process = process()
        there.expect(*question(folders))
        checks = there.check(folders[1], [*names(folders[1]), "model.lost.weight"])
    assert [check.name for check in checks if check.ok is False] == ["tensor names"]


@pytest.mark.parametrize(
    "code", ["raise SystemExit(1)", "print('half', end='')", "import sys; sys.stdin.close()"]
)
def test_a_process_that_dies_leaves_no_check_out(folders: tuple[Path, Path], code: str) -> None:
    with Checker() as there:
        there._process = process(code)
        there.expect(*question(folders))
        assert [check.ok for check in there.check(folders[1], names(folders[1]))] == [True] * 5


@pytest.mark.parametrize("ok", [False, None])
def test_only_checks_that_held_are_taken_over(folders: tuple[Path, Path], ok: bool | None) -> None:
    found = f"v.verify_folder = lambda *_, **__: [Check('loads', {ok}, 'a package is hidden')]"
    odd = f"; import mha2gqa.verification.checks as v; from mha2gqa.verification.tiny_random import Check; {found}; serve()"
    with Checker() as there:
        there._process = process(background._SERVE.replace("; serve()", odd))
        there.expect(*question(folders))
        assert [check.ok for check in there.check(folders[1], names(folders[1]))] == [True] * 5


def test_a_failed_check_of_the_other_process_publishes_nothing(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mha2gqa.conversion.checkpoint.write_config", lambda *_: None
    )  # the folder lacks its config
    with Checker() as there, pytest.raises(CheckpointError, match="nothing was published"):
        there._process = process()
        convert(folders[0], tmp_path / "out", 2, checker=there)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_ends_the_process(folders: tuple[Path, Path]) -> None:
    with Checker() as there:
        there._process = started = process()
    assert started.poll() is not None


def test_the_module_is_light() -> None:
    code = "import sys, mha2gqa.verification.background; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

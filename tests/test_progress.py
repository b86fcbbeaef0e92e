"""Progress: stages, i of n, time left from measured speed; lines in a file, one bar on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mha2gqa import progress as module
from mha2gqa.progress import Callback, Lines, Progress, current, duration, reporting


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(module.time, "monotonic", moved)
    return moved


@contextmanager
def lines(every: float = 1e6) -> Iterator[tuple[Lines, io.StringIO]]:
    stream = io.StringIO()
    shown = Lines("convert", stream, every)
    try:
        yield shown, stream
    finally:
        shown.close()


def test_without_a_listener_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    current().stage("reading", 3, "files")
    current().advance(2)
    assert capsys.readouterr() == ("", "")


def test_a_line_says_elapsed_stage_of_how_many_amount_and_time_left(clock: Clock) -> None:
    with lines() as (progress, stream):
        progress.announce("reading", "fitting", "writing")
        clock.now += 4
        progress.stage("fitting", 32, "layers")
        clock.now += 60
        progress.advance(8, "loss 3.2")
        assert progress.line() == "[1:04] convert: fitting (2 of 3): 8 of 32 layers, loss 3.2, 3:00 left"
        progress.stage("writing", 2_000_000_000, "B")
        assert progress.line() == "[1:04] convert: writing (3 of 3): 0 B of 2 GB"
    assert stream.getvalue().splitlines() == [
        "[0:04] convert: fitting (2 of 3): 0 of 32 layers",
        "[1:04] convert: writing (3 of 3): 0 B of 2 GB",
    ]


def test_time_left_counts_from_where_a_resumed_stage_began(clock: Clock) -> None:
    progress = Progress()
    progress.stage("training", 100, "steps", start=80)
    assert progress.left() is None
    clock.now += 10
    progress.advance(85)
    assert progress.left() == pytest.approx(30)


def test_a_line_comes_after_the_interval_and_not_before(clock: Clock) -> None:
    with lines(30.0) as (progress, stream):
        progress.stage("fitting", 10)
        for done in range(1, 7):
            clock.now += 10
            progress.advance(done)
    assert stream.getvalue().splitlines() == [
        "[0:00] convert: fitting: 0 of 10",
        "[0:30] convert: fitting: 3 of 10, 1:10 left",
        "[1:00] convert: fitting: 6 of 10, 0:40 left",
    ]


def test_a_line_comes_even_while_nothing_moves() -> None:
    written = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().count("\n") >= 2:
                written.set()
            return super().write(text)

    progress = Lines("plan", Stream(), 0.01)
    progress.stage("loading")
    assert written.wait(60)
    progress.close()


def test_parts_have_stages_of_their_own() -> None:
    progress = Progress()
    progress.announce("convert", "evaluate")
    with progress.part("convert", 1, 4):
        progress.announce("reading", "writing")
        progress.stage("writing", 10)
        progress.advance(5)
        assert progress.place() == "convert 1/4: writing (2 of 2)"
        assert progress.fraction() == pytest.approx(0.75 / 4)
    progress.stage("evaluate")
    assert progress.place() == "evaluate (2 of 2)"


def test_report_begins_a_stage_when_its_name_changes() -> None:
    seen: list[tuple[str, int, int]] = []
    with reporting(Callback(lambda *change: seen.append(change))) as progress:
        current().report("reading", 1, 2)
        current().report("reading", 2, 2)
        current().report("writing", 0, 9)
    assert seen == [("reading", 0, 2), ("reading", 1, 2), ("reading", 2, 2), ("writing", 0, 9)]
    assert progress is not current()


def test_none_keeps_the_listener_that_is_there() -> None:
    with reporting(Progress("outer")) as outer, reporting(None) as inner:
        assert inner is outer is current()


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "0:07"), (750, "12:30"), (11045, "3:04:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_on_a_terminal_there_is_one_bar_and_log_lines_stay_whole() -> None:
    code = (
        "import sys, time; from mha2gqa.progress import Bar\n"
        "bar = Bar('convert'); bar.announce('reading', 'fitting'); bar.stage('fitting', 4, 'layers')\n"
        "bar.advance(3); print('a warning', file=sys.stderr); time.sleep(0.2); bar.advance(4); bar.close()"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=theirs, env=env
    ) as done:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    text = shown.decode()
    assert done.returncode == 0
    assert "convert: fitting (2 of 2)" in text and "3 of 4 layers" in text
    assert any(line.strip().endswith("a warning") for line in text.splitlines())


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, mha2gqa.progress; assert not {'rich', 'torch', 'numpy', 'click'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The suites themselves: what they record adds up, and nothing that happens to them is lost."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import tables
from fuzz import run as fuzz
from fuzz.ledger import Ledger
from fuzz.trial import Room, Trial


def test_a_ledger_adds_up_and_goes_on_after_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    ledger = Ledger(path)
    ledger.begin()
    for begin in (0, 500, 2000):
        ledger.add(begin, begin + 500, {"header|ok": 2, "text|refused": 498}, {})
    ledger.write()
    told = json.loads(path.read_text())
    assert told["inputs"] == 1500 and [(r["from"], r["to"], r["ok"]) for r in told["ranges"]] == [
        (0, 1000, 4),
        (2000, 2500, 2),
    ]
    again = Ledger(path)
    assert again.missing(0, 3000) == [range(1000, 2000), range(2500, 3000)]
    assert again.missing(2100, 2400) == [] and again.missing(5000, 5010) == [range(5000, 5010)]


def test_inputs_that_are_tried_again_count_once(tmp_path: Path) -> None:
    fault = {"header: x": {"count": 1, "number": 3, "input": ""}}
    ledger, other = Ledger(tmp_path / "l.json"), Ledger(tmp_path / "other.json")
    for each, faults in ((ledger, fault), (other, {})):
        each.begin()
        each.add(0, 500, {"header|ok": 500}, faults)
        each.write()
    assert json.loads(ledger.path.read_text())["kinds of faults"] == 1  # type: ignore[union-attr]
    ledger.take_over(Ledger(tmp_path / "other.json"))
    ledger.write()
    told = json.loads((tmp_path / "l.json").read_text())
    assert (told["inputs"], told["kinds of faults"], len(told["runs"])) == (500, 0, 1)


def _options(**words: Any) -> argparse.Namespace:
    given = {
        "first": 0,
        "to": 40,
        "jobs": 2,
        "piece": 10,
        "seconds": 0,
        "only": "",
        "again": False,
        "faults": None,
    }
    return argparse.Namespace(**given | words)


def test_a_process_that_dies_is_a_fault_and_the_rest_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deadly(rng: Random, room: Room) -> Trial:
        dies = room.folder.exists() and int((room.folder.parent / "now").read_text()) == 17
        return Trial("deadly", "", lambda: str(os.kill(os.getpid(), signal.SIGKILL)) if dies else "")

    monkeypatch.setattr(fuzz, "KINDS", ((deadly, 1),))
    ledger = Ledger(tmp_path / "l.json")
    with pytest.raises(SystemExit):
        fuzz.try_all(_options(), ledger)
    told = json.loads((tmp_path / "l.json").read_text())
    assert told["inputs"] == 40 and sum(row["ok"] for row in told["ranges"]) == 39
    (row,) = [row for row in told["ranges"] if row["faults"]]
    assert (row["from"], row["to"]) == (17, 18) and "the process ended with -9" in row["faults"]
    assert "39 inputs, 1 kinds of faults" in capsys.readouterr().out


def test_time_that_is_over_begins_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "KINDS", ((lambda rng, room: Trial("quick", "", str), 1),))
    ledger = Ledger(tmp_path / "l.json")
    fuzz.try_all(_options(seconds=1e-9), ledger)
    assert ledger.missing(0, 40) == [range(40)]


def test_an_input_is_the_same_in_every_run(tmp_path: Path) -> None:
    said = [
        fuzz.input_of(number, Room(tmp_path / str(i))).said
        for i in (0, 1)
        for number in (3, 7, 8)
        if _room(tmp_path, i)
    ]
    assert said[:3] == said[3:]


def _room(folder: Path, i: int) -> bool:
    (folder / str(i)).mkdir(exist_ok=True)
    return True


@pytest.mark.slow  # `make fuzz` is this command line
def test_the_command_line_of_the_fuzz_suite(tmp_path: Path) -> None:
    words = [sys.executable, fuzz.__file__, "--from", "5", "--to", "7", "--out", str(tmp_path / "l.json")]
    assert subprocess.run(words, check=True, capture_output=True, timeout=300).stdout
    told = json.loads((tmp_path / "l.json").read_text())
    assert told["inputs"] == 2 and told["command"] == "python tests/fuzz/run.py --from 5 --to 7 --out l.json"
    assert told["runs"][0]["hardware"]["cores"] and told["runs"][0]["versions"]["torch"]


def test_suites_are_rendered_by_machine_and_by_command() -> None:
    about = {"hardware": {"cpu": "CPU", "cores": 2}, "versions": {"torch": "2"}}
    row = {"ok": 3, "refused": 7, "faults": {}}
    ranges = [row | {"from": 10 * i, "to": 10 * i + 10, "run": i} for i in (0, 1)]
    ranges.append(row | {"from": 90, "to": 101, "run": 2, "faults": {"text: X": {"count": 1}}})
    other = about | {"hardware": {"cpu": "other", "cores": 32}}
    text = tables.fuzz({"inputs": 31, "kinds of faults": 1, "runs": [about, about, other], "ranges": ranges})
    assert text.startswith("31 inputs, 1 kinds of faults.\n- text: X\n")
    assert (
        "| CPU, 2 cores, torch 2 | 20 | 6 | 14 | 0 |" in text
        and "| other, 32 cores, torch 2 | 11 | 3 | 7 | 1 |" in text
    )
    cells = {"kill": {"tried": 4, "clean": 4}, "full": {"tried": 3, "clean": 2}}
    wrong = [{"job": "run", "act": "full", "event": "open", "what": "left behind"}]
    text = tables.kills(about | {"tried": 7, "clean": 6, "jobs": {"run": cells}, "wrong": wrong})
    assert "6 of 7 trials clean" in text and "| `run` | 2 of 3 | 4 |" in text
    assert "- run, full before open: left behind" in text

"""Which row is measured next: what can be started now, and would end in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _quality_cells import Cell, start_name, trained_name
from _quality_ledger import Ledger
from _quality_rates import Entries, rates_of, rates_pending, superseded

MARGIN = 1.15  # of the longest that was measured
TOGETHER = 3  # processes on one H200 for which the guesses of `Cell.estimates` hold
CROWDED = 1.35  # how guesses grow with the processes on a GPU: 7 took 3.1 times as long as 3


@dataclass(frozen=True)
class Scratch:
    """What a work folder holds of the rows' conversions and uptrained checkpoints.

    Args:
        root: The work folder.
    """

    root: Path

    @property
    def generated(self) -> Path:
        """The text that the original wrote itself."""
        return self.root / "generated.jsonl"

    def start(self, name: str) -> tuple[Path, Path]:
        """Folder of a conversion, and the file with its cost, which is written when it is whole."""
        folder = self.root / "converted" / name
        return folder, folder.with_name(f"{name}.json")  # a rate has a point in it

    def trained(self, name: str) -> tuple[Path, Path]:
        """The same of an uptrained checkpoint."""
        folder = self.root / "uptrained" / name
        return folder, folder.with_name(f"{name}.json")

    def result(self, cell: Cell, rates: Mapping[str, float]) -> Path:
        """Folder of the checkpoint that a row scored."""
        if cell.objective:
            return self.trained(trained_name(cell, rates))[0]
        return self.start(start_name(cell, rates))[0]

    def missing(self, cell: Cell, entries: Entries) -> list[str]:
        """What a cell would have to make first: the text of the original, `converted/…`, `uptrained/…`."""
        rates = rates_of(cell, entries)
        files = [self.generated] if cell.text == "generate" else []
        files += [] if cell.start == "original" else [self.start(start_name(cell, rates))[1]]
        files += [self.trained(trained_name(cell, rates))[1]] if cell.objective else []
        return [f"{file.parent.name}/{file.stem}" for file in files if not file.exists()]


def next_cell(
    cells: Sequence[Cell],
    ledger: Ledger,
    scratch: Scratch,
    left: float,
    plan: Sequence[Cell] = (),
    workers: int = 1,
    gpus: int = 1,
) -> tuple[Cell | None, bool]:
    """The most wanted cell that can be measured now in `left` seconds, and whether others are at work.

    Args:
        cells: Those wanted, most wanted first.
        ledger, scratch: What is there.
        left: Seconds.
        plan: All cells; one whose rate the plan tunes waits until some rate was tried.
        workers, gpus: Processes at work, and GPUs that they share.
    """
    entries, failed, flops = ledger.entries(), ledger.failed(), ledger.flops()
    claimed = ledger.claimed(cell.key for cell in cells)
    done = entries.keys() - (superseded(entries) - claimed)
    running = [cell for cell in cells if cell.key in claimed - done - failed]
    in_the_making = {name for cell in running for name in scratch.missing(cell, entries)}
    for cell in cells:
        if cell.key in done or cell.key in claimed or (cell.waits_for and cell.waits_for not in flops):
            continue
        if rates_pending(cell, cells, entries, failed, plan):
            continue
        missing = scratch.missing(cell, entries)
        seconds = expected(cell, missing, entries, workers, gpus)
        if in_the_making.isdisjoint(missing) and seconds <= left:
            return cell, bool(running)
    return None, bool(running)


def expected(cell: Cell, missing: Sequence[str], entries: Entries, workers: int = 1, gpus: int = 1) -> float:
    """Seconds that a row will take: the longest of those like it among as many processes, or a guess."""
    crowd = max(1.0, workers / gpus / TOGETHER) ** CROWDED
    start, rest = (crowd * guess for guess in cell.estimates)
    measured = [e for e in entries.values() if "start_seconds" in e and e.get("workers", 1) == workers]
    wanted = cell.to_dict()
    if starts := [e["start_seconds"] for e in measured if e["start_seconds"] and _start(e) == _start(wanted)]:
        start = MARGIN * max(starts)
    if alike := [e["wall_seconds"] - e["start_seconds"] for e in measured if _budget(e) == _budget(wanted)]:
        rest = MARGIN * max(alike)
    return rest + (start if any(name.startswith("converted/") for name in missing) else 0.0)


def _start(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["start"], entry.get("fit", ""), entry.get("text", ""), entry.get("wide", 1) > 1


def _budget(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    made = bool(entry.get("objective")) and entry.get("cache", "") == ""
    return entry.get("tokens", 0), bool(entry.get("equal_to")), made, entry.get("wide", 1) > 1

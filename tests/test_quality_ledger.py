"""The ledger of the quality bench: disjoint parts, what waits for what, resuming, scores, costs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import pico_llama

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _quality_bench
import _quality_cells as cells
import _quality_rates
import quality_at_rate
import quality_floor
import quality_ledger
from _quality_cache import round_cache, rounded
from _quality_ledger import Ledger, read_lines
from _quality_parts import NAMES, split_parts
from _quality_schedule import Scratch, next_cell
from _quality_scores import scores

from mha2gqa.assets import tiny_model_path
from mha2gqa.checkpoints.loading import load_tokenizer

PLAN = cells.planned(16, [4, 8, 2, 1], (2_713_000, 13_565_000), [0, 1, 2])
LEDGER = Path(__file__).parents[1] / "benchmarks" / "results" / "quality_ledger.jsonl"


def write_text(path: Path, documents: int, word: str = "w") -> Path:
    lines = (json.dumps({"text": f"{word}{i} and some more words of document {i}"}) for i in range(documents))
    path.write_text("\n".join(lines) + "\n")
    return path


def entry(cell: cells.Cell, **found: Any) -> dict[str, Any]:
    return cell.to_dict() | {"loss": 3.0, "flops": 1e15, "wall_seconds": 10.0} | found


def test_the_parts_are_disjoint_and_hold_what_was_asked_for(tmp_path: Path) -> None:
    text = write_text(tmp_path / "t.jsonl", 200)
    parts = split_parts([str(text)], load_tokenizer(tiny_model_path()), tmp_path / "parts", (300, 200))
    found = {name: [x["text"] for x in read_lines(Path(parts.path(name)))] for name in NAMES}
    every = [text for texts in found.values() for text in texts]
    assert sorted(every) == sorted(x["text"] for x in read_lines(text))
    assert 300 <= parts.facts["calibration"]["tokens"] < 340
    assert 200 <= parts.facts["tuning"]["tokens"] < 240
    text.unlink()  # made once
    assert split_parts([str(text)], None, tmp_path / "parts") == parts


def test_keys_are_unique_and_bold_cells_come_before_the_rest() -> None:
    keys = [cell.key for cell in PLAN]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "original/G16/seed0"
    for bold in (
        "joint/G4/fits/kd-2.71M/seed2",
        "joint/G2/fits/kd-13.6M/seed0",
        "joint/G4/fits/generate/seed0",
    ):
        assert keys.index(bold) < keys.index("joint/G1/fits/seed0") < keys.index("mean/G4/merged/seed0")
    assert {cell.waits_for for cell in PLAN} - {""} <= set(keys)


def test_shorter_fits_and_mean_pooling_spend_the_flops_of_the_plain_fits() -> None:
    found = [cell for cell in PLAN if cell.equal_to and cell.fit != "fits"]
    assert {cell.start if cell.fit == "merged" else cell.fit for cell in found} == {
        "mean", "refit", "fits100", "fits300"
    }  # fmt: skip
    small = [cell for cell in found if cell.equal_to.endswith(f"G{cell.groups}/fits/kd-2.71M/seed0")]
    assert len(small) == 4 * 4 * 3 and {cell.seed for cell in found if cell not in small} == {0}
    assert all(not cell.tokens and cell.objective == "kd" for cell in found)


def test_every_start_is_tuned_on_the_same_rates() -> None:
    tuned: dict[tuple[str, str], list[float]] = {}
    for cell in PLAN:
        assert not cell.tunes or cell.part == "tuning"
        if cell.tunes and not cell.batch and cell.fit in cells.PLAIN_FITS:
            tuned.setdefault((cell.tunes, cell.start), []).append(cell.rate)
    for (kind, start), found in tuned.items():
        assert found == [*cells.BEYOND.get((kind, start), ()), *cells.RATES[kind]]
    assert {kind for kind, _ in tuned} == set(cells.RATES)
    assert {start for kind, start in tuned if kind == "kd"} == {"joint", "mean"}


def test_rows_come_in_the_order_of_the_expressions_that_find_them() -> None:
    words = ["--model", str(tiny_model_path()), "--groups", "2", "1", "--bold", "2", "1"]
    wanted, plan = quality_ledger.cells_of(
        quality_ledger.parse_args([*words, "--only", "^joint/G1/fits/seed0", "^joint/G./fits/seed[01]"])
    )
    keys = [cell.key for cell in wanted]
    assert keys[0] == "joint/G1/fits/seed0" and len(set(keys)) == len(keys) > 1
    assert len(plan) > len(wanted)


def test_rates_beyond_the_grid_are_tried_where_the_best_of_the_grid_lies_at_its_edge() -> None:
    rows = [row for row in read_lines(LEDGER) if row.get("tunes") and row.get("wide", 1) == 1]
    for (kind, start), rates in cells.BEYOND.items():
        grid = cells.RATES[kind]
        of_grid = [r for r in rows if (r["tunes"], r["start"]) == (kind, start) and r["rate"] in grid]
        best = min(of_grid, key=lambda row: row["loss"])["rate"]
        assert (best == min(grid)) == (max(rates) < min(grid)) and best in (min(grid), max(grid))


def test_a_rate_is_the_best_of_the_same_start_at_the_nearest_number_of_groups() -> None:
    def tried(start: str, g: int, rate: float, loss: float) -> dict[str, Any]:
        cell = cells.Cell(start, g, "fits", objective="kd", tokens=9, part="tuning", tunes="kd", rate=rate)
        return entry(cell, loss=loss)

    rows = [tried("joint", 4, 1e-3, 3.2), tried("joint", 4, 2e-3, 3.1), tried("mean", 4, 4e-3, 3.0)]
    rows += [tried("joint", 1, 5e-4, 3.9), tried("joint", 1, 1e-3, 4.0)]
    entries = {row["key"]: row for row in rows}
    assert _quality_rates.chosen_rate(cells.Cell("joint", 8, "fits"), "kd", entries) == 2e-3
    assert _quality_rates.chosen_rate(cells.Cell("joint", 1, "fits"), "kd", entries) == 5e-4
    assert _quality_rates.chosen_rate(cells.Cell("mean", 2, "fits"), "kd", entries) == 4e-3
    assert (
        _quality_rates.chosen_rate(cells.Cell("align", 2, "fits"), "kd", entries) == cells.DEFAULT_RATES["kd"]
    )


def test_another_way_to_fit_has_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.FITS, "other", (True, True, {"steps": 7}))
    plan = cells.planned(16, [4, 8, 2, 1], (2_713_000, 13_565_000), [0])
    tried = [c for c in plan if c.fit == "other" and c.tunes]
    assert [c.rate for c in tried] == list(cells.RATES["fit"])
    assert {f"joint/G{g}/other/{what}seed0" for g in (4, 2, 8, 1) for what in ("", "mix-2.71M/")} <= {
        c.key for c in plan
    }
    plain = next(c for c in plan if c.fit == "fits" and c.tunes == "fit")
    entries = {c.key: entry(c, loss=loss) for c, loss in ((tried[2], 2.0), (plain, 3.0))}
    for fit, rate in (("other", tried[2].rate), ("fits", plain.rate), ("e2e", plain.rate)):
        assert _quality_rates.chosen_rate(cells.Cell("joint", 2, fit), "fit", entries) == rate
    other = cells.Cell("joint", 2, "other")
    assert _quality_rates.rates_pending(other, [], {plain.key: entries[plain.key]}, set(), plan)
    assert not _quality_rates.rates_pending(other, [], entries, set(), plan)


def test_steps_of_another_size_take_the_rate_that_was_tuned_for_them(tmp_path: Path) -> None:
    taught = cells.Cell("joint", 4, "fits", objective="kd", tokens=9)
    tried = replace(taught, part="tuning", tunes="kd", batch=8192, rate=2.5e-4)
    rows = [entry(tried, loss=2.9), entry(replace(tried, batch=0, rate=5e-4), loss=3.0)]
    entries = {row["key"]: row for row in rows}
    assert tried.key == "joint/G4/fits/kd-9e-06M/steps-of-8192/kd-rate-0.00025/seed0"
    assert _quality_rates.chosen_rate(taught, "kd", entries) == 5e-4
    small = replace(taught, batch=8192)
    assert _quality_rates.chosen_rate(small, "kd", entries) == 2.5e-4
    assert _quality_rates.chosen_rate(replace(small, wide=2), "kd", entries) == 2.5e-4
    plan = [tried, replace(tried, batch=0, rate=5e-4), taught, small]
    assert _quality_rates.rates_pending(small, [], {rows[1]["key"]: rows[1]}, set(), plan)
    assert not _quality_rates.rates_pending(taught, [], {rows[1]["key"]: rows[1]}, set(), plan)
    assert cells.trained_name(small, {"kd": 1.0}) != cells.trained_name(taught, {"kd": 1.0})


def next_of(ledger: Ledger, plan: list[cells.Cell], left: float = 1e9) -> cells.Cell | None:
    return next_cell(plan, ledger, Scratch(ledger.claims.parent / "work"), left)[0]


def make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_rows_wait_for_their_rates_and_for_the_row_they_are_equal_to(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", tmp_path / "claims")
    fit = cells.Cell("joint", 4, "fits", part="tuning", tunes="fit", rate=3e-3)
    kd = cells.Cell("joint", 4, "fits", objective="kd", tokens=9, part="tuning", tunes="kd", rate=1e-3)
    row = cells.Cell("joint", 4, "fits", objective="kd", tokens=9)
    equal = cells.Cell("mean", 4, "merged", objective="kd", equal_to=row.key)
    plan = [equal, row, kd, fit]
    for cell in (fit, kd, row, equal):
        assert next_of(ledger, plan) == cell
        assert ledger.claim(cell.key) and not ledger.claim(cell.key)
        if cell is not equal:
            assert next_of(ledger, plan) is None  # another process is at it
        ledger.add(entry(cell))
    assert next_of(ledger, plan) is None
    assert next_cell(plan, ledger, Scratch(tmp_path), 1e9) == (None, False)


def test_rows_with_one_conversion_or_one_uptraining_wait_for_it(tmp_path: Path) -> None:
    ledger, scratch = Ledger(tmp_path / "l.jsonl", tmp_path / "claims"), Scratch(tmp_path / "work")
    row = cells.Cell("joint", 8, "fits", objective="kd", tokens=9)
    rounded, other = replace(row, cache="int8"), replace(row, seed=1)
    plan = [row, replace(row, objective="", tokens=0), rounded, other]
    rates = _quality_rates.rates_of(row, {})
    assert next_of(ledger, plan) == row and ledger.claim(row.key)
    assert next_of(ledger, plan) == other and ledger.claim(other.key)
    assert next_of(ledger, plan) is None
    make(scratch.start(cells.start_name(row, rates))[1])
    assert next_of(ledger, plan) == plan[1] and ledger.claim(plan[1].key)
    assert next_of(ledger, plan) is None
    make(scratch.trained(cells.trained_name(row, rates))[1])
    assert next_of(ledger, plan) == rounded
    assert cells.trained_name(rounded, rates) == cells.trained_name(row, rates)
    assert cells.trained_name(row, {"kd": 5e-4}) != cells.trained_name(row, {"kd": 1e-3})


def test_one_process_lets_the_original_write_and_the_others_wait_for_its_text(tmp_path: Path) -> None:
    ledger, scratch = Ledger(tmp_path / "l.jsonl", tmp_path / "claims"), Scratch(tmp_path / "work")
    rows = [cells.Cell("joint", g, "fits", text="generate") for g in (4, 2)]
    assert next_of(ledger, rows) == rows[0] and ledger.claim(rows[0].key)
    assert next_of(ledger, rows) is None
    make(scratch.generated)
    assert next_of(ledger, rows) == rows[1]


def test_a_row_at_a_rate_that_tuning_has_left_is_measured_again(tmp_path: Path) -> None:
    row = cells.Cell("joint", 4, "fits", objective="kd", tokens=9)
    tried = [replace(row, part="tuning", tunes="kd", rate=rate) for rate in (1e-3, 5e-4)]
    ledger = Ledger(tmp_path / "l.jsonl", tmp_path / "claims")
    ledger.add(entry(tried[0]))
    ledger.add(entry(row, rates={"fit": 3e-3, "kd": 1e-3}))
    assert _quality_rates.superseded(ledger.entries()) == set() and next_of(ledger, [row]) is None
    ledger.add(entry(tried[1], loss=2.9))
    assert _quality_rates.superseded(ledger.entries()) == {row.key} and next_of(ledger, [row]) == row
    ledger.add(entry(row, rates={"fit": 3e-3, "kd": 5e-4}))
    assert _quality_rates.superseded(ledger.entries()) == set() and next_of(ledger, [row]) is None


def test_rates_and_flops_of_earlier_code_are_known_and_its_rows_are_not(tmp_path: Path) -> None:
    row = cells.Cell("joint", 4, "fits", objective="kd", tokens=9)
    tried = replace(row, part="tuning", tunes="kd", rate=5e-4)
    before = tmp_path / "before.jsonl"
    before.write_text("".join(json.dumps(entry(c) | {"code": "another"}) + "\n" for c in (row, tried)))
    ledger = Ledger(tmp_path / "l.jsonl", tmp_path / "claims", tuned=[before])
    assert list(ledger.entries()) == [tried.key] and ledger.flops()[row.key] == 1e15
    equal = cells.Cell("mean", 4, "merged", objective="kd", equal_to=row.key)
    assert next_of(ledger, [equal, tried]) == equal


def test_a_row_whose_rate_was_never_tried_waits_even_where_its_tuning_is_not_wanted(tmp_path: Path) -> None:
    row = cells.Cell("joint", 4, "fits", objective="kd", tokens=9)
    tried = [replace(row, part="tuning", tunes="kd", rate=rate) for rate in (1e-3, 5e-4)]
    ledger, scratch = Ledger(tmp_path / "l.jsonl", tmp_path / "claims"), Scratch(tmp_path / "work")
    assert next_cell([row], ledger, scratch, 1e9, [*tried, row])[0] is None
    assert next_cell([row], ledger, scratch, 1e9)[0] == row  # at the default rate, where that was asked for
    ledger.add(entry(tried[0], rates={"fit": 3e-3, "kd": 1e-3}))
    assert next_cell([row], ledger, scratch, 1e9, [*tried, row])[0] == row
    wide = replace(row, wide=2)
    assert next_cell([wide], ledger, scratch, 1e9, [*tried, replace(tried[0], wide=2), wide])[0] is None
    args = quality_ledger.parse_args(
        ["--model", str(tiny_model_path()), "--work", str(tmp_path), "--ledger", "n"]
    )
    waiting = quality_ledger.untuned(args)
    assert "joint/G4/fits/kd-2.71M/seed0" in waiting and "original/G8/seed0" not in waiting


def test_a_row_that_failed_is_left_and_tried_again_by_the_next_call(tmp_path: Path) -> None:
    plan = [
        cells.Cell("joint", 4, "fits", part="tuning", tunes="fit", rate=3e-3),
        cells.Cell("joint", 4, "fits"),
    ]
    ledger = Ledger(tmp_path / "l.jsonl", tmp_path / "claims")
    assert ledger.claim(plan[0].key)
    ledger.add(plan[0].to_dict() | {"error": "out of memory"})
    assert next_of(ledger, plan) == plan[1]  # with the default rate
    assert next_of(Ledger(tmp_path / "l.jsonl", tmp_path / "claims2"), plan) == plan[0]


def test_rows_that_would_end_late_are_not_started(tmp_path: Path) -> None:
    plan = [cells.Cell("joint", 4, "e2e"), cells.Cell("mean", 4, "merged")]
    ledger = Ledger(tmp_path / "l.jsonl", tmp_path / "claims")
    assert next_of(ledger, plan, left=1000.0) == plan[0]
    assert next_of(ledger, plan, left=50.0) == plan[1]
    crowded = next_cell(plan, ledger, Scratch(tmp_path / "work"), 50.0, workers=12, gpus=2)
    assert crowded == (None, False)  # of six on a GPU each takes longer
    ledger.add(entry(cells.Cell("mean", 2, "merged"), wall_seconds=60.0, start_seconds=40.0, rates={}))
    assert next_of(ledger, plan, left=50.0) is None  # one like it took longer
    make(Scratch(tmp_path / "work").start(cells.start_name(plan[1], {}))[1])
    assert next_of(ledger, plan, left=50.0) == plan[1]  # its conversion is there


def test_rows_of_another_version_of_the_code_are_measured_again(tmp_path: Path) -> None:
    path, cell = tmp_path / "l.jsonl", cells.Cell("mean", 4, "merged")
    path.write_text(json.dumps(entry(cell) | {"code": "another"}) + "\n" + '{"key": "cut of')
    assert Ledger(path, tmp_path / "c").entries() == {}
    assert list(Ledger(path, tmp_path / "c", any_code=True).entries()) == [cell.key]
    other = Ledger(tmp_path / "o.jsonl", tmp_path / "c", [path], tmp_path / "copy.jsonl", any_code=True)
    other.add(entry(replace(cell, groups=2)))
    assert len(other.entries()) == 2
    assert (tmp_path / "copy.jsonl").read_text() == (tmp_path / "o.jsonl").read_text()


@torch.no_grad()
def test_scores_are_those_of_cross_entropy_and_of_the_divergence_written_out() -> None:
    model, original = pico_llama(), pico_llama(num_key_value_heads=2)
    blocks = torch.randint(0, 64, (5, 41), generator=torch.Generator().manual_seed(0))
    found = scores(model, original, blocks, batch_tokens=80)
    logits, wanted = (m(input_ids=blocks[:, :-1]).logits for m in (model, original))
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="none")
    assert found["loss"] == pytest.approx(float(each.mean()), rel=1e-6)
    kl = torch.nn.functional.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        wanted.log_softmax(-1).flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
    assert found["kl"] == pytest.approx(float(kl), rel=1e-4)
    assert list(found["loss_by_position"]) == ["0-32", "32-40"]
    assert found["loss_by_position"]["32-40"] == pytest.approx(
        float(each.view(5, 40)[:, 32:].mean()), abs=1e-5
    )
    assert scores(original, original, blocks)["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_the_bench_measures_a_conversion_an_uptraining_and_the_same_flops(tmp_path: Path) -> None:
    text, valid = write_text(tmp_path / "t.jsonl", 1500), write_text(tmp_path / "v.jsonl", 60, "x")
    words = ["--model", str(tiny_model_path()), "--text", str(text), "--valid", str(valid), "--device", "cpu"]
    words += ["--work", str(tmp_path / "w"), "--ledger", str(tmp_path / "l.jsonl"), "--window", "64"]
    words += ["--part-tokens", "2200", "500", "--calibration-tokens", "2048", "--fit-steps", "2"]
    args = quality_ledger.parse_args([*words, "--eval-blocks", "4"])
    bench = quality_ledger.Bench(args)
    row = cells.Cell("joint", 2, "refit", objective="kd", tokens=32_768)
    merged = cells.Cell("mean", 2, "merged", objective="kd", equal_to=row.key)
    found = bench.measure(row, {}, {})
    assert found["uptrained_tokens"] == 32_768 and found["unique_tokens"] <= 2048 + 32_768
    start = bench.measure(cells.Cell("joint", 2, "refit"), {}, {})
    per_token = (found["flops"] - start["flops"]) / 32_768
    assert start["flops"] > 0 and start["token_visits"] == 0
    equal = bench.measure(merged, {}, {row.key: found["flops"]})
    assert equal["flops"] == pytest.approx(found["flops"], abs=16_384 * per_token)  # to a step
    rounded = bench.measure(replace(row, cache="int8"), {}, {})
    assert found["start_seconds"] > 0 and rounded["start_seconds"] == 0
    assert 0 < abs(rounded["loss"] - found["loss"]) < 0.05 and rounded["flops"] == found["flops"]
    line = quality_ledger.row_of(row, found, 1.0, args, bench)
    assert line["key"] == row.key and line["rates"] == {"kd": 1e-3} and line["kl"] > 0


class _Measured:
    """A bench that reads no text: its loss tells the part and the rate."""

    blocks: ClassVar[dict[str, list[int]]] = {"valid": [], "tuning": []}
    parts, device = type("Parts", (), {"facts": {}}), "cpu"

    def __init__(self, args: Any) -> None:
        pass

    def measure(self, cell: cells.Cell, entries: Any, flops: Any) -> dict[str, Any]:
        return {"loss": cell.rate + (cell.part == "valid"), "rates": {cell.objective: cell.rate}}


def test_a_row_is_measured_at_given_rates_on_both_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality_at_rate, "Bench", _Measured)
    out = tmp_path / "rates.json"
    words = ["--out", str(out), "--model", str(tiny_model_path()), "--ledger", str(tmp_path / "l.jsonl")]
    words += ["--groups", "2", "--bold", "2", "2", "--row", "joint/G2/fits/kd-2.71M/seed0", "--rates"]
    for rates in (["0.001", "0.002"], ["0.004"]):
        quality_at_rate.main([*words, *rates])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["part"], row["rate"], row["loss"]) for row in rows] == [
        (part, rate, rate + (part == "valid"))
        for rate in (0.001, 0.002, 0.004)
        for part in ("tuning", "valid")
    ]
    with pytest.raises(SystemExit):
        quality_at_rate.main([*words, "0.001", "--row", "joint/G2/fits/seed0"])
    assert "no row with an uptraining is planned under this key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "taught", "weight"), [("kd", True, 0.0), ("mix", True, 0.5), ("ce", False, 0.0)]
)
def test_an_objective_says_whether_a_teacher_takes_part(
    objective: str, taught: bool, weight: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def uptrain(model: str, out: str, data: list[str], **words: Any) -> Any:
        asked.update(words, data=data)
        return SimpleNamespace(budget={"tokens": 9, "steps": 1, "unique_tokens": 9})

    monkeypatch.setattr(_quality_bench, "uptrain", uptrain)
    args = SimpleNamespace(model="original", window=64)
    bench = SimpleNamespace(args=args, device="cpu", uptraining_text=lambda cell: "text")
    cell = cells.Cell("joint", 2, "fits", objective=objective, tokens=9, seed=3)
    found = _quality_bench.Bench._uptrain(bench, cell, tmp_path, tmp_path / "o", 9, 5e-4)  # type: ignore[arg-type]
    assert (asked["teacher"] == "original", asked["ce_weight"]) == (taught, weight)
    assert asked["learning_rate"] == 5e-4 and asked["seed"] == 3 and found["tokens"] == 9
    assert asked["data"] == ["text"]


def test_a_part_is_read_to_so_many_tokens_where_an_uptraining_passes_over_it(tmp_path: Path) -> None:
    text, tokenizer = write_text(tmp_path / "t.jsonl", 200), load_tokenizer(tiny_model_path())
    parts = split_parts([str(text)], tokenizer, tmp_path / "parts", (600, 200))
    args = SimpleNamespace(work=tmp_path, calibration_tokens=500, e2e_tokens=700)
    bench = SimpleNamespace(args=args, parts=parts, tokenizer=tokenizer)
    plain = cells.Cell("joint", 2, "fits", objective="kd", tokens=9)
    for over, part, tokens in (("calibration", "calibration", 500), ("4.2M", "uptraining", 200)):
        path = _quality_bench.Bench.uptraining_text(bench, replace(plain, over=over))  # type: ignore[arg-type]
        found, whole = (read_lines(Path(p)) for p in (path, parts.path(part)))
        assert 0 < len(found) < len(whole) and found == whole[: len(found)]
        assert tokens - 60 < sum(len(tokenizer(x["text"])["input_ids"]) + 1 for x in found) <= tokens
    path = _quality_bench.Bench.uptraining_text(bench, plain)  # type: ignore[arg-type]
    assert path == parts.path("uptraining")


def test_few_unique_tokens_are_seen_once_and_several_times() -> None:
    found = [cell for cell in PLAN if cell.over or cell.tokens == cells.REST_TOKENS]
    assert {cell.groups for cell in found} == {8, 4, 2, 1}
    assert len([cell for cell in found if cell.seed == 0]) == 16
    assert {cell.key for cell in found if cell.seed} == {
        f"joint/G4/fits/kd-11M/over-4.2M/seed{seed}" for seed in (1, 2)
    }
    assert cells.REST_TOKENS % cells.STEP_TOKENS == 0
    passes = next(cell for cell in found if cell.over == "4.2M")
    assert passes.tokens == 3 * cells.REST_TOKENS and passes.key == "joint/G4/fits/kd-11M/over-4.2M/seed0"
    assert cells.Cell.of(passes.to_dict()) == passes


def test_the_floor_goes_on_where_it_stopped() -> None:
    tokens = torch.arange(1000).numpy().astype("uint16")
    whole = [
        next_ids for next_ids, _ in zip(quality_floor.batches(tokens, 4, 10, 0), range(60), strict=False)
    ]
    later = quality_floor.batches(tokens, 4, 10, 37)
    assert all(torch.equal(next(later), ids) for ids in whole[37:])
    assert torch.equal(whole[0][:, 1:], whole[0][:, :-1] + 1)
    assert [quality_floor.rate_at(s, 1000, 1.0) for s in (0, 199, 200, 699, 700)] == [
        0.005,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    assert quality_floor.rate_at(1000, 1000, 1.0) == pytest.approx(0.05)
    assert quality_floor._without_groups(["--a", "--groups", "4", "2", "--b", "7"]) == ["--a", "--b", "7"]


def test_attention_that_knows_no_mask_gives_the_loss_of_the_stock_one() -> None:
    model = pico_llama(num_key_value_heads=2)
    ids = torch.randint(0, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    before = quality_floor.next_token_loss(model, ids)
    quality_floor.register_causal()
    model.set_attn_implementation(quality_floor.CAUSAL)
    assert torch.allclose(quality_floor.next_token_loss(model, ids), before, atol=1e-6)
    assert quality_floor.change("hidden_size=64") == ("hidden_size", 64)


def test_the_summary_gives_gaps_to_the_original_and_to_the_original_continued() -> None:
    original = cells.Cell("original", 16)
    rows = [
        entry(original, loss=3.3),
        entry(replace(original, objective="ce", tokens=2_000_000), loss=3.25),
        entry(cells.Cell("joint", 4, "fits", objective="kd", tokens=2_000_000), loss=3.31),
    ]
    lines = quality_ledger.summary({row["key"]: row for row in rows})
    assert "+0.0100" in lines[3] and "+0.0600" in lines[3]


def test_wide_rows_come_with_what_else_has_their_bytes() -> None:
    plan = cells.planned(16, [4, 2], (2_713_000, 13_565_000), [0], wide=[2, 4])
    keys = [cell.key for cell in plan]
    assert len(set(keys)) == len(keys)
    assert {"joint/G4/wide2/fits/seed0", "joint/G4/wide4/fits/seed0", "joint/G2/wide2/fits/seed0"} <= set(
        keys
    )
    assert "joint/G2/wide4/fits/seed0" not in keys  # 4 does not divide 2
    assert {"joint/G8/fits/int8-cache/seed0", "joint/G4/fits/kd-2.71M/int8-cache/seed0"} <= set(keys)
    as_wide = "kd-as[joint/G4/wide2/fits/kd-2.71M/seed0]"
    assert {f"joint/G4/fits/{as_wide}/seed0", f"joint/G8/fits/{as_wide}/int8-cache/seed0"} <= set(keys)
    for cell in plan:
        assert not cell.waits_for or cell.waits_for in keys
        assert ("wide" in cell.to_dict()) == (cell.wide > 1)
    assert set(cells.planned(16, [4, 2], (2_713_000, 13_565_000), [0])) < set(plan)


def test_wide_heads_take_the_rate_that_was_tuned_for_wide_heads() -> None:
    def tried(wide: int, rate: float, loss: float) -> dict[str, Any]:
        cell = cells.Cell("joint", 4, "fits", part="tuning", tunes="fit", rate=rate, wide=wide)
        return entry(cell, loss=loss)

    plain = [tried(1, 3e-3, 3.1), tried(1, 6e-3, 3.2)]
    wide = [tried(2, 3e-3, 3.0), tried(2, 6e-3, 2.9)]
    cell = cells.Cell("joint", 2, "fits", wide=4)
    assert _quality_rates.chosen_rate(cell, "fit", {e["key"]: e for e in plain}) == 3e-3
    assert _quality_rates.chosen_rate(cell, "fit", {e["key"]: e for e in plain + wide}) == 6e-3
    assert (
        _quality_rates.chosen_rate(replace(cell, wide=1), "fit", {e["key"]: e for e in plain + wide}) == 3e-3
    )


@torch.no_grad()
def test_an_8_bit_cache_rounds_what_attention_reads() -> None:
    x = torch.randn(2, 3, 5, 16)
    steps = rounded(x) / (x.abs().amax(-1, keepdim=True) / 127)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert 0 < float((rounded(x) - x).abs().max()) <= float(x.abs().max()) / 254 * 1.001
    assert torch.equal(rounded(torch.zeros(1, 4)), torch.zeros(1, 4))
    model = pico_llama()
    ids = torch.randint(0, 64, (2, 20))
    exact = model(input_ids=ids).logits
    round_cache(model)
    difference = float((model(input_ids=ids).logits - exact).abs().max() / exact.std())
    assert 0 < difference < 0.2

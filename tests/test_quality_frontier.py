"""Tables by cache bytes, bars and the chart of a ledger."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _loss_tables as loss_tables
import _quality_bars as bar_tables
import _quality_findings as findings
import _quality_frontier as frontier
import _quality_probe_tables as probe_tables
import tables
from _ledger import record
from _quality_cells import REST_TOKENS, Cell, planned
from _quality_chart import GROUPS, chart
from _quality_flops import larger_budget
from _quality_sizes import sizes

PLAN = planned(16, [4, 2, 8, 1], (2_713_000, 13_565_000), [0, 1, 2], wide=[2, 4])
RATES = {"joint": 5e-4, "mean": 2e-3, "original": 1e-4}


def entry(cell: Cell, loss: float, **more: Any) -> dict[str, Any]:
    row = cell.to_dict() | {
        "loss": loss,
        "kl": 0.1,
        "unique_tokens": 500_000,
        "flops": 2e15,
        "token_visits": 9,
    }
    row |= {"model": "m", "window": 32, "blocks": 10, "gpu": "GPU", "wall_seconds": 3.0}
    row["loss_by_position"] = {"0-16": loss, "16-32": loss / 2}
    rates = dict.fromkeys(cell.kinds, RATES.get(cell.start))
    return row | {"rates": rates} | more


def ledger(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    original = entry(Cell("original", 16), 3.0, unique_tokens=0, flops=0.0)
    tuned = [
        entry(Cell(start, 4, "fits", objective="kd", tokens=9, part="tuning", tunes=kind, rate=rate), 1.0)
        for start, rate in RATES.items()
        for kind in ("fit", "kd", "ce")
    ]
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (original, *tuned, *rows)))
    return path


PLAIN = Cell("joint", 4, "fits")
TAUGHT = Cell("joint", 4, "fits", objective="kd", tokens=2_713_000)
WIDE = replace(TAUGHT, wide=2)


def test_what_holds_the_same_bytes_stands_together(tmp_path: Path) -> None:
    rows = [
        entry(PLAIN, 3.05),
        entry(Cell("joint", 4, "fits", seed=1), 3.07),
        entry(Cell("joint", 4, "fits", wide=2), 3.02),
        entry(Cell("joint", 8, "fits", cache="int8"), 3.01),
        entry(Cell("joint", 8, "fits", wide=2, cache="int8"), 3.005),
        entry(TAUGHT, 3.01),
    ]
    text = frontier.same_bytes(record(ledger(tmp_path, *rows)))
    assert "| GQA-4 (4:1) | GQA-4 | +0.0600 ± 0.0100 (2 seeds) | +0.0100 |" in text
    assert "|  | wide R=2: 2 heads | +0.0200 | not run |" in text
    assert "|  | GQA-8, int8 cache | +0.0100 | not run |" in text
    assert "|  | wide R=2: 4 heads, int8 cache | +0.0050 | not run |" in text


def test_floors_and_other_ways_to_fit_stand_beside_plain_heads(tmp_path: Path) -> None:
    step = replace(TAUGHT, batch=8192)
    assert frontier.row_name(step) == "GQA-4, distilled 2.71M tokens in steps of 8,192"
    rows = [
        entry(PLAIN, 3.05),
        entry(replace(PLAIN, fit="other"), 3.02),
        entry(Cell("joint", 2, "fits"), 3.1),
    ]
    floor = entry(PLAIN, 3.01) | {"key": "scratch/G4/seed0", "start": "scratch"}
    del floor["rates"], floor["fit"], floor["kl"]
    path = ledger(tmp_path, *rows, floor)
    found = record(path)
    text = frontier.same_bytes(found)
    assert "|  |  | after fits | G heads from scratch |" in text.replace("cache bytes of", "")
    assert "| GQA-4 (4:1) | GQA-4 | +0.0500 | +0.0100 |" in text and "| GQA-2 | +0.1000 | not run |" in text
    assert "|  | GQA-4, other | +0.0200 |  |" in text and "GQA-2, other" not in text
    assert "trained from scratch with G heads" in tables.quality(found) + tables.cost(found)


def test_originals_of_several_sizes_stand_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_quality_sizes.RESULTS", tmp_path)
    ledger(tmp_path, entry(PLAIN, 3.05), entry(TAUGHT, 3.01))
    of = {"ledger": "ledger.jsonl", "parameters": "30M"}
    record = {"ledgers": [of], "shares": [4, 8], "about": "Two sizes."}
    text = sizes(record)
    assert "| 4:1 | `m` | 30M | 3.0000 | +0.0500 | +0.0100 | not run |" in text
    assert "| 8:1 | `m` | 30M | 3.0000 | not run | not run | not run |" in text
    large = [
        entry(cell, loss, model="large")
        for cell, loss in ((Cell("original", 16), 4.0), (PLAIN, 4.01), (TAUGHT, 4.03))
    ]
    (tmp_path / "large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in large))
    text = sizes(record | {"ledgers": [of, {"ledger": "large.jsonl", "parameters": "111M"}]})
    assert "| 4:1 | `large` | 111M | 4.0000 | +0.0100 | +0.0300 | not run |" in text
    assert "- After fits the gap of `large` is 5.0 to 5.0 times smaller." in text
    assert "- Uptraining changes its gap: distillation by +0.0200 to +0.0200." in text
    untuned = frontier.same_bytes(tables._ledger.record(tmp_path / "large.jsonl"))
    assert "No rate was tuned on this model: fits 0.0005, distillation 0.0005." in untuned


def test_rows_are_compared_on_the_seeds_that_both_have(tmp_path: Path) -> None:
    rows = [entry(PLAIN, 3.10), entry(replace(PLAIN, seed=1), 3.10), entry(replace(PLAIN, seed=2), 3.50)]
    rows += [entry(replace(PLAIN, wide=2, seed=seed), 3.05) for seed in (0, 1)]
    found = frontier.by_configuration(record(ledger(tmp_path, *rows))["entries"])
    bar = {"measure": "share taken", "row": "joint/G4/wide2/fits", "other": "joint/G4/fits", "at_least": 0.3}
    assert bar_tables.verdict(found, bar) == ("50% of +0.1000 (2 seeds)", "met")


def test_the_spread_of_three_seeds_is_said(tmp_path: Path) -> None:
    rows = [entry(replace(PLAIN, seed=seed), loss) for seed, loss in ((0, 3.05), (1, 3.06))]
    two = frontier.same_bytes(record(ledger(tmp_path, *rows)))
    three = frontier.same_bytes(record(ledger(tmp_path, *rows, entry(replace(PLAIN, seed=2), 3.07))))
    assert "Over three seeds" not in two and "- Over three seeds gaps lie after fits within ±0.0100." in three


def test_bars_are_counted_by_the_ways_that_meet_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar_tables, "RESULTS", tmp_path)
    ledger(tmp_path, entry(PLAIN, 3.05), entry(replace(PLAIN, wide=2), 3.02))

    def bar(name: str, row: str, at_most: float, **more: str) -> dict[str, Any]:
        return {"name": name, "groups": 4, "measure": "gap", "row": row, "at_most": at_most} | more

    wide = "joint/G4/wide2/fits"
    bars = [bar("first", "joint/G4/fits", 0.1), bar("other", "joint/G4/fits", 0.03, way="plain")]
    bars += [
        bar("other", wide, 0.03, way="wide"),
        bar("none", wide, 0.01),
        bar("later", "joint/G2/fits", 0.1),
    ]
    text = bar_tables.bars({"ledger": "ledger.jsonl", "bars": bars})
    assert text.startswith(
        "4 bars: 1 met in the way named first, 1 more in another way, 1 missed in every way that was run, 1 not run."
    )
    assert "| other | wide | 4:1 | ≤ +0.030 | +0.0200 | met |" in text


def test_what_the_fits_train_and_small_steps_are_said_in_figures(tmp_path: Path) -> None:
    tuned = {"part": "tuning", "tunes": "fit", "rate": 5e-4, "token_visits": 16_000_000}
    rows = [entry(replace(PLAIN, fit=fit), loss) for fit, loss in (("fits", 3.05), ("layer03", 3.04))]
    rows += [
        entry(replace(PLAIN, part="tuning", tunes="fit", rate=5e-4, fit=fit), loss, flops=flops, **tuned)
        for fit, loss, flops in (("fits", 0.9, 2e15), ("layer03", 0.8, 3e15))
    ]
    small = replace(TAUGHT, batch=8192)
    rows += [entry(TAUGHT, 3.02, steps=83), entry(small, 3.01, steps=331)]
    rows += [
        entry(replace(cell, part="tuning", tunes="kd", rate=5e-4), 0.7, steps=1) for cell in (TAUGHT, small)
    ]
    found = record(ledger(tmp_path, *rows))
    text = findings.what_fits_train(found)
    assert "| whole layers, the rest at 0.03 of the rate | 0.8000 | 1.50 | 0.0005 | +0.0400 |" in text
    assert "- Whole layers take away 20% of the gap of the fits of attention (+0.0400 and +0.0500" in text
    assert "500,000 unique tokens, a thousand steps visit each 32 times" in text
    text = findings.small_steps(found)
    assert "| GQA-4 | +0.0200 | +0.0100 | not run | not run |" in text
    assert "- 331 steps in place of 83 end lower in 1 of 1 pairs, by +0.0100 to +0.0100 (one seed" in text
    assert (
        "- Tuning part, distilled, steps of 8,192 at 0.0005: 0.7000 (the best lies at the edge); the best"
        in text
    )


def test_what_few_tokens_give_is_said_for_every_way(tmp_path: Path) -> None:
    once = replace(TAUGHT, tokens=REST_TOKENS, batch=8192)
    passes = replace(TAUGHT, tokens=3 * REST_TOKENS, over="4.2M")
    rows = [entry(PLAIN, 3.05), entry(TAUGHT, 3.02), entry(once, 3.02, flops=4e15), entry(passes, 3.01)]
    rows += [
        entry(replace(TAUGHT, over="calibration"), 3.04),
        entry(Cell("joint", 4, "e2e"), 3.03, rates={"fit": 5e-4, "e2e": 1e-3}),
    ]
    found = record(ledger(tmp_path, *rows))
    text = findings.FINDINGS["few-tokens"](found)
    row = "| 0.50M | 0.00M | not run | {} | not run | not run |"
    assert "| fits, then distilled on the rest, 3 passes " + row.format("+0.0100") in text
    assert "| at conversion (`distill_steps`) " + row.format("+0.0300") in text
    assert "*Fits, then distilled on the rest* ends +0.0100 below *at conversion" in text
    assert "for 2.00 times the FLOPs (1 size)" in text
    assert "3.67M tokens" not in frontier.same_bytes(found)  # a column of its own for none of them
    assert frontier.row_name(passes) == "GQA-4, distilled 11M tokens in 3 passes"
    (label,) = (loss_tables.label(row) for row in found["rows"] if "3 passes" in row.get("over", ""))
    assert label.endswith("distillation, 11M tokens in 3 passes")


def test_shares_of_fits_are_compared_for_the_same_flops_and_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = {"tokens": 0, "equal_to": TAUGHT.key}
    short = replace(TAUGHT, fit="fits300", **like)
    mean = replace(TAUGHT, start="mean", fit="merged", **like)
    rows = [entry(TAUGHT, 3.02), entry(short, 3.01, unique_tokens=9_000_000, kl=0.05), entry(mean, 3.04)]
    rows += [entry(replace(TAUGHT, fit="fits300"), 3.03, flops=1e15)]
    large = replace(TAUGHT, tokens=13_565_000)
    as_large = replace(short, equal_to=large.key)
    rows += [entry(large, 3.005), entry(as_large, 3.004, rates={"fit": 5e-4, "kd": 1e-3})]
    path = ledger(tmp_path, *rows)
    found = record(path)
    text = findings.FINDINGS["against-mean"](found)
    assert "| 4:1 | +0.0400 | not run | not run | +0.0100 | +0.0200 |" in text
    assert "| 4:1 | 0.100 | not run | not run | 0.050 | 0.100 |" in text
    assert "at 4:1, in the order of the columns: 0.5M, not run, not run, 9.0M, 0.5M" in text
    text = findings.FINDINGS["shorter-fits"](found)
    assert "| 4:1 | 300 steps | +0.0300 | not run | not run | not run | 1.0e15 |" in text
    assert "| 4:1 | 1,000 steps | +0.0200 | +0.0050 | not run | not run | 2.0e15 |" in text
    tried = replace(as_large, tunes="kd", rate=2e-3)
    extra = [entry(tried, 3.003), entry(replace(tried, part="tuning"), 2.5)]
    monkeypatch.setattr("_quality_flops.RESULTS", tmp_path)
    path.rename(tmp_path / "quality_ledger.jsonl")
    text = larger_budget({"rows": extra})
    assert "| 4:1 | joint, 300 steps | 0.001 |  | +0.0040 |" in text  # the ledger's, whatever tuning chose
    assert "| 4:1 | joint, 300 steps | 0.002 | 2.5000 | +0.0030 |" in text
    assert "| 4:1 | joint, 1,000 steps | 0.0005 |  | +0.0050 |" in text


def test_floors_own_text_and_r_4_are_said_as_far_as_they_were_run(tmp_path: Path) -> None:
    found = record(ledger(tmp_path, entry(PLAIN, 3.05)))
    assert findings.FINDINGS["floors"](found).startswith("No model with G heads was trained from scratch")
    assert findings.FINDINGS["no-user-data"](found).endswith("Not run: 2:1, 4:1, 8:1 and 16:1.")
    wide = replace(TAUGHT, wide=4)
    rows = [entry(PLAIN, 3.05), entry(replace(PLAIN, text="generate"), 3.10), entry(wide, 3.01)]
    rows += [entry(Cell("scratch", 4), 3.02), entry(TAUGHT, 3.03)]
    rows += [entry(replace(TAUGHT, tokens=0, equal_to=wide.key), 3.02, unique_tokens=1_500_000)]
    found = record(ledger(tmp_path, *rows))
    text = findings.FINDINGS["floors"](found)
    assert "| 4:1 | +0.0200 | +0.0500 | +0.0300 | not run |" in text and "scratch: 2:1, 8:1 and 16:1" in text
    assert "| 4:1 | +0.0500 | +0.1000 | 2.00 |" in findings.FINDINGS["no-user-data"](found)
    text = findings.FINDINGS["wider"](found)
    assert "| wide R=4 | not run | +0.0100, 2.0e15 | not run | not run |" in text
    assert "| plain, for the FLOPs of R=4 |  | +0.0200, 2.0e15 |  |  |" in text
    text = frontier.same_bytes(found)
    assert "wide heads R=4 at the bytes of GQA-4 took for 2.71M tokens, 3.0 times" in text
    assert "GQA-4 is at +0.0200; wide heads (+0.0100) take away 50% of it" in text
    assert "*Fits on 0.5M tokens*: attention missed at 4:1" in findings.FINDINGS["bars-in-short"](found)


def test_a_row_at_a_rate_that_tuning_left_has_a_column_that_names_it(tmp_path: Path) -> None:
    old = [
        entry(cell, loss, rates={"fit": RATES["joint"], "kd": 1e-3})
        for cell, loss in ((TAUGHT, 3.03), (WIDE, 3.02))
    ]
    path = ledger(
        tmp_path, entry(PLAIN, 3.05), entry(TAUGHT, 3.01), *old
    )  # the newest at a rate is kept, whatever order
    found = record(path)
    text = frontier.same_bytes(found)
    head, *lines = (line for line in text.splitlines() if line.startswith("|"))
    assert head.endswith("| distilled on 2.71M tokens |")
    assert "| GQA-4 (4:1) | GQA-4 | +0.0500 | +0.0100 |" in lines
    assert "|  | wide R=2: 2 heads | not run | +0.0200 at rate 0.001 |" in lines
    losses = tables.tables(path)[1]
    assert "→ distillation, 2.71M tokens, rate 0.001 | 3.030 |" in losses
    assert "→ distillation, 2.71M tokens | 3.010 |" in losses
    rows = frontier.by_configuration(found["entries"])
    bar = {"measure": "not behind", "row": frontier.key_of(WIDE), "other": frontier.key_of(TAUGHT)}
    assert bar_tables.verdict(rows, bar) == ("+0.0200 against +0.0300 at rate 0.001", "met")
    bar = {"measure": "gap", "row": frontier.key_of(TAUGHT), "at_most": 0.02}
    assert bar_tables.verdict(rows, bar) == ("+0.0100", "met")
    bar = {"measure": "gap", "row": frontier.key_of(WIDE), "at_most": 0.01}
    assert bar_tables.verdict(rows, bar) == ("+0.0200 at rate 0.001", "**missed**")
    assert chart(found).count('style="fill:var(--s3)"') == 2 + 2 * 2  # the legend, and plain rows at one rate


def test_what_wide_heads_and_8_bits_take_away_is_said_at_one_rate(tmp_path: Path) -> None:
    wide = Cell("joint", 4, "fits", wide=2)
    rows = [entry(PLAIN, 3.10, flops=2e15), entry(wide, 3.04, flops=3e15)]
    rows += [entry(Cell("joint", 8, "fits", cache="int8"), 3.02, flops=2.1e15)]
    rows += [entry(Cell("joint", 8, "fits", cache="int8", wide=2), 3.01)]
    text = frontier.same_bytes(record(ledger(tmp_path, *rows)))
    assert (
        "- After fits, at the bytes of GQA-4, of the plain gap wide heads R=2 take away 60% for 1.50 times the FLOPs, "
        "GQA-8 with an 8-bit cache 80% for 1.05 times, and both together 90%."
    ) in text
    rows += [entry(replace(PLAIN, seed=1), 3.10), entry(replace(wide, seed=1), 3.06)]
    text = frontier.same_bytes(record(ledger(tmp_path, *rows)))
    assert "R=2 take away 50% (2 seeds) for 1.50 times" in text and "8-bit cache 80% for" in text


@pytest.mark.parametrize(
    ("bar", "measured", "verdict"),
    [
        ({"measure": "gap", "row": "joint/G4/fits", "at_most": 0.05}, "+0.0500", "met"),
        ({"measure": "gap", "row": "joint/G4/fits", "at_most": 0.049}, "+0.0500", "**missed**"),
        ({"measure": "gap", "row": "joint/G2/fits", "at_most": 0.5}, "not run", "not run"),
        ({"measure": "not behind", "row": "joint/G4/wide2/fits", "other": "joint/G4/fits"}, "+0.0200 against +0.0500", "met"),
        ({"measure": "not behind", "row": "joint/G4/fits", "other": "joint/G4/wide2/fits"}, "+0.0500 against +0.0200", "**missed**"),
        ({"measure": "share taken", "row": "joint/G4/wide2/fits", "other": "joint/G4/fits", "at_least": 0.59}, "60% of +0.0500", "met"),
        ({"measure": "share taken", "row": "joint/G4/wide2/fits", "other": "joint/G4/fits", "at_least": 0.61}, "60% of +0.0500", "**missed**"),
    ],
)  # fmt: skip
def test_a_verdict_is_computed(tmp_path: Path, bar: dict[str, Any], measured: str, verdict: str) -> None:
    path = ledger(tmp_path, entry(PLAIN, 3.05 - 1e-12), entry(Cell("joint", 4, "fits", wide=2), 3.02))
    rows = frontier.by_configuration(record(path)["entries"])
    assert bar_tables.verdict(rows, bar) == (measured, verdict)


def test_every_bar_names_a_row_that_is_planned() -> None:
    planned_keys = {frontier.key_of(cell) for cell in PLAN}
    found = json.loads((frontier.RESULTS / "quality_bars.json").read_text())["bars"]
    for bar in found:
        assert {bar["row"], bar.get("other", bar["row"])} <= planned_keys, bar
        assert f"/G{bar['groups']}/" in bar["row"] and bar["name"] and bar_tables.wanted(bar)
    (text,) = tables.tables(frontier.RESULTS / "quality_bars.json")
    assert text.count("\n| ") == len(found) + 2


def test_the_chart_draws_each_form_against_both_costs(tmp_path: Path) -> None:
    rows = [entry(PLAIN, 3.05), entry(TAUGHT, 3.01, flops=3e15, unique_tokens=3e6)]
    rows += [entry(Cell("joint", 8, "fits", cache="int8"), 3.01)]
    picture = chart(record(ledger(tmp_path, *rows)))
    assert picture.count("<polyline") == 4  # two forms at 4:1, in two panels
    assert picture.count('cx="') == 2 + 2 * 3  # the legend, and each row twice
    assert "prefers-color-scheme: dark" in picture and picture.count("cache of GQA-") == 2 * len(GROUPS)
    assert "FLOPs, fits included" in picture and "wide heads" not in picture


def test_gaps_by_position_are_means_over_seeds(tmp_path: Path) -> None:
    rows = [entry(PLAIN, 3.04), entry(replace(PLAIN, seed=1), 3.08)]
    rows += [entry(replace(TAUGHT, wide=2), 3.02), entry(Cell("original", 16, cache="int8"), 3.001)]
    text = frontier.positions(record(ledger(tmp_path, *rows)))
    assert "| positions | 0-16 | 16-32 |" in text and "| GQA-4, fits | +0.0600 | +0.0300 |" in text
    assert "| wide R=2: 2 heads (cache of GQA-4), distilled 2.71M tokens | +0.0200 | +0.0100 |" in text


def test_probes_are_rendered_with_what_counts() -> None:
    row = {"probe": "needle", "length": 1024, "texts": 200, "original": 0.5, "standard_error": 0.035}
    lost = {"GQA-4": {"share": 0.4, "lost": 0.1, "standard_error": 0.02}}
    other = {"GQA-2": {"share": 0.5, "lost": 0.0, "standard_error": 0.02}}
    rows = [row | {"counts": True, "results": lost | other}, row | {"counts": False, "results": {}}]
    record = {"model": "m", "choices": 16, "rows": rows, "provenance": {"hardware": {"gpu": "GPU"}}}
    text = probe_tables.probes(record)
    assert "- Three standard errors below the original, of 1 probes, on 1: GQA-4. On none: GQA-2." in text
    alone = probe_tables.probes(record | {"rows": rows[1:]})
    assert alone.endswith("Only the original has answered: no conversion was asked.")
    assert "1 of 2 probes count" in text and "chance 6.2%" in text
    assert "| needle, 1,024 tokens | 50.0% ± 3.5% | yes |" in text
    assert "| GQA-4 | **-10.0% ± 2.0%** |" in text and "| GQA-2 | +0.0% ± 2.0% |" in text


def test_probes_stand_beside_the_loss_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ledger(tmp_path, entry(PLAIN, 2.99), entry(TAUGHT, 3.02))
    path.rename(tmp_path / "quality_ledger.jsonl")
    monkeypatch.setattr(probe_tables, "RESULTS", tmp_path)
    lost = {"share": 0.4, "lost": 0.1, "standard_error": 0.02}
    row = {
        "probe": "needle",
        "length": 64,
        "texts": 9,
        "original": 0.5,
        "standard_error": 0.03,
        "counts": True,
    }
    row["results"] = {frontier.row_name(cell): lost for cell in (PLAIN, TAUGHT)}
    model = record(tmp_path / "quality_ledger.jsonl")["model"]
    text = probe_tables.probes(
        {"model": model, "choices": 16, "rows": [row], "provenance": {"hardware": {"gpu": "GPU"}}}
    )
    assert "| GQA-4, fits | -0.0100 | **-10.0% ± 2.0%** |" in text
    assert "- Of a lower loss than the original, and below it: GQA-4, fits, on 1." in text

"""The engine suite's verdicts, its page, and the decode benchmark's rows: what they say follows from what was run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(path: str) -> ModuleType:
    """A script of the benchmarks as a module."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The suite's comparison, with a reference of one prompt: tokens 3, 1, 2, the second of them almost a tie."""
    monkeypatch.setenv("ENGINES_WORK", str(tmp_path))
    (tmp_path / "references").mkdir()
    logits = np.eye(5)[[3, 1, 2]] * 4
    logits[1, 4] = 4 - 1e-5
    arrays = {"ids0": np.array([1, 2]), "tokens0": np.array([3, 1, 2]), "logits0": logits}
    np.savez(tmp_path / "references" / "x.npz", **arrays)
    return script("engines/common.py")


def test_equal_tokens_and_logits_are_equal(common: ModuleType) -> None:
    row = common.verdict("x", [[3, 1, 2]], [np.eye(5)[3] * 4])
    assert row == {"first_difference": [None], "relative_logits": 0.0, "verdict": "equal"}


def test_a_tie_may_part_but_nothing_else(common: ModuleType) -> None:
    assert common.verdict("x", [[3, 4, 0]])["verdict"] == "equal"
    assert common.verdict("x", [[3, 1, 0]]) == {"first_difference": [2], "verdict": "differs"}
    assert common.verdict("x", [[3, 1]])["verdict"] == "differs"  # too short
    assert common.verdict("x", [[0, 0, 0]], exact=False)["verdict"] == "runs"


def test_other_logits_differ_even_where_tokens_agree(common: ModuleType) -> None:
    off = np.eye(5)[3] * 4 + np.array([0.01, 0, 0, 0, 0])
    assert common.verdict("x", [[3, 1, 2]], [off])["verdict"] == "differs"
    assert common.verdict("x", [[3, 1, 2]], [off], tolerance=0.1)["verdict"] == "equal"
    unknown = np.where(np.arange(5) == 0, np.nan, off)  # an engine that gives the best few only
    assert common.verdict("x", [[3, 1, 2]], [unknown])["verdict"] == "equal"


def test_the_page_says_what_the_rows_say() -> None:
    page = script("engines/page.py")
    rows = [
        {"engine": "transformers 5", "way": "sdpa", "verdict": "equal", "relative_logits": 2e-6},
        {"engine": "transformers 5", "way": "beams", "verdict": "equal"},
        {"engine": "transformers 5", "way": "control: original", "verdict": "seen"},
    ]
    assert page.cell(rows) == "equal, 2e-06"
    assert page.cell([*rows, {"way": "eager", "verdict": "differs"}]) == "eager: **differs**"
    assert page.cell([{"way": "export", "verdict": "lacks", "reason": "no"}]) == "no"
    assert page.cell([]) == "not run"
    data = {
        "command": "c", "seed": 0, "hardware": "h", "versions": {}, "models": {"llama-g4": []},
        "rows": [{"of": "transformers", "model": "llama-g4", **row} for row in rows],
    }  # fmt: skip
    text = page.page(data)
    assert "| Llama, 16 → 4 heads | equal, 2e-06 |" in text and "original (seen)" in text


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    page = script("engines/page.py")
    if not page.RESULTS.exists():
        pytest.skip("no results yet")
    assert page.PAGE.read_text() == page.page(json.loads(page.RESULTS.read_text()))


def test_decode_rows_are_kept_and_compared_with_what_bytes_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = script("decode_speed.py")
    timed: list[tuple[int, int]] = []

    def row(path: str, model: Any, raw: dict[str, Any], *, batch: int, **more: Any) -> dict[str, Any]:
        heads = raw["num_key_value_heads"]
        assert sum(p.numel() for p in model.parameters()) > 0 and not any(
            p.is_meta for p in model.parameters()
        )
        if heads == 1:
            raise speed.Mha2gqaError("does not fit")
        timed.append((heads, batch))
        return {
            "batch": batch, "tokens_per_second": 100.0 / heads, "milliseconds_per_step": 1.0, "step": "s",
            "step_bytes": 1000 * heads, "share_of_bandwidth": 0.5, "attention": "sdpa", "warnings": [],
        }  # fmt: skip

    monkeypatch.setattr(speed, "decode_row", row)
    monkeypatch.setattr(speed, "copy_bandwidth", lambda *args: 1e9)
    command = ["x", "--tiny", "--device", "cpu", "--out", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(speed, "TINY", {**speed.TINY, "points": ["2x16"], "budgets": []})
    speed.main()
    speed.main()  # everything is there
    assert timed == [(8, 2), (2, 2)]
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [r["tokens_per_second"] for r in found["rows"]] == [12.5, 50.0, None]
    assert found["rows"][2]["reason"] == "does not fit"
    [one] = found["summary"]
    assert (one["kv_heads"], one["speed_up"], one["predicted"], one["of_predicted"]) == (2, 4.0, 4.0, 1.0)
    assert "does not fit" in (tmp_path / "rows.json.log").read_text() and "x4.00" in capsys.readouterr().out


def test_the_page_says_what_storing_costs_and_orders_caches_by_bytes() -> None:
    sys.path.insert(0, str(BENCHMARKS / "engines"))
    served = script("engines/served_page.py").served

    def row(model: str, weights: str, cache: str, loss: float, engine: str = "llama.cpp") -> dict[str, Any]:
        return {"model": model, "engine": engine, "weights": weights, "cache": cache, "loss": loss}

    def paired(made: dict[str, Any], *losses: float) -> dict[str, Any]:
        return made | {"chunk_losses": list(losses)}

    def about(heads: int) -> dict[str, Any]:
        numbers = heads * 64
        return {
            "kv_heads": heads,
            "cache_bytes_per_token": {
                "f16": numbers * 2.0,
                "q8_0": numbers * 1.0625,
                "q4_0": numbers * 0.5625,
            },
        }

    record = {
        "original": "m",
        "protocol": {"context": 512, "chunks": 16},
        "text": {"name": "t.jsonl"},
        "llama_cpp": "version 1",
        "packages": {"torchao": "0.18.0"},
        "hardware": {"cpu": "C", "cores": 2},
        "models": {"original": about(16), "g4": about(4) | {"calibration": {"unique_tokens": 1000, "token_visits": 0}}},
        "rows": [
            row("original", "f32", "f16", 3.0), row("g4", "f32", "f16", 3.1),
            row("original", "q8_0", "f16", 3.001), row("g4", "q8_0", "f16", 3.1025),
            row("original", "f32", "q4_0", 3.05), row("g4", "f32", "q8_0", 3.102),
        ],
    }  # fmt: skip
    text = served(record)
    assert (
        "| `m`, 16 → 4, refitted | llama.cpp | q8_0 | 3.0000 | +0.0010 | 3.1000 | +0.0025 | +0.0015 |" in text
    )
    assert "standard errors in" not in text  # one chunk tells nothing of errors
    other = record | {
        "original": "n",
        "protocol": {"context": 512, "chunks": 2},
        "rows": [
            paired(row("original", "f32", "f16", 3.0), 2.0, 4.0), paired(row("g4", "f32", "f16", 3.1), 2.1, 4.1),
            paired(row("original", "q8_0", "f16", 3.0), 2.0, 4.0), paired(row("g4", "q8_0", "f16", 3.12), 2.115, 4.125),
        ],
    }  # fmt: skip
    both = served(record, others=[other])
    assert (
        "+0.0000 ± 0.0000 | 3.1000 | +0.0200 ± 0.0050 | +0.0200 ± 0.0050 |" in both
        and "(2 to 16 of them)" in both
    )
    assert (
        "Of 1 comparisons the conversion pays more by over 2 standard errors in 1, and less in 0. q8_0: +0.0200 to +0.0200."
        in both
    )
    assert (
        "0.0200 ± 0.0050 (`n`, 16 → 4, refitted, q8_0 in llama.cpp), where sharing heads itself costs 0.1000"
        in both
    )
    further = about(4) | {"calibration": {"unique_tokens": 1000, "token_visits": 9}}
    more = [paired(row("g4+", kind, "f16", 3.1), 2.1, 4.1) for kind in ("f32", "q8_0")]
    other |= {"models": other["models"] | {"g4+": further}, "rows": [*other["rows"], *more]}
    said = "the same heads: `n`, 16 → 4, q8_0 in llama.cpp +0.0200 ± 0.0050 refitted, +0.0000 ± 0.0000 regressed."
    assert said in served(record, others=[other])
    lines = text.splitlines()
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in (
            "| original, 16 KV heads | f16",
            "| original, 16 KV heads | q4_0",
            "| GQA-4 | f16",
            "| GQA-4 | q8_0",
        )
    ]
    assert order == sorted(order)
    assert "| original, 16 KV heads | q4_0 | 576 | 28% | 3.0500 | +0.0500 |" in text
    assert "- `m`, 16 → 4, refitted: merged on 1,000 tokens" in text
    assert served(None) == "" and served({"rows": []}) == ""
    assert "have not been compared" in text
    timed = [
        {
            "kv_heads": heads, "weights": "f16", "cache": cache, "tokens_per_second": speed, "rounds": [{"tokens_per_second": speed}],
            "weight_bytes": 2e9, "kv_bytes": 3e9,
        }
        for heads, cache, speed in ((32, "f16", 10.0), (32, "q4_0", 12.0), (8, "f16", 25.0), (8, "q4_0", 30.0))
    ]  # fmt: skip
    shape = {"layers": 8, "hidden": 2048, "heads": 32, "share": 4, "batch": 8, "context": 4096, "threads": 2}
    speeds = {"rows": timed, "setup": shape, "engine": "llama.cpp 1", "hardware": {"cpu": "C"}}
    text = served(record, speeds)
    assert "| original, 16 KV heads | q4_0 | 576 | 28% | 3.0500 | +0.0500 | 12.0 (×1.20) |" in text
    assert "| GQA-4 | f16 | 512 | 25% | 3.1000 | +0.1000 | 25.0 (×2.50) |" in text
    assert "fewer heads decode ×2.50, a 4-bit cache of about the same bytes ×1.20" in text
    assert "both together ×3.00" in text and "have not been compared" not in text
    hqq = [
        row("original", "float32", cache, loss, "transformers")
        for cache, loss in (("f32", 3.0), ("hqq-4", 3.04))
    ]
    text = served(record | {"rows": [*record["rows"], *hqq]}, speeds)
    assert "| 28% | 3.0500 | +0.0500 | 3.0400 | 12.0 (×1.20) |" in text and "*Loss in transformers*" in text
    of_two = speeds | {"setup": shape | {"share": 2}}  # another share of heads: no figure of that form
    assert "| GQA-4 | f16 | 512 | 25% | 3.1000 | +0.1000 |  |" in served(record, of_two)


def test_losses_of_chunks_are_read_where_the_last_words_are_lost(tmp_path: Path) -> None:
    quality = script("engines/served_quality.py")
    said = "tokenizing ..\n[1]10.0000,[2]20.0000,"  # no [3], no final estimate
    asked: list[Any] = []
    models = SimpleNamespace(
        args=SimpleNamespace(chunks=2, context=512, threads=1, llama_cpp_bin=tmp_path),
        text="t",
        folders={"original": "", "g4": ""},
        gguf=lambda name, weights: (tmp_path, {}),
        run=lambda *words: (asked.append(words), said)[1],
    )
    row = quality.in_llama_cpp(models, "original", "q8_0", "f16")
    assert asked[0][asked[0].index("--chunks") + 1] == 3
    assert row["chunk_losses"] == pytest.approx([np.log(10), 2 * np.log(20) - np.log(10)])
    assert row["loss"] == pytest.approx(np.log(20))
    models.args.chunks = 3
    with pytest.raises(SystemExit, match="2 chunks of 3"):
        quality.in_llama_cpp(models, "original", "q8_0", "f16")
    models.args = SimpleNamespace(engines=["transformers"], weights_only=True)
    assert [(key["model"], key["weights"]) for key, _ in quality.rows(models)] == [
        (name, bits) for bits in ("float32", "int8") for name in ("original", "g4")
    ]
    models.args = SimpleNamespace(engines=quality.ENGINES, weights_only=False)
    assert len(list(quality.rows(models))) == 2 * (3 + 2 + 2 + 2 + 2)


def test_quantised_caches_of_transformers_are_measured_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = script("quantised_cache.py")
    words = [
        "x",
        "--tiny",
        "--device",
        "cpu",
        "--caches",
        "plain",
        "fp8",
        "quanto-4",
        "--out",
        str(tmp_path / "q.json"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    speed.main()
    speed.main()  # every row is there
    record = json.loads((tmp_path / "q.json").read_text())
    assert [(row["kv_heads"], row["cache"]) for row in record["rows"]] == [
        (heads, cache) for heads in (8, 2) for cache in ("plain", "fp8", "quanto-4")
    ]
    plain, eight, missing = record["rows"][:3]
    assert plain["tokens_per_second"] > 0 and plain["cache_bytes"] == 4 * eight["cache_bytes"]
    assert missing["tokens_per_second"] is None and "optimum-quanto" in missing["reason"]
    assert plain["cache_bytes"] == 4 * record["rows"][3]["cache_bytes"]
    sys.path.insert(0, str(BENCHMARKS / "engines"))
    page = script("engines/speed_page.py")
    text = page.gpu(record)
    assert "| 8 KV heads | plain | 2 | 70 |" in text and "quanto" not in text and page.gpu(None) == ""


def test_served_speeds_are_measured_in_turn_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(BENCHMARKS / "engines"))
    speed = script("engines/served_speed.py")
    asked: list[tuple[str, str]] = []

    def bench(file: Path, *, cache_type: str, **more: Any) -> Any:
        asked.append((file.stem, cache_type))
        row = dict.fromkeys(("first_token_milliseconds", "kv_bytes", "weight_bytes", "step_bytes"), 1.0)
        return SimpleNamespace(
            models=[row | {"tokens_per_second": float(len(asked))}], engine="llama.cpp 1", copy_bandwidth=1e9
        )

    monkeypatch.setattr(speed, "bench", bench)
    monkeypatch.setattr(speed, "llama_cpp_sources", Path)
    monkeypatch.setattr(speed, "to_gguf", lambda folder, raw, file, *rest: file.write_text(str(folder)))
    command = ["x", "--tiny", "--llama-cpp", "s", "--llama-cpp-bin", "b", "--work", str(tmp_path / "w")]
    monkeypatch.setattr(sys, "argv", [*command, "--rounds", "2", "--out", str(tmp_path / "s.json")])
    speed.main()
    order = [(f"{h}-{w}", c) for w in ("f16", "q8_0") for h in (8, 2) for c in ("f16", "q8_0", "q4_0")]
    assert asked == [*order, *order]
    speed.main()
    assert len(asked) == 24
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["tokens_per_second"] for row in rows] == [7.0 + i for i in range(12)]
    assert rows[0]["cache_bytes_per_token"] == 4 * rows[3]["cache_bytes_per_token"] == 2 * 2 * 8 * 32 * 2
    assert (tmp_path / "w" / "2" / "tokenizer.json").exists()

"""Reports on synthetic results: honest words, valid front matter, one file that needs nothing else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mha2gqa.assets import heldout_path, tiny_model_path
from mha2gqa.errors import UsageError
from mha2gqa.evaluation import ModelResult
from mha2gqa.evaluation.generation_metrics import METRICS as GENERATED
from mha2gqa.report import (
    Report,
    display_name,
    grids,
    headline,
    html_page,
    hub_name,
    human_bytes,
    human_count,
    limits,
    markdown,
    markdown_table,
    model_card,
    plots,
    tiles,
    write_pictures,
    write_report,
)
from mha2gqa.report.card_file import card_metadata, license_of, write_card
from mha2gqa.report.content import Table, models_table
from mha2gqa.report.generation_scores import METRICS
from mha2gqa.report.headline import best_rows
from mha2gqa.report.layers import layers_table
from mha2gqa.report.lines import Line
from mha2gqa.report.numbers import fixed, ratio_text
from mha2gqa.report.svg import method_colour, spread, styled_figure
from mha2gqa.report.templating import escape_markdown, fenced
from mha2gqa.report.terminal import plain, render, show
from mha2gqa.report.text import printable


def row(role: str, loss: float, perplexity: float, bits: float, kv: int) -> dict[str, Any]:
    figures = {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits}
    curve = [
        {"low": 2**i, "high": 2 ** (i + 1) - 1, "tokens": 9, "loss": loss + 1 / (i + 1)} for i in range(8)
    ]
    sizes = {"tokens": 510976, "kv_bytes_per_token": kv}
    return {"role": role, "path": role, **figures, **sizes, "positions": curve}


ROWS = [
    row("original", 3.310, 27.385, 1.28, 16384),
    row("converted", 3.371, 29.108, 1.30, 4096),
    row("uptrained", 3.325, 27.799, 1.286, 4096)
    | {
        "paired": {"difference": 0.015, "low": 0.011, "high": 0.019, "units": 998},
        "kl": 0.0712,
        "top1_agreement": 0.914,
        "agreement": {"against": "original"},
    },
]
LAYERS = [
    {
        "layer": i,
        "relative_error": 0.1 + 0.02 * i,
        "residual": 0.1 + 0.02 * i,  # the same under its earlier name
        "relative_error_neighbours": 0.2 + 0.01 * i,
        "norm_ratio": {"k": 0.9, "v": 0.8},
        "error_fitted": 0.1,
        "error_merged": 0.4,
        "error_refitted": 0.2,
        "grouping": [[0, 5, 2, 11], [1, 4, 3, 15], [6, 7, 8, 9], [10, 12, 13, 14]],
    }
    for i in range(8)
]


def terminal(report: Report) -> str:
    return plain([models_table(report.models)])


def sample(**changes: Any) -> Report:
    report = Report(
        title="ref-llama-30m-gqa4",
        source="acme/ref-llama-30m",
        models=ROWS,
        protocol="blocks",
        settings={"window": 512, "bos": "none"},
        data={"tokens": 510976, "sha256": "ab" * 32, "paths": ["valid.jsonl"]},
        num_heads=16,
        num_kv_heads=(16, 4),
        method="joint",
        layers=LAYERS,
        budget={"alpha": 0.01, "tokens": 3_932_160, "steps": 60},
        curves={
            "evaluation": [(0, 3.371), (1_966_080, 3.34), (3_932_160, 3.325)],
            "training": [(65536 * i, 3.6 - 0.25 * (1 - 0.95**i)) for i in range(1, 61)],
            "held-out": [(65536 * i, 3.37 - 0.045 * i / 60) for i in range(0, 61, 10)],
        },
        frontier=[
            {"method": method, "alpha": alpha, "num_kv_heads": g, "kv_bytes_per_token": 1024 * g,
             "perplexity": 27.4 + base / g, "loss": 3.31 + base / 20 / g}
            for method, base in (("mean", 60.0), ("joint", 4.0))
            for alpha in (0.0, 0.01)
            for g in (1, 2, 4, 8)
        ],
        batch=8,
        license="apache-2.0",
        datasets=["HuggingFaceFW/fineweb"],
        provenance={"source commit": "0123abcd", "seed": "0", "torch": "2.11"},
        recipe="source: acme/ref-llama-30m\nconvert:\n  groups: 4\n",
        command="mha2gqa run recipes/x.yaml --set convert.groups=4",
    )  # fmt: skip
    return dataclasses.replace(report, **changes)


def few_pictures(**changes: Any) -> Report:
    """The sample without layers, curves and sweep: eight pictures less to draw, for tests of the words."""
    return sample(**{"layers": [], "curves": {}, "frontier": []} | changes)


@functools.cache
def sample_page() -> str:
    """The page of the sample as it is."""
    return html_page(sample())


def test_units() -> None:
    assert [human_bytes(x) for x in (0, 1023, 1024, 524288, 1.5 * 2**30)] == [
        "0 B", "1023 B", "1 KiB", "512 KiB", "1.5 GiB"
    ]  # fmt: skip
    assert [human_count(x) for x in (0, 999, 65536, 2e12, None)] == ["0", "999", "65.5k", "2T", "–"]


def test_terminal_table_is_aligned() -> None:
    lines = terminal(sample()).splitlines()
    assert lines[0].split()[:3] == ["model", "loss", "perplexity"]
    assert [line.split()[0] for line in lines[2:]] == ["original", "converted", "uptrained"]
    ends = {
        line.index(loss) + len(loss)
        for line, loss in zip(lines[2:], ("3.3100", "3.3710", "3.3250"), strict=True)
    }
    assert len(ends) == 1
    assert "+6.3 %" in lines[3] and "+1.5 %" in lines[4] and "16 KiB" in lines[2] and "4 KiB" in lines[3]
    wide = plain([Table([("a", "<"), ("b", ">")], [["漢字", "1"], ["é", "12"]])]).splitlines()
    assert wide == ["a      b", "--------", "漢字   1", "é     12"]


def test_markdown_escapes_pipes() -> None:
    assert markdown_table([("a|b", "<")], [["x|y"]]).splitlines()[2] == "| x\\|y |"


def test_headline_reports_what_was_measured() -> None:
    assert headline(sample()) == (
        "The KV cache is 4× smaller; perplexity 27.385 → 27.799 (+1.5 %) after uptraining."
    )
    converted = headline(sample(models=ROWS[:2]))
    assert "29.108 (+6.3 %) after conversion, without any training" in converted
    assert "worse than the original" in limits(sample())[0]
    better = [ROWS[0], {**ROWS[2], "bits_per_byte": 1.27, "perplexity": 27.0, "loss": 3.29}]
    assert not any("worse" in line for line in limits(sample(models=better)))


def test_paired_differences_and_agreement_are_told() -> None:
    page = sample_page()
    assert "+0.0150 nats/token against the original, 95 % interval +0.0110 to +0.0190" in page
    assert "the same most likely token at 91.4% of positions" in markdown(sample())


def test_generated_text_is_in_every_table_and_in_the_front_matter() -> None:
    """Metrics of any model make a column; comparisons are sentences."""
    paired = {"wer": {"difference": 0.42, "low": -0.1, "high": 0.93, "units": 120}}
    rows = [
        {**ROWS[0], "generation": {"examples": 120, "wer": 5.0, "bleu": None, "exact_match": None}},
        {**ROWS[1], "generation": None},
        {**ROWS[2], "generation": {"examples": 120, "wer": 5.42, "exact_match": 83.333, "paired": paired}},
    ]
    report = few_pictures(models=rows, auto_class="AutoModelForSpeechSeq2Seq")
    head, _, *lines = terminal(report).splitlines()
    assert head.endswith("KV/token  WER %  as original %") and "BLEU" not in head
    assert lines[0].split()[-2:] == ["5.00", "–"] and lines[2].split()[-2:] == ["5.42", "83.33"]
    said = "+0.42 points of WER against the original, 95 % interval -0.10 to +0.93 (paired over 120 examples)"
    for text in (html_page(report), markdown(report), model_card(report)):
        assert said in text and "as original %" in text and "83.33" in text
    (results,) = (
        pytest.importorskip("huggingface_hub").ModelCard(model_card(report)).data.to_dict()["model-index"]
    )
    figures = {metric["type"]: metric["value"] for row in results["results"] for metric in row["metrics"]}
    assert figures["wer"] == 5.42 and figures["exact_match"] == 83.333
    assert results["results"][0]["task"]["type"] == "automatic-speech-recognition"
    assert METRICS.keys() == set(GENERATED)


def test_the_cache_of_an_encoder_decoder_is_that_of_a_sequence() -> None:
    lengths = {"context": 448, "source": 1500}
    caches = [{"self": 4096 * n, "cross": 8192 * n} | lengths for n in (4, 1, 1)]
    report = sample(models=[{**row, "kv_bytes_per_sequence": c} for row, c in zip(ROWS, caches, strict=True)])
    said = "Cache of a sequence (448 target tokens, 1,500 encoder positions), self + cross: original 16 KiB + 32 KiB = 48 KiB"
    for text in (html_page(report), markdown(report)):
        assert said in text and text.count("4 KiB + 8 KiB = 12 KiB") == 1  # not again for the same cache
    assert "48 KiB → 12 KiB a sequence" in html_page(report)


def test_figures_of_agreement_have_the_names_that_evaluate_gives_them() -> None:
    fields = ModelResult.__dataclass_fields__
    assert ROWS[2].keys() - {"role"} <= fields.keys()


def test_other_tokenizers_are_compared_by_bits_per_byte() -> None:
    rows = [ROWS[0], {**ROWS[2], "tokens": 400000, "perplexity": 99.0}]
    assert "+0.5 % (bits/byte)" in headline(sample(models=rows))


def test_equal_counts_of_other_tokens_are_still_compared_by_bits_per_byte() -> None:
    rows = [{**r, "loss": None, "perplexity": None} for r in ROWS[:2]]
    assert terminal(sample(models=rows)).splitlines()[-1].split()[3:6] == ["+1.6", "%", "(bits/byte)"]


def test_a_loss_of_thirty_digits_does_not_widen_the_table() -> None:
    assert [fixed(x) for x in (3.7484e30, 999_999_999.0, -2e9)] == [
        "3.75e+30",
        "999,999,999.000",
        "-2.00e+09",
    ]


def test_a_sweep_is_told_by_its_best_result_at_each_g() -> None:
    """Not by its last row, which is the worst of them here."""
    losses = {(4, "mean"): 3.9, (4, "joint"): 3.4, (1, "joint"): 3.6, (1, "mean"): 5.0}
    rows: list[dict[str, Any]] = [
        ROWS[0],
        *(
            {**row("converted", loss, math.exp(loss), 1.3, 1024 * g), "label": f"G={g} {method}", "groups": g}
            for (g, method), loss in losses.items()
        ),
    ]
    report = sample(models=rows)
    assert [name for _, name, _ in tiles(report)] == ["G=4 joint", "G=1 joint"]
    told = "best of 4 results at each G: G=4 joint: 29.964 (+9.4 %); G=1 joint: 36.598 (+33.6 %)."
    assert headline(report).endswith(told) and told in markdown(report)
    page = html_page(report)
    lines = page[page.index("Loss by length of context") : page.index("Error of the merge")]
    assert all(word in lines for word in ("G=4 joint", "G=1 joint")) and "mean" not in lines
    assert best_rows(sample().models) == []


def front_matter(report: Report) -> dict[str, Any]:
    """The front matter of its model card."""
    found: dict[str, Any] = yaml.safe_load(model_card(report).split("---\n")[1])
    return found


def test_infinite_loss_is_shown_and_does_not_crash() -> None:
    rows = [
        ROWS[0],
        {**ROWS[1], "loss": float("inf"), "perplexity": float("inf"), "bits_per_byte": float("inf")},
    ]
    report = few_pictures(models=rows)
    assert "inf" in terminal(report) and "inf" in html_page(report)
    assert "model-index" not in front_matter(report)


NAN_ROW = {
    **ROWS[2],
    **dict.fromkeys(("loss", "perplexity", "bits_per_byte", "kl"), "nan"),  # as JSON holds it
    "paired": {"difference": "nan", "low": "nan", "high": "inf", "units": 998},
    "top1_agreement": 0.014,
    "positions": [{"low": 1, "high": 1, "tokens": 9, "loss": "nan"}],
}


@pytest.mark.parametrize("value", ["nan", math.nan])
def test_nan_is_a_result_in_every_form(value: Any) -> None:
    rows = [ROWS[0], ROWS[1], {k: value if v == "nan" else v for k, v in NAN_ROW.items()}]
    report = sample(models=rows, frontier=[r | {"num_kv_heads": 4, "method": "joint"} for r in rows])
    for text in (terminal(report), markdown(report), html_page(report)):
        assert "nan" in text
    assert "perplexity 27.385 → nan (nan) after uptraining" in headline(report)
    assert "worse than the original" in limits(report)[0]
    assert "nan nats/token against the original, 95 % interval nan to inf" in markdown(report)
    assert "model-index" not in front_matter(report)
    swapped = few_pictures(
        models=[NAN_ROW | {"role": "original"}, ROWS[1] | {"groups": 4}],
        frontier=[ROWS[1] | {"num_kv_heads": 4, "method": "m"}],
    )
    assert "Perplexity nan before" in headline(swapped) and "<svg" in html_page(swapped)
    data = {"command": "evaluate", "protocol": "blocks", "settings": {}, "data": {}, "models": rows}
    assert "KL nan nats/token from the original, the same most likely token at 1.4%" in render(data)


def test_changes_have_one_form() -> None:
    assert [ratio_text(x, 2.0) for x in (2.2, 1.99, 8.834, 27.6, 2e30, "inf")] == [
        "+10.0 %", "-0.5 %", "+342 %", "+1,280 %", "+1.0e+32 %", "inf"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/srv/models/llama-7b/", "llama-7b"),
        ("../models/llama-7b", "llama-7b"),
        ("C:\\models\\llama-7b", "llama-7b"),
        ("acme/llama", "acme/llama"),
        ("allenai/c4:en:validation", "allenai/c4:en:validation"),
        ("builtin:tiny", "builtin:tiny"),
        (str(tiny_model_path()), "builtin:tiny"),
        (str(heldout_path()), "builtin:heldout"),
        ("/srv/text/*.jsonl", "*.jsonl"),
    ],
)
def test_display_names(name: str, shown: str) -> None:
    assert display_name(name) == shown


def test_no_form_for_readers_elsewhere_shows_a_path_of_this_machine() -> None:
    report = few_pictures(
        title="x of /srv/secret/y",
        source="/srv/secret/ref-llama-30m",
        models=[{**r, "path": f"/srv/secret/{r['path']}", "role": ""} for r in ROWS],
        data={"tokens": 1, "paths": ["/srv/secret place/valid.jsonl"]},
        provenance={"teacher": "/srv/secret/teacher", "text": "/srv/secret/a.jsonl, /srv/secret/b.jsonl"},
        recipe="source: /srv/secret place/model\nconvert:\n  calibration: [/srv/secret/a.txt, b/c.txt]\n",
        command="mha2gqa run r.yaml --set 'source=/srv/secret place/x' --set output=/srv/secret/o --set convert.groups=4",
    )
    for text in (html_page(report), markdown(report), model_card(report)):
        assert "/srv" not in text and "secret" not in text
        assert "a.jsonl, b.jsonl" in text
        assert "run r.yaml --set source=x --set output=o --set convert.groups=4" in text
    assert "source: model\n" in markdown(report) and "b/c.txt" in markdown(report)
    address = "see https://huggingface.co/acme/x and 3/4 of ../a/b"
    assert html_page(few_pictures(provenance={"where": address})).count(address) == 1


def test_front_matter_is_what_the_hub_reads() -> None:
    card = pytest.importorskip("huggingface_hub").ModelCard(model_card(sample()))
    data = card.data
    assert (data.base_model, data.license, data.library_name) == (
        "acme/ref-llama-30m",
        "apache-2.0",
        "transformers",
    )
    assert data.datasets == ["HuggingFaceFW/fineweb"] and "mha2gqa" in data.tags
    assert data.model_name == "ref-llama-30m-gqa4"
    metrics = {result.metric_type: result.metric_value for result in data.eval_results}
    assert metrics == {"perplexity": 27.799, "loss": 3.325, "bits_per_byte": 1.286}
    assert all("blocks" in result.metric_name for result in data.eval_results)


def test_front_matter_guesses_nothing() -> None:
    front = front_matter(sample(source="out/local-model/x", license=None, datasets=()))
    assert not {"base_model", "license", "datasets"} & set(front)
    assert (
        hub_name("a/b")
        and not hub_name("./a")
        and not hub_name("a/b/c")
        and not hub_name("/a")
        and not hub_name("a")
        and not hub_name("data/*.jsonl")
    )


def test_a_folder_here_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`models/llama` and `data/valid.jsonl` read like names of the Hub: what is there decides."""
    (tmp_path / "acme" / "ref-llama-30m").mkdir(parents=True)
    (tmp_path / "acme" / "valid.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    report = sample(data={"paths": ["acme/valid.jsonl"]})
    front = front_matter(report)
    assert "base_model" not in front and "huggingface.co" not in model_card(report)
    assert front["model-index"][0]["results"][0]["dataset"]["type"] == "valid.jsonl"


def test_a_dataset_of_the_hub_is_named_without_its_split() -> None:
    front = front_matter(sample(data={"paths": ["allenai/c4:en:validation"]}))
    assert front["model-index"][0]["results"][0]["dataset"]["type"] == "allenai/c4"


def test_the_card_says_how_this_result_is_loaded() -> None:
    usual = model_card(sample())
    assert 'AutoModelForCausalLM.from_pretrained("PATH_OR_NAME", dtype="auto")' in usual
    assert 'AutoTokenizer.from_pretrained("PATH_OR_NAME")' in usual
    heard = model_card(sample(auto_class="AutoModelForSpeechSeq2Seq"))
    assert 'AutoProcessor.from_pretrained("PATH_OR_NAME")' in heard and "AutoTokenizer" not in heard
    report = sample(auto_class="AutoModelForSeq2SeqLM", own_code=True)
    assert 'AutoTokenizer.from_pretrained("PATH_OR_NAME", trust_remote_code=True)' in model_card(report)
    assert (
        'AutoModelForSeq2SeqLM.from_pretrained("PATH_OR_NAME", dtype="auto", trust_remote_code=True)'
        in model_card(report)
    )
    results = front_matter(report)["model-index"][0]["results"]
    assert results[0]["task"]["type"] == "text2text-generation"


def test_markdown_has_table_limits_and_recipe() -> None:
    text = markdown(sample())
    assert (
        "| converted | 3.3710 | 29.108 | +6.3 % |" in text
        and "protocol blocks, window 512, BOS: none, 510,976 tokens" in text
    )
    assert "## Limits" in text and "```yaml\nsource:" in text


class Strict(HTMLParser):
    """Checks that elements close in order, and collects what a page would fetch."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.urls: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.urls += [value or ""] if name in ("src", "href", "xlink:href") else []
            self.ids += [value or ""] if name == "id" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def test_page_is_self_contained_and_well_formed() -> None:
    page = sample_page()
    parser = Strict()
    parser.feed(page)
    assert not parser.open and not {"script", "link", "img", "iframe"} & parser.tags
    assert all(url.startswith("#") for url in parser.urls), parser.urls
    assert "@import" not in page and "url(http" not in page
    assert len(parser.ids) == len(set(parser.ids)), "two pictures share an id"
    assert set(re.findall(r"url\(#([^)]+)\)", page)) | {u[1:] for u in parser.urls} <= set(parser.ids)
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) == 10
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "#0102" not in picture and "var(--ink)" in picture and "<text" in picture
    assert "prefers-color-scheme: dark" in page and "@media print" in page and 'name="viewport"' in page
    variables = set(re.findall(r"var\((--\w+)\)", page))
    assert variables <= set(re.findall(r"(--\w+):", page))
    assert len(page) < 400_000


def test_paper_shows_what_is_folded_and_cuts_no_long_line() -> None:
    style = sample_page()
    printed = style[style.index("@media print") : style.index("</style>")]
    assert "details::details-content { content-visibility: visible" in printed
    assert re.search(r"pre \{ white-space: pre-wrap", printed)


def test_page_escapes_what_users_wrote() -> None:
    page = html_page(few_pictures(title="<b>x</b>", source='"><script>alert(1)</script>', recipe="a: <i>"))
    assert "<script" not in page and "<b>x" not in page and "&lt;i&gt;" in page


def test_page_of_a_bare_result() -> None:
    page = html_page(Report("t", "s", [ROWS[0]]))
    assert "<svg" in page and "Provenance" not in page  # one bar: the original's cache
    assert "1 model(s)" in html_page(Report("t", "s", [{"path": "x", "loss": 1.0}]))


def test_large_models_stay_small_pages() -> None:
    groups = [[h * 4 + i for i in range(4)] for h in range(16)]
    layers = [{"layer": i, "relative_error": 0.1, "grouping": groups} for i in range(80)]
    assert len(html_page(few_pictures(layers=layers))) < 1_500_000


def test_same_report_same_bytes() -> None:
    assert html_page(sample()) == sample_page()


def test_write_report(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "README.md").write_text("the source's own card", encoding="utf-8")
    for _ in range(2):  # a second report replaces ours, never the kept original
        written = write_report(
            few_pictures(), tmp_path / "out", ("json", "markdown", "html", "card"), card=checkpoint
        )
    assert [path.name for path in written] == ["report.json", "report.md", "report.html", "README.md"]
    assert (checkpoint / "README.base.md").read_text(encoding="utf-8") == "the source's own card"
    assert json.loads(written[0].read_text(encoding="utf-8"))["models"][2]["perplexity"] == 27.799
    assert yaml.safe_load((checkpoint / "README.md").read_text(encoding="utf-8").split("---")[1])["license"]
    with pytest.raises(UsageError, match=r"report.formats: 'pdf' is not a format; choose from json"):
        write_report(sample(), tmp_path, ("pdf",))


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (320, True)])
def test_page_in_a_real_browser(tmp_path: Path, width: int, dark: bool) -> None:
    """No horizontal scrolling at any width, no console message, a screenshot that is not blank."""
    probe = (
        "<script>addEventListener('load',()=>{const d=document.documentElement;"
        "document.title='probe '+d.scrollWidth+' '+innerWidth+' '"
        "+getComputedStyle(document.body).backgroundColor})</script>"
    )
    page = tmp_path / "page.html"
    page.write_text(html_page(sample()).replace("</body>", probe + "</body>"), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    # Chromium's window is never narrower than 500 pixels: a phone is an iframe of that width.
    frame = tmp_path / "frame.html"
    scheme = "dark" if dark else "light"
    frame.write_text(
        f"<meta name=color-scheme content={scheme}><body style='margin:0'>"
        f"<iframe src=page.html width={width} height=4000 style='border:0;color-scheme:{scheme}' "
        "onload='setTimeout(()=>document.title=this.contentDocument.title)'>",
        encoding="utf-8",
    )
    flags += ["--allow-file-access-from-files", "--virtual-time-budget=3000"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    keep = os.environ.get("MHA2GQA_SCREENSHOTS")
    shot = (Path(keep) if keep else tmp_path) / f"report-{width}-{scheme}.png"
    command = [str(CHROMIUM), *flags, f"--window-size={max(width, 500)},3000"]
    subprocess.run(
        [*command, f"--screenshot={shot}", frame.as_uri()], check=True, capture_output=True, timeout=120
    )
    dumped = subprocess.run(
        [*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120
    ).stdout
    match = re.search(r"probe (\d+) (\d+) rgb\((\d+)", dumped)
    assert match, dumped[:500]
    assert int(match[1]) <= int(match[2]) == width
    assert (int(match[3]) < 128) == dark
    assert shot.stat().st_size > 20_000


def test_tasks_of_every_model_stand_in_one_table() -> None:
    scored = {**ROWS[0], "path": "a", "tasks": {"hellaswag": {"acc": 0.5, "acc_stderr": 0.1}}}
    data = {"command": "evaluate", "protocol": "blocks", "settings": {}, "data": {}}
    lines = render(data | {"models": [scored, {**ROWS[1], "path": "b"}]}).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("task"))
    assert lines[place].split() == ["task", "metric", "a", "b"]
    assert lines[place + 2].split() == ["hellaswag", "acc", "0.5000", "–"] and "acc_stderr" not in lines
    assert "task" not in render(data | {"models": ROWS})


def _grid() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    points = [
        {"method": method, "alpha": alpha, "num_kv_heads": g, "kv_bytes_per_token": 1024 * g, "perplexity": 30.0,
         "loss": base - 10 * alpha + g / 100, "decode_milliseconds_per_step": 1.0 + g / 8}
        for method, base in (("mean", 8.0), ("first", 9.0))
        for alpha in (0.0, 0.05, 0.1)
        for g in (1, 4)
    ]  # fmt: skip
    original = {
        "loss": 3.3,
        "perplexity": 27.4,
        "kv_bytes_per_token": 16384,
        "decode_milliseconds_per_step": 3.0,
    }
    return points, original


def test_a_sweep_draws_what_its_grid_varies() -> None:
    points, original = _grid()
    assert list(grids.sweep_pictures(points, original)) == ["frontier", "methods", "alphas", "times"]
    methods = grids.methods_svg(points, original)
    for g in (1, 4):  # every G, each bar with its number
        assert f">G = {g}<" in methods
        assert all(
            f">{base - 10 * alpha + g / 100:.4f}<" in methods for base in (8, 9) for alpha in (0, 0.05, 0.1)
        )
    times = grids.times_svg(points, original)
    assert ">loss 7.0100<" in times and ">loss 7.0400<" in times  # the best at G = 1 and at G = 4
    assert ">1.12 ms<" in times and ">original 3 ms<" in times
    short = [p for p in points if p["method"] == "mean" and p["alpha"] < 0.1 and p["num_kv_heads"] == 4]
    assert list(grids.sweep_pictures(short, original)) == ["frontier"]
    assert grids.sweep_pictures([], original) == {}


def test_a_method_has_one_colour_in_every_picture() -> None:
    pictures = grids.sweep_pictures(*_grid())
    assert method_colour("mean") != method_colour("first") != method_colour("joint")
    for picture in ("frontier", "methods", "alphas"):
        used = set(re.findall(r"var\(--s(\d)\)", pictures[picture]))
        assert used == {"1", "2", "5"}, picture  # original, mean, first


def test_the_frontier_has_an_axis_of_losses_with_numbers() -> None:
    points, original = _grid()
    svg = grids.frontier_svg(points, original)
    assert ">loss, nats/token<" in svg and "perplexity" not in svg
    assert all(f">{loss}<" in svg for loss in ("3.3000", "7.0100", "9.0100", "7.0400", "9.0400"))


def test_many_alphas_do_not_write_over_each_other() -> None:
    alphas = [0, 0.0001, 0.0002, 0.001, 0.005, 0.01]
    points = [
        {"method": "mean", "alpha": a, "num_kv_heads": 4, "loss": 4 - 10 * a, "kv_bytes_per_token": 1}
        for a in alphas
    ]
    svg = grids.alphas_svg(points, None)
    assert ">0<" in svg and ">0.005<" in svg and ">0.01<" in svg and ">0.0001<" not in svg
    assert ">mean, G = 4: 3.9000<" in svg


def test_labels_are_spread_and_stay_in_order() -> None:
    assert spread([1.0, 1.1, 3.0], 0.5) == pytest.approx([0.8, 1.3, 3.0])
    assert spread([3.0, 3.0, 3.0], 1.0) == pytest.approx([2.0, 3.0, 4.0])
    placed = spread([0.0, 5.0, 0.1, 0.2, 4.9], 1.0)
    ordered = sorted(placed)
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert placed[0] < placed[2] < placed[3] < placed[4] < placed[1]


def test_a_sweep_with_uptrained_rows_does_not_say_that_nothing_was_trained() -> None:
    rows = [ROWS[0], {**ROWS[1], "label": "G=4 mean alpha 0.01", "groups": 4, "alpha": 0.01}]
    assert not any("No uptraining" in line for line in limits(sample(models=rows, budget={})))
    rows[1] = rows[1] | {"alpha": 0.0}
    assert any("No uptraining" in line for line in limits(sample(models=rows, budget={})))
    assert "Every result is worse than the original" in limits(sample(models=rows))[0]


def test_a_picture_file_brings_its_own_colours(tmp_path: Path) -> None:
    points, original = _grid()
    report = sample(frontier=points, models=[original | {"role": "original"}])
    files = write_pictures(report, tmp_path / "pictures")
    assert [file.name for file in files] == ["frontier.svg", "methods.svg", "alphas.svg", "times.svg"]
    text = files[1].read_text()
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert used and all(f"{name}:#" in text for name in used) and "prefers-color-scheme: dark" in text
    for element in ElementTree.fromstring(text).iter():  # viewers without CSS variables draw the attributes
        for name, variable in re.findall(r"(\w+): var\((--\w+)\)", element.get("style", "")):
            assert f"{variable}:{element.get(name)};" in text


# --- the picture of uptraining -----------------------------------------------------------------------------


def plotted(curve: list[tuple[float, float]], original: float | None) -> tuple[list[list[float]], list[str]]:
    """Points of the lines of the picture as matplotlib holds them, and its texts."""
    with styled_figure(3.0) as (_, axes):
        plots.draw_evaluation(axes, curve, original)
        lines = [[float(y) for y in line.get_ydata()] for line in axes.lines]
        return lines, [text.get_text() for text in axes.texts]


def test_the_uptraining_picture_shows_the_numbers_of_the_table() -> None:
    report = sample()
    lines, texts = plotted(list(report.curves["evaluation"]), ROWS[0]["loss"])
    assert lines == [[3.371, 3.34, 3.325], [3.310, 3.310]]  # the curve; the original
    cells = terminal(report)
    assert texts == ["3.3710", "3.3250", "original 3.3100"]
    assert all(text.removeprefix("original ") in cells for text in texts)


def test_one_axis_holds_one_quantity() -> None:
    page = sample_page()
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles[:3] == [
        "Loss over uptraining",
        "Training objective",
        "Validation split of the training run",
    ]
    first = page[page.index("Loss over uptraining") : page.index("Training objective")]
    assert "objective" not in first and "validation" not in first


def test_a_curve_of_one_point_is_not_drawn() -> None:
    curves = {"evaluation": [(0, 3.3)], "training": [(40960, 0.9116)], "held-out": [(0, 3.6)]}
    page = html_page(few_pictures(curves=curves))
    assert "uptraining tokens</text>" not in page and "Loss over uptraining" not in page
    assert plots.evaluation_svg([(0, 3.3), (1, math.nan)], 3.1) == ""


# --- escaping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain max_ppl_ratio +6.3 % 1.5x", "plain max_ppl_ratio +6.3 % 1.5x"),
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("&lt;b> & R&D", "&amp;lt;b> & R&D"),
        ("a|b", "a\\|b"),
        ("[x](javascript:y)", "\\[x\\](javascript:y)"),
        ("*a* _b_ `c` ~~d~~ $e$ \\", "\\*a\\* \\_b\\_ \\`c\\` \\~\\~d\\~\\~ \\$e\\$ \\\\"),
        ("one\n# two", "one # two"),
        ("# two", "\\# two"),
        ("> quoted", "&gt; quoted"),
        ("- item", "\\- item"),
        ("2. item", "2\\. item"),
        ("---", "\\---"),
        ("\x1b[31mred", "\\\\x1b\\[31mred"),
        ("    code", "code"),
    ],
)
def test_markdown_is_escaped(text: str, escaped: str) -> None:
    assert escape_markdown(text) == escaped
    assert escape_markdown(escape_markdown(text)) == escaped  # once is enough


@given(
    st.text(
        alphabet=st.one_of(st.sampled_from(" \t\n#*_-+>=[]()<&;|~`$\\\\!.:1a"), st.characters()), max_size=24
    )
)
@example("1.")
@example("- - -")
@example("`a`")
@example("&#60;b")
@example("_a_b_")
def test_escaped_markdown_reads_as_the_text_itself(text: str) -> None:
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(escape_markdown(text))
    shown = printable(" ".join(text.split()))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"] * bool(shown)
    for token in tokens[1:2]:
        assert {child.type for child in token.children or ()} <= {"text", "text_special"}
        assert "".join(child.content for child in token.children or ()) == shown


def test_a_fence_is_longer_than_those_inside() -> None:
    assert fenced("a\n```\nb", "sh") == "````sh\na\n```\nb\n````"


EVIL = "<script>alert(1)</script> <img src=x onerror=y> [a](b) | c\n# second heading"


def test_no_word_of_users_becomes_markup() -> None:
    report = few_pictures(
        title=EVIL,
        source=EVIL,
        models=[{**ROWS[0], "label": EVIL}, *ROWS[1:]],
        data={"tokens": 1, "paths": [EVIL]},
        provenance={EVIL: EVIL},
        warnings=[EVIL],
        recipe=f"title: |\n  ```\n  {EVIL}",
        command="mha2gqa run '```' '<script>'",
    )
    for text in (markdown(report), model_card(report)):
        outside = re.sub(r"(?s)^(`{3,})\w*\n.*?\n\1$|\A---\n.*?\n---$", "", text, flags=re.M)
        assert "<script" not in outside and "<img" not in outside and "[a](b)" not in outside
        tokens = MarkdownIt("commonmark").enable("table").parse(text.split("\n---\n", 1)[-1])
        inner = [child for token in tokens for child in token.children or ()]
        assert not {"html_block", "html_inline", "link_open", "image"} & {t.type for t in [*tokens, *inner]}
        assert sum(token.type == "heading_open" and token.tag == "h1" for token in tokens) == 1
        assert sum(token.type == "fence" for token in tokens) == 2
    page = html_page(report)
    assert "<script" not in page and "<img" not in page and page.count("<h1>") == 1
    assert yaml.safe_load(model_card(report).split("\n---\n")[0])["model-index"][0]["name"] == EVIL


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("\x07\x9b", "\\x07\\x9b"),
        ("x\u202ey", "x\\u202ey"),
        ("\ud800", "\\ud800"),
        ("é漢", "é漢"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    data = {
        "command": "evaluate",
        "protocol": "p",
        "settings": {},
        "data": {},
        "models": [{**ROWS[0], "path": text}],
    }
    assert shown in render(data) and shown in html_page(few_pictures(models=[{**ROWS[0], "label": text}]))


# --- the terminal ------------------------------------------------------------------------------------------


def test_output_to_a_file_has_no_styles_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a/" + "very/" * 40 + "long-name"
    data = {
        "command": "evaluate",
        "protocol": "p",
        "settings": {},
        "data": {},
        "models": [{**ROWS[0], "path": name}],
    }
    show(data)
    out = capsys.readouterr().out
    assert out == render(data) + "\n" and "\x1b" not in out and name in out and "…" not in out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert "[bold]x" in plain([Line("[bold]x :smile:")]) and ":smile:" in plain([Line(":smile:")])


def test_a_terminal_gets_styles_and_whole_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    data = {"command": "evaluate", "protocol": "p", "settings": {}, "data": {}, "models": ROWS}
    show(data)
    out = capsys.readouterr().out
    assert "\x1b[" in out
    bare = re.sub(r"\x1b\[[\d;]*m", "", out)
    row_of = next(line for line in bare.splitlines() if line.startswith("uptrained"))
    assert row_of.split() == ["uptrained", "3.3250", "27.799", "+1.5", "%", "1.2860", "511k", "4", "KiB"]


def test_rich_is_imported_only_to_print() -> None:
    code = (
        "import mha2gqa.report, mha2gqa.report.views, sys; assert not {'rich', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_stand_in_the_order_of_the_stages() -> None:
    headings = [heading for heading, _ in layers_table(LAYERS).columns]
    assert headings == [
        "layer", "error as neighbours", "error", "key norm", "value norm", "merged", "refitted", "fitted", "groups"
    ]  # fmt: skip
    old = [{"layer": 0, "residual": 0.25, "norm_ratio": {"k": 1.0, "v": 1.0}}]  # of an earlier version
    table = layers_table(old)
    assert ([h for h, _ in table.columns], list(table.rows)) == (["layer", "error"], [["0", "0.2500"]])


CONVERTED = {
    "command": "convert", "source": "acme/x y", "output": "out", "method": "joint", "warnings": ["look"],
    "num_kv_heads": {"before": 16, "after": 4}, "kv_bytes_per_token": {"before": 16384, "after": 4096},
    "layers": [], "verification": [{"name": "files", "ok": True, "detail": "1 file"}],
    "calibration": {"losses": {"fitted": 3.35, "original": 3.31, "merged": 3.609}},
    "recommended": "mha2gqa evaluate 'acme/x y' out --data HELDOUT.jsonl",
}  # fmt: skip


def test_convert_ends_with_what_was_gained_lost_and_is_next() -> None:
    lines = [line for line in render(CONVERTED).splitlines() if line]
    assert lines[-4:] == [
        "warning: look",
        "KV cache 4x smaller: 16 KiB -> 4 KiB a token.",
        "Loss on held-out calibration text: original 3.3100, merged 3.6090, fitted 3.3500",
        "Next: mha2gqa evaluate 'acme/x y' out --data HELDOUT.jsonl",
    ]


# --- cards of folders --------------------------------------------------------------------------------------


def checkpoint(folder: Path, **manifest: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    base = {key: value for key, value in CONVERTED.items() if key != "output"}
    (folder / "mha2gqa.json").write_text(json.dumps(base | manifest), encoding="utf-8")
    return folder


def test_a_card_is_made_from_the_manifest_alone(tmp_path: Path) -> None:
    texts = {"texts": ["acme/corpus:en", "/srv/text/a.jsonl"], "losses": {"original": 3.31, "fitted": 3.35}}
    folder = checkpoint(tmp_path / "out", source="acme/ref", calibration=texts)
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: acme-1\n---\n# Ref\n", encoding="utf-8"
    )
    text = write_card(folder).read_text(encoding="utf-8")
    card = pytest.importorskip("huggingface_hub").ModelCard(text)
    assert (card.data.base_model, card.data.license, card.data.license_name) == (
        "acme/ref",
        "other",
        "acme-1",
    )
    assert card.data.datasets == ["acme/corpus"] and card.data.eval_results is None
    assert (
        "16 KV heads became 4" in text
        and "original 3.3100, fitted 3.3500" in text
        and "not evaluated yet" in text
    )
    assert "> **Note:** look" in text and "/srv" not in text and "a.jsonl" in text
    assert (folder / "README.base.md").read_text(encoding="utf-8").endswith("# Ref\n")
    first = text
    assert (
        write_card(folder).read_text(encoding="utf-8") == first
    )  # ours is replaced, the licence still found


def test_a_card_of_an_uptrained_folder_says_what_was_trained(tmp_path: Path) -> None:
    losses = {"held_out_start": 3.64, "held_out_end": 3.53}
    trained = {"budget": {"tokens": 40960, "alpha": 0.01}, "losses": losses, "teacher": "/srv/secret/teacher"}
    trained |= {"recipe": {"data": ["t.jsonl"]}, "train": "all", "notices": ["ended early"]}
    text = write_card(checkpoint(tmp_path / "out", uptrain=trained)).read_text(encoding="utf-8")
    assert "uptrained on 41k tokens (alpha 0.01); validation loss 3.6400 → 3.5300" in text
    assert "- teacher: teacher" in text and "ended early" in text and "No uptraining" not in text


def test_a_source_card_that_mentions_us_is_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    (folder / "README.md").write_text("# Llama\n\nConvert it with mha2gqa.\n", encoding="utf-8")
    write_card(folder)
    assert "Convert it with" in (folder / "README.base.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"---\n{",
        b"---\n- a\n---\n",
        b"\xff\xfe---",
        b"---\nlicense: [1]\n---\n",
        b"---\nmodel-index: 3\n---\n",
    ],
)
def test_a_broken_card_of_the_source_is_no_licence_and_no_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "README.md").write_bytes(content)
    assert license_of([tmp_path / "README.md", tmp_path / "none.md"]) == {}
    assert isinstance(card_metadata(tmp_path / "README.md"), dict)


def test_a_card_without_front_matter_is_read_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from mha2gqa.report.card_file import card_metadata

    card = tmp_path / "README.md"
    for text in ("# A model\n\nNo metadata.\n", "---\n# Between rules, which never close\n", ""):
        card.write_text(text, encoding="utf-8")
        assert card_metadata(card) == {}
    card.write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    assert card_metadata(card) == {"license": "mit"}
    assert caplog.text == "" and capsys.readouterr().err == ""

"""The documentation is true: blocks run, options and files exist, figures are those of the results, links lead somewhere.

Blocks of `sh` and `python` run in order, page by page, in a folder that holds a small `MODEL`, `TEXT.jsonl` and
`HELDOUT.jsonl`, for speech a `WHISPER` with `RECORDINGS`, for translation a `TRANSLATOR` with `PAIRS.jsonl`. A block below `<!-- not run: why -->` is only parsed.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml
from conftest import pico_llama, word_tokenizer
from seq2seq_models import audio_folder, saved, saved_whisper
from test_layout import LAYERS, PACKAGE
from training import write_text

from mha2gqa.cli.commands import cli
from mha2gqa.config import load_recipe, recipe_from_dict

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(p for p in (ROOT / "docs").glob("*.md") if not p.name.startswith("_")),
]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.S | re.M
)
OTHERS = {
    "--name",
    "--nproc_per_node",
    "--shutdown_timeout",
    "--check",
    "--compare",
    "--tensor-parallel-size",
    "--model-path",
}  # options of other programs


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    kind: str
    body: str
    runs: bool

    def commands(self) -> Iterator[list[str]]:
        """Words of each command line, comments and continuations resolved."""
        for line in self.body.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(page: Path, *kinds: str) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, m["kind"], m["body"], m["why"] is None) for m in found if m["kind"] in kinds]


def own_words(words: list[str]) -> list[str] | None:
    """What follows `mha2gqa`, however it is started, up to a pipe; None for other programs."""
    words = words[: words.index("|")] if "|" in words else words
    if words[0] == "mha2gqa":
        return words[1:]
    if words[0] in ("torchrun", "accelerate") and "mha2gqa" in words:
        return words[words.index("mha2gqa") + 1 :]
    return None


def parse(words: list[str]) -> click.Context:
    """The command with its options, not run: unknown names and impossible values fail."""
    name, *rest = words
    return cli.commands[name].make_context(name, rest, parent=click.Context(cli, obj={}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama with 32 heads, as the commands in the documentation suppose."""
    folder = tmp_path_factory.mktemp("docs") / "MODEL"
    pico_llama(hidden_size=64, num_attention_heads=32, num_key_value_heads=32).save_pretrained(folder)
    word_tokenizer(folder)
    return folder


def encoder_decoder(folder: Path, page: str) -> None:
    """What the pages of speech and translation suppose."""
    texts = [f"w{i} w{i + 7} w{(3 * i) % 50}" + " w5" * (i % 4) for i in range(24)]
    if page == "speech":
        saved_whisper(folder / "WHISPER")
        audio_folder(folder / "RECORDINGS", texts[:8])
        audio_folder(folder / "HELDOUT_RECORDINGS", texts[8:12], pitch=170)
    elif page == "translation":
        saved(folder / "TRANSLATOR", "marian")
        rows = [json.dumps({"source": f"w1 w{i} w2", "target": text}) + "\n" for i, text in enumerate(texts)]
        (folder / "PAIRS.jsonl").write_text("".join(rows[:18]))
        (folder / "HELDOUT_PAIRS.jsonl").write_text("".join(rows[18:]))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
@pytest.mark.usefixtures("few_steps")
def test_blocks_run(page: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = [block for block in blocks(page, "sh", "python") if block.runs]
    if not todo:
        pytest.skip("no blocks to run")
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "MODEL").symlink_to(model)
    write_text(tmp_path / "TEXT.jsonl", 70)
    write_text(tmp_path / "HELDOUT.jsonl", 20, seed=1)
    encoder_decoder(tmp_path, page.stem)
    for block in todo:
        if block.kind == "python":
            exec(compile(block.body, f"{page.name}", "exec"), {"__name__": "docs"})
            continue
        for words in block.commands():
            own = own_words(words)
            assert own is not None and words[0] == "mha2gqa", f"{page.name}: cannot run {words}"
            cli.main(own, prog_name="mha2gqa", standalone_mode=False, obj={})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_parse(page: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("source: MODEL\n")
    for block in blocks(page, "sh"):
        for words in block.commands():
            own = own_words(words)
            if own is None:
                continue
            context = parse(own)
            if context.info_name == "uptrain":
                load_recipe(tmp_path / "r.yaml", [f"uptrain.{text}" for text in context.params["overrides"]])
    for block in blocks(page, "yaml"):
        recipe_from_dict(yaml.safe_load(block.body))


def test_options_that_pages_name_exist() -> None:
    known = {
        name for c in [cli, *cli.commands.values()] for p in c.params for name in (*p.opts, *p.secondary_opts)
    }
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        named = set(re.findall(r"(?<=[`\s(])--[a-z][\w-]*", text))
        assert named <= known | OTHERS | {"--help"}, (page.name, sorted(named - known - OTHERS))


def test_the_architecture_page_names_every_room_and_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", text.split("## Which file")[0], re.M)
    assert rooms == LAYERS
    for name in re.findall(r"`([\w./-]+\.(?:py|json|css|yaml))`", text):
        places = [ROOT / name, PACKAGE / name, PACKAGE / "uptraining" / name]
        assert any(place.exists() for place in places), name


def test_every_documented_command_is_there_and_none_is_left_out() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split("## Output")[0]
    named = re.findall(r"`([a-z]+)[ A-Z…/]*`", text)
    assert set(named) == set(cli.commands)


def test_the_navigation_of_the_site_names_every_page() -> None:
    """A page that is left out ends `make docs`."""
    pages = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    named = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert set(named) == {str(path) for path in pages if not path.name.startswith("_")}


def test_make_targets_are_documented() -> None:
    targets = set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split())  # type: ignore[index]
    text = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `make ([\w-]+)", text, re.M)) == targets


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("command", ["benchmarks/pages.py --check", "tools/check_links.py"])
def test_figures_are_those_of_the_results_and_links_lead_somewhere(command: str) -> None:
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.stem)
def test_pictures_have_their_colours_where_css_variables_are_unknown(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    style = text[text.index("<style>") : text.index("</style>")]
    light = dict(re.findall(r"(--\w+):\s*(#\w+)", style[: style.index("@media")]))
    assert "var(" not in style  # no rule can have an attribute beside it
    coloured = 0
    for element in ElementTree.fromstring(text).iter():
        for name, variable in re.findall(r"([\w-]+):\s*var\((--\w+)\)", element.get("style", "")):
            assert element.get(name) == light[variable], ElementTree.tostring(element)
            coloured += 1
    assert coloured


def test_a_broken_link_and_a_missing_heading_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_links

    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("# One `two`, three\n\n```sh\n[x](not-a-link.md)\n```\n# One two three\n")
    good = "[1](a.md#one-two-three) [2](a.md#one-two-three-1) [3](https://example.org/x) `[4](none.md)` [5](#here)"
    (tmp_path / "b.md").write_text(f"# Here\n{good}\n[6](none.md) ![7](a.png) [8](a.md#four)\n")
    assert check_links.broken(tmp_path / "b.md") == [
        "b.md: no such file: none.md",
        "b.md: no such file: a.png",
        "b.md: no such heading: a.md#four",
    ]


def test_a_results_file_on_no_page_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    assert pages.missing() == []
    for path in pages.made.results():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "convert_speed_new.json").symlink_to(pages.result("convert_speed"))
    monkeypatch.setattr(pages.made, "RESULTS", tmp_path)
    assert pages.missing() == ["convert_speed_new"]
    section = "a\n<!-- results: convert_speed_new -->\nold\n<!-- end -->\nz\n"
    filled = pages.filled(section)
    assert "old" not in filled and "| `cp -r` |" in filled and filled.endswith("<!-- end -->\nz\n")
    assert pages.filled(filled) == filled


def test_the_readme_states_the_measured_price_of_a_7b() -> None:
    """Minutes and GPU memory of all layers, rounded up, as `calibrate_speed.json` has them."""
    said = re.search(r"all (\d+) layers in (\d+) minutes and\s+(\d+) GiB", (ROOT / "README.md").read_text())
    rows = json.loads((ROOT / "benchmarks" / "results" / "calibrate_speed.json").read_text())["rows"]
    whole = next(row for row in rows if row["name"] == "7b-whole")
    price = (whole["layers"], math.ceil(whole["wall_seconds"] / 60), math.ceil(whole["gpu_gib"]))
    assert said is not None and tuple(map(int, said.groups())) == price

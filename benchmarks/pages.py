"""Fill the figures of README.md and `docs/` from `benchmarks/results/`: none of them is typed by hand.

python benchmarks/pages.py            # rewrites what has changed, and says what
python benchmarks/pages.py --check    # exit 1 if that would change anything

What stands between `<!-- results: NAME -->` and `<!-- end -->` is made of `benchmarks/results/NAME.json` (or `.jsonl`): its first
table, and the others folded. `<!-- headline -->` receives the table of the front pages, whose chart is
`docs/pictures/headline.svg`; `<!-- finding: NAME -->` what `_quality_findings.py` makes of the quality ledger, which
`docs/pictures/quality.svg` shows. Every results file that has tables must stand on a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import _headline
import _quality_chart
import tables as made
from _quality_findings import FINDINGS

ROOT = Path(__file__).parents[1]
CHART = ROOT / "docs" / "pictures" / "headline.svg"
FRONTIER = ROOT / "docs" / "pictures" / "quality.svg"
SECTION = re.compile(
    r"(<!-- (?:results: (?P<name>[\w.-]+)|finding: (?P<finding>[\w-]+)|headline) -->\n).*?(?P<end><!-- end -->)",
    re.S,
)


def body(path: Path) -> str:
    """The tables of a results file; all but the first folded away."""
    first, *others = made.tables(path)
    folded = "\n\n".join(others)
    summary = "Every row, and what it cost" if len(others) > 1 else "What each row cost"
    fold = f'\n\n<details markdown="1">\n<summary>{summary}</summary>\n\n{folded}\n\n</details>'
    return first + (fold if folded else "")


def filled(text: str) -> str:
    """A page with every section filled.

    Raises:
        FileNotFoundError: A section names no results file.
        KeyError: A section names no finding.
    """

    def fill(match: re.Match[str]) -> str:
        if match["finding"]:
            text = FINDINGS[match["finding"]](_frontier_record())
        else:
            text = body(result(match["name"])) if match["name"] else _headline.table(_headline_record())
        return f"{match[1]}\n{text}\n\n{match['end']}"

    return SECTION.sub(fill, text)


def result(name: str) -> Path:
    """The results file of a name without its suffix.

    Raises:
        FileNotFoundError: There is none.
    """
    for path in made.results():
        if path.stem == name:
            return path
    raise FileNotFoundError(f"{name}: no such file in {made.RESULTS}")


def _headline_record() -> dict[str, Any]:
    return made.read_record(result(_headline.SOURCE))


def _frontier_record() -> dict[str, Any]:
    return made.read_record(result("quality_ledger"))


def pages() -> dict[Path, str]:
    """Every file with figures, as it should be."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text(encoding="utf-8") for path in found}
    pages = {path: filled(text) for path, text in texts.items() if SECTION.search(text)}
    frontier = _quality_chart.chart(_frontier_record())
    return pages | {CHART: _headline.chart(_headline_record()), FRONTIER: frontier}


def missing() -> list[str]:
    """Results files with tables that stand on no page."""
    named = {match["name"] for text in pages().values() for match in SECTION.finditer(text)}
    return [path.stem for path in made.results() if path.stem not in named and made.tables(path)]


def main() -> int:
    """Rewrite or check the pages."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'is not what the results make of it' if check else 'rewritten'}")
    absent = missing()
    for name in absent:
        print(
            f"benchmarks/results/{name}.json: on no page; write `<!-- results: {name} -->` and `<!-- end -->` on one"
        )
    return int(bool(absent) or (check and bool(stale)))


if __name__ == "__main__":
    sys.exit(main())

"""Fill the figures of README.md from `benchmarks/results/`: nothing in it is typed by hand.

python benchmarks/readme.py            # rewrites README.md
python benchmarks/readme.py --check    # exit 1 if that would change it

A section between `<!-- results: NAME -->` and `<!-- end -->` receives a table of every results file whose
name begins with NAME, and stays empty without any: the first table of each, `python benchmarks/tables.py` prints them all.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tables import RENDERERS, RESULTS

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"(<!-- results: (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.S)


def first_table(path: Path) -> str:
    """The first table known for a results file; empty where none is."""
    record = json.loads(path.read_text(encoding="utf-8"))
    tables = [renderer(record) for renderer in RENDERERS.get(record.get("command", ""), ())[:1]]
    return "\n\n".join([f"### {path.stem.replace('_', ' ')}", *tables]) if tables else ""


def filled(text: str) -> str:
    """README text with every section filled from the results that exist."""

    def fill(match: re.Match[str]) -> str:
        files = sorted(RESULTS.glob(f"{match['name']}*.json"))
        tables = "\n\n".join(filter(None, map(first_table, files)))
        return f"{match[1]}\n{tables}\n\n{match[3]}" if tables else f"{match[1]}{match[3]}"

    return SECTION.sub(fill, text)


def main() -> int:
    """Rewrite or check README.md."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

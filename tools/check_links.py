"""Check the relative links and anchors of every Markdown file that git knows. Needs no network.

python tools/check_links.py            # exit 1 and one line for each broken link
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.S | re.M)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.M)


def markdown_files() -> list[Path]:
    """Tracked and new Markdown files, ignored ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in sorted(listed.stdout.split("\0")) if name and (ROOT / name).exists()]


def anchor(heading: str) -> str:
    """The anchor that GitHub and mkdocs give a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*_]", r"\1", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain).strip())


def anchors(path: Path) -> set[str]:
    """Every anchor of a page; a repeated heading gets a number."""
    found: dict[str, int] = {}
    out = set()
    for match in HEADING.finditer(FENCE.sub("", path.read_text(encoding="utf-8"))):
        name = anchor(match[1])
        count = found.get(name, 0)
        found[name] = count + 1
        out.add(name if count == 0 else f"{name}-{count}")
    return out


def broken(path: Path) -> list[str]:
    """What is wrong with the links of one file."""
    problems = []
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", text)):
        target = unquote(match["target"])
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # another site
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            problems.append(f"{path.relative_to(ROOT)}: no such file: {target}")
        elif fragment and file.suffix == ".md" and fragment not in anchors(file):
            problems.append(f"{path.relative_to(ROOT)}: no such heading: {target}")
    return problems


def main() -> int:
    """Print every broken link."""
    problems = [problem for path in markdown_files() for problem in broken(path)]
    print("\n".join(problems), end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

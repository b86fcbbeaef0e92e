"""Recordings: Debian's `pocketsphinx-testdata`, and sentences of a text spoken by espeak-ng.

    python benchmarks/real/speech.py WORK --text TEXT.jsonl [--minutes 6] [--words 1000] [--uptraining 60] [--prompts FOLDER]

Writes WORK/speech/real (LibriVox and spoken cards, with their transcripts), WORK/speech/calibration (so many minutes),
WORK/speech/synthetic (so many words, of other sentences and other voices) and WORK/speech/uptraining (so many
minutes). Needs the Debian packages `pocketsphinx-testdata` and `espeak-ng`; where they are unpacked elsewhere,
`--recorded` names the folder of the first. With `--prompts`, the folder of Debian's `asterisk-core-sounds-en-g722` (prompts of a
telephone exchange, spoken by one woman; PyPI's G722 decodes them), also WORK/speech/calibration-recorded and
WORK/speech/uptraining-recorded: of those minutes as many as the prompts fill are hers, the others espeak-ng's.
"""

from __future__ import annotations

import argparse
import array
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


RATE = 16_000
SHORTEST = 1.0  # seconds of a prompt that is used: numbers and letters are shorter


def prompts(source: Path) -> list[bytes]:
    """The prompts of at least a second as samples of 16 bits, 16,000 a second, in a random order."""
    from G722 import G722

    found = []
    for path in sorted(source.rglob("*.g722")):
        samples = G722(RATE, 64_000).decode(path.read_bytes())
        if len(samples) >= SHORTEST * RATE and max(map(abs, samples)) > 500:  # not the recorded silences
            found.append(array.array("h", samples).tobytes())
    random.Random(0).shuffle(found)
    return found


def with_prompts(folder: Path, spoken_ones: Path, given: Sequence[bytes], minutes: float) -> float:
    """Prompts, and sentences spoken by espeak-ng to make up so many minutes; sound alone, without transcripts.

    Returns:
        Minutes of the prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    for number, samples in enumerate(given):
        if seconds + len(samples) / 2 / RATE > 60 * minutes:
            break
        with wave.open(str(folder / f"prompt-{number:04d}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(samples)
        seconds += len(samples) / 2 / RATE
    recorded_seconds = seconds
    for path in sorted(spoken_ones.glob("*.wav")):
        with wave.open(str(path)) as file:
            seconds += file.getnframes() / file.getframerate()
        if seconds > 60 * minutes:
            break
        (folder / path.name).write_bytes(path.read_bytes())
    return recorded_seconds / 60


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6, help="of speech to calibrate on")
    parser.add_argument("--words", type=int, default=1000, help="of speech to score on")
    parser.add_argument("--uptraining", type=float, default=0, help="minutes of speech to train on")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="test data of pocketsphinx")
    parser.add_argument("--prompts", type=Path, help="prompts of asterisk, to calibrate and train on")
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
    if given.prompts is None:
        return
    found = prompts(given.prompts)
    used = len(found) // 4
    for name, minutes, recordings in (
        ("calibration", given.minutes, found[:used]),
        ("uptraining", given.uptraining, found[used:]),
    ):
        long = with_prompts(folder / f"{name}-recorded", folder / name, recordings, minutes)
        print(f"{name}-recorded: {minutes:.1f} minutes, {long:.1f} of them prompts")


if __name__ == "__main__":
    main()

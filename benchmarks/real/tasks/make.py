"""Five tasks of lm-eval over files of text, without a network.

    python benchmarks/real/tasks/make.py OUT --text TEXT.jsonl [--count 200]
    mha2gqa evaluate MODEL … --data TEXT.jsonl --tasks OUT/cloze.yaml,OUT/order.yaml,OUT/entity.yaml,OUT/copy.yaml,OUT/sum.yaml

cloze: the last word of a sentence, among last words of other sentences. order: the sentence that follows, among later ones
of the same document. entity: a name in a passage, among the passage's other names. copy: the next word of a list that
is said again. sum: the sum of two numbers after three examples. The likeliest choice counts (`acc`); choices of unequal length
are also compared by characters (`acc_norm`).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

CHOICES = 4
SENTENCE = re.compile(r"[A-Z][^.!?\n]{40,200}[.!?](?= |\n|$)")
NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{3,}\b(?! [A-Z])")
Item = dict[str, Any]


def read(path: Path) -> list[str]:
    """The documents of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [str(json.loads(line)["text"]) for line in file]


def item(prompt: str, right: str, others: Sequence[str], draw: random.Random) -> Item:
    """A question: the right choice at a random place among the others, each with the space before it."""
    choices = [right, *others]
    draw.shuffle(choices)
    return {"prompt": prompt, "choices": [f" {x}" for x in choices], "answer": choices.index(right)}


def cloze(documents: Sequence[str], draw: random.Random) -> Iterator[Item]:
    """The last word of a sentence, after the sentence before it."""
    found = [pair for text in documents for pair in _pairs(text)]
    draw.shuffle(found)
    ends = sorted(
        {
            words[-1]
            for _, sentence in found
            if len(words := sentence[:-1].split()) > 7 and words[-1].isalpha()
        }
    )
    for before, sentence in found:
        *start, last = sentence[:-1].split()
        if last in ends and last not in before:
            others = draw.sample([x for x in ends if x.lower() != last.lower()], CHOICES - 1)
            yield item(f"{before} {' '.join(start)}", last, others, draw)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Sentences that follow each other."""
    found = list(SENTENCE.finditer(text))
    return [(a[0], b[0]) for a, b in pairwise(found) if b.start() - a.end() <= 1]


def order(documents: Sequence[str], draw: random.Random) -> Iterator[Item]:
    """What follows two sentences, among three sentences from further on."""
    for text in draw.sample(documents, len(documents)):
        found = list(SENTENCE.finditer(text))
        for i in range(0, len(found) - 12, 6):
            if all(
                b.start() - a.end() <= 1 for a, b in zip(found[i : i + 2], found[i + 1 : i + 3], strict=True)
            ):
                later = [x[0] for x in draw.sample(found[i + 4 : i + 12], CHOICES - 1)]
                yield item(f"{found[i][0]} {found[i + 1][0]}", found[i + 2][0], later, draw)


def entity(documents: Sequence[str], draw: random.Random) -> Iterator[Item]:
    """The last name of a passage that was named before, among the others of the passage."""
    for text in draw.sample(documents, len(documents)):
        found = list(SENTENCE.finditer(text))
        for i in range(0, len(found) - 5, 5):
            passage = text[found[i].start() : found[i + 4].end()]
            names = list(NAME.finditer(passage))
            again = [x for n, x in enumerate(names) if any(x[0] == y[0] for y in names[:n])]
            others = sorted({x[0] for x in names} - ({again[-1][0]} if again else set()))
            if again and len(passage) < 1200 and len(others) >= CHOICES - 1:
                last = again[-1]
                prompt = passage[: last.start()].rstrip()
                yield item(prompt, last[0], draw.sample(others, CHOICES - 1), draw)


def copy(documents: Sequence[str], draw: random.Random) -> Iterator[Item]:
    """A list of words, and the same list again up to one of them."""
    words = sorted({w for text in documents[:200] for w in re.findall(r"\b[a-z]{4,8}\b", text)})
    while True:
        chosen = draw.sample(words, 10)
        at = draw.randrange(3, 9)
        others = draw.sample([w for i, w in enumerate(chosen) if i != at and i != at - 1], CHOICES - 1)
        prompt = f"List: {', '.join(chosen)}.\nThe same list again: {', '.join(chosen[:at])},"
        yield item(prompt, chosen[at], others, draw)


def sums(documents: Sequence[str], draw: random.Random) -> Iterator[Item]:
    """Sums of numbers below 50."""
    while True:
        pairs = [(draw.randrange(1, 50), draw.randrange(1, 50)) for _ in range(4)]
        lines = [f"{a} + {b} = {a + b}" for a, b in pairs[:3]]
        a, b = pairs[3]
        near = [x for x in range(a + b - 12, a + b + 13) if x != a + b and x > 0]
        others = [str(x) for x in draw.sample(near, CHOICES - 1)]
        yield item("\n".join([*lines, f"{a} + {b} ="]), str(a + b), others, draw)


TASKS: dict[str, Callable[[Sequence[str], random.Random], Iterator[Item]]] = {
    "cloze": cloze,
    "order": order,
    "entity": entity,
    "copy": copy,
    "sum": sums,
}
YAML = """task: local_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def main() -> None:
    """Write OUT/NAME.jsonl and OUT/NAME.yaml of every task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    documents = read(given.text)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, make in TASKS.items():
        rows = list(islice(make(documents, random.Random(0)), given.count))
        data = given.out.resolve() / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (given.out / f"{name}.yaml").write_text(YAML.format(name=name, data=data), encoding="utf-8")
        print(f"{name}: {len(rows)}")


if __name__ == "__main__":
    main()

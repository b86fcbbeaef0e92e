"""What all engines are given and held against: prompts, reference tokens and logits, one line of verdict each."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 64
TOLERANCE = 1e-4  # of the first step's logits, relative to their spread
PROMPT_CHARACTERS = (120, 60, 200)


def work() -> Path:
    """The folder of models, references and results."""
    return Path(os.environ["ENGINES_WORK"])


def texts(path: Path) -> list[str]:
    """Three prompts of different lengths."""
    documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    long = [text for text in documents if len(text) > 1000]
    found = []
    for text, count in zip(long, PROMPT_CHARACTERS, strict=False):
        part = text[400 : 400 + count]
        found.append(part[part.index(" ") : part.rindex(" ")].strip())
    return found


def load_reference(name: str) -> list[dict[str, Any]]:
    """Prompt ids, greedy tokens and their logits, for each prompt."""
    data = np.load(work() / "references" / f"{name}.npz")
    return [
        {key: data[f"{key}{i}"] for key in ("ids", "tokens", "logits")} for i in range(len(data.files) // 3)
    ]


def first_difference(ours: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs."""
    pairs = zip(ours, right, strict=False)
    found = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return found if found is not None or len(ours) >= len(right) else len(ours)


def relative(ours: Any, right: Any) -> float:
    """Largest difference of logits as a share of their spread; entries that an engine does not give are NaN."""
    size = min(len(ours), len(right))
    a, b = np.asarray(ours, dtype=np.float64)[:size], np.asarray(right, dtype=np.float64)[:size]
    known = np.isfinite(a) & (a > -1e30)
    return float(np.abs(a[known] - b[known]).max() / b.std())


def verdict(
    name: str,
    outputs: Sequence[Sequence[int]],
    first: Sequence[Any] | None = None,
    tolerance: float = TOLERANCE,
    exact: bool = True,
) -> dict[str, Any]:
    """Whether an engine gives the reference's tokens, up to a step whose two best tokens are a tie.

    Args:
        name: Of the reference.
        outputs: Greedy tokens for each prompt.
        first: Logits of the first step for each prompt.
        tolerance: Of those logits, relative to their spread; also what counts as a tie.
        exact: Whether they must be equal; False for quantised weights, which only must run.
    """
    worst, differs = 0.0, []
    equal = True
    for i, (reference, tokens) in enumerate(zip(load_reference(name), outputs, strict=True)):
        at = first_difference(list(tokens)[:TOKENS], reference["tokens"].tolist())
        differs.append(at)
        if at is not None:
            best = np.sort(reference["logits"][at])[::-1] if at < len(reference["logits"]) else [1.0, 0.0]
            equal &= bool(best[0] - best[1] < tolerance * reference["logits"][at].std())
        if first is not None:
            worst = max(worst, relative(first[i], reference["logits"][0]))
    row: dict[str, Any] = {"first_difference": differs}
    if first is not None:
        row["relative_logits"] = worst
    good = equal and (first is None or worst < tolerance)
    return row | {"verdict": ("equal" if good else "differs") if exact else "runs"}


def record(path: str | Path, engine: str, name: str, row: dict[str, Any]) -> None:
    """Append one row to the results of this run."""
    line = {"engine": engine, "model": name, **row}
    print(json.dumps(line), flush=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def failed(error: BaseException) -> dict[str, Any]:
    """The row of an engine that cannot do it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return {"verdict": "fails", "reason": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]}

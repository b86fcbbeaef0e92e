"""Tables of models that others trained, from benchmarks/results/real_*.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _common import RESULTS
from _markdown import markdown, measured_on, state

DATA = {
    "text": "WikiText-2",
    "molecules": "molecules",
    "synthetic": "synthetic speech",
    "retried": "synthetic speech, loops written again",
    "real": "real recordings",
}


def real(record: Mapping[str, Any]) -> str:
    """One row for each conversion: loss, KL and agreement, and what generated text makes of it.

    Rows of one state of the code share tables; the state of most rows comes first.
    """
    by_state: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        by_state.setdefault(state(record["runs"][row["run"]]), []).append(row)
    parts = [f"`{record['model']}`, {record['heads']} KV heads, from {record['origin']['from']}."]
    parts += [_lost_merge(record)] if "tokenizer" in record else []
    for name, rows in sorted(by_state.items(), key=lambda found: -len(found[1])):
        parts += [f"#### {name}"] if len(by_state) > 1 else []
        parts += [
            f"Measured on: {measured_on(record['runs'][rows[-1]['run']])}.",
            *_of_one_state(record, rows),
        ]
    return "\n\n".join(parts)


def _lost_merge(record: Mapping[str, Any]) -> str:
    """What a merge that the package's tokenizer lacks does to the figures."""
    whole, original = record["tokenizer"], next(row for row in record["rows"] if row["name"] == "original")
    split = original["scores"]["real"]
    return (
        f"The package's tokenizer has lost the merge `{whole['lost_merge']}`, so that losses, KL and agreement here are along "
        f"tokens that Whisper never writes: on the real recordings the original has {split['loss']:.3f} over {split['tokens']} of them, "
        f"and {whole['loss']:.3f} over {whole['tokens']} where the merge is restored, as `build.py` does since. Word errors are of the "
        "texts, and calibration and uptraining read the tokens that the original wrote: both are sound."
    )


def _of_one_state(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    blocks = [_of_one_data(record, rows, name) for name in names]
    told = [
        f"G={row['groups']}, {row['name']}: the copies were found in {row['grouping_found']} of {row['layers']} layers."
        for row in rows
        if "grouping_found" in row
    ]
    tasks = [row for row in rows if any("tasks" in score for score in row["scores"].values())]
    return [*blocks, *told, *([_of_tasks(tasks)] if tasks else []), *_of_uptraining(rows)]


def _of_uptraining(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many tokens the rows that were uptrained saw."""
    found = {}
    for row in rows:
        if budget := row.get("uptraining", {}).get("budget"):
            found[f"G={row['groups']}, {row['name']}"] = (
                f"{budget['tokens']:,} tokens in {budget['steps']:,} steps, {row['uptraining']['seconds']:,.0f} s"
            )
    return [f"Uptraining: {'; '.join(f'{name}: {what}' for name, what in found.items())}."] if found else []


def original_scores(record: Mapping[str, Any], data: str, tokens: int) -> Mapping[str, Any] | None:
    """The original on the same tokens, whichever state of the code scored it."""
    found = (row["scores"].get(data) for row in record["rows"] if row["name"] == "original")
    return next((score for score in found if score and score["tokens"] == tokens), None)


def _of_tasks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of the questions of each local task that are answered right."""
    found = [
        (row, next(score["tasks"] for score in row["scores"].values() if "tasks" in score)) for row in rows
    ]
    names = list(found[0][1])
    head = ["right answers, % (four choices each)", "G", *(name.removeprefix("local_") for name in names)]
    lines = [
        [row["name"], str(row["groups"]), *(f"{100 * scores[name]:.1f}" for name in names)]
        for row, scores in found
    ]
    return markdown(head, lines)


def decoding(record: Mapping[str, Any]) -> str:
    """Tokens per second and memory of transformers' `generate`, a row for each model and batch."""
    rows = record["rows"]
    first = {(row["batch"], row["device"]): row for row in rows if row["name"] == "original"}
    lines = []
    for row in rows:
        speed = row["tokens_per_second"] / first[row["batch"], row["device"]]["tokens_per_second"]
        peak = row.get("generation_peak_bytes")
        lines.append(
            [
                row["name"].removeprefix(f"{record['model']}-"),
                str(row["batch"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{speed:.2f}x",
                f"{row['cache_bytes'] / 2**20:,.0f}",
                "" if peak is None else f"{peak / 2**20:,.0f}",
            ]
        )
    head = ["model", "batch", "tokens/s", "to the original", "cache, MiB", "peak of generating, MiB"]
    if not any(line[-1] for line in lines):  # a CPU tells none
        head, lines = head[:-1], [line[:-1] for line in lines]
    alone = " Seconds are one thread's processor time." if rows[0].get("clock") == "processor" else ""
    what = (
        f"`{record['model']}` in transformers' `generate`, greedy, {rows[0]['tokens']} tokens each in {rows[0]['dtype']}, "
        f"the encoder's time left out.{alone}"
    )
    return f"{what}\n\nMeasured on: {measured_on(record['runs'][-1])}.\n\n{markdown(head, lines)}"


def _of_one_data(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], data: str) -> str:
    scores = [row["scores"][data] for row in rows if data in row["scores"]]
    spoken = any(score.get("wer") is not None for score in scores)
    exact = any(score.get("exact_match") is not None for score in scores)
    loops = any(score.get("looped") for score in scores)
    head = [DATA.get(data, data), "G", "loss", "KL to the original", "same next token"]
    head += ["word errors, %", "difference, 95 %"] if spoken else []
    head += ["loops", "without them, 95 %"] if loops else []
    head += ["texts equal, %"] if exact else []
    lines = []
    for row in rows:
        if data not in row["scores"]:
            continue
        score = row["scores"][data]
        first = row["name"] == "original"
        line = [
            row["name"],
            str(row["groups"]),
            f"{score['loss']:.3f}",
            "" if first or score["kl"] is None else _small(score["kl"]),
            "" if first or score["top1_agreement"] is None else f"{score['top1_agreement']:.1%}",
        ]
        if spoken:
            apart = score.get("wer_difference")
            line += [f"{score['wer']:.1f}", "" if first else _interval(apart)]
        if loops:
            sound = score.get("wer_without_loops_difference") or score.get("wer_difference")
            line += [str(score.get("looped", "")), "" if first else _interval(sound)]
        if exact:
            equal = score.get("exact_match")
            line.append("" if first or equal is None else f"{equal:.1f}")
        lines.append(line)
    beside = "" if any(row["name"] == "original" for row in rows) else _beside(record, scores, data)
    return f"{scores[0]['tokens']:,} scored tokens{beside}.\n\n{markdown(head, lines)}"


def _beside(record: Mapping[str, Any], scores: Sequence[Mapping[str, Any]], data: str) -> str:
    """What is known of the original where no row of these has it."""
    known = original_scores(record, data, scores[0]["tokens"])
    loss = "not scored by itself" if known is None else f"{known['loss']:.3f}"
    paired = [score for score in scores if score.get("wer_difference")]
    if not paired:
        return f"; loss of the original: {loss}"
    errors = paired[0]["wer"] - paired[0]["wer_difference"]["difference"]
    return f"; the original's word errors beside these: {errors:.1f} %, its loss: {loss}"


def _interval(test: Mapping[str, Any] | None) -> str:
    return f"{test['low']:+.1f} to {test['high']:+.1f}" if test else ""


def _small(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 5e-4 else f"{value:.0e}"


def recipe(record: Mapping[str, Any]) -> str:
    """What some rows of a model of speech came to, beside its original, on both kinds of recordings."""
    path = RESULTS / f"{record['file']}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    original = next(row for row in rows if row["name"] == "original")["scores"]
    head = [
        "",
        "KV heads",
        *(f"{DATA[data]}: word errors, %" for data in original),
        "without loops, 95 %",
        "loss",
    ]
    lines = []
    for name, groups in [
        ("original", rows[0]["groups"]),
        *((row["row"], row["groups"]) for row in record["rows"]),
    ]:
        scores = next(row for row in rows if (row["name"], row["groups"]) == (name, groups))["scores"]
        apart = scores["synthetic"].get("wer_without_loops_difference")
        gap = scores["synthetic"]["loss"] - original["synthetic"]["loss"]
        lines.append(
            [
                next((row["says"] for row in record["rows"] if row["row"] == name), name),
                str(groups),
                *(f"{scores[data]['wer']:.1f}" for data in original),
                _interval(apart),
                f"{gap:+.3f}" if apart else "",
            ]
        )
    return markdown(head, lines)


def masked_gradients(record: Mapping[str, Any]) -> str:
    """How many gradients behind a mask are not finite, by kernel."""
    ways = list(next(iter(record["attention"].values())))
    lines = [
        [f"attention alone, {length} keys: entries of q, k, v", *(str(sum(found[way])) for way in ways)]
        for length, found in record["attention"].items()
    ]
    lines += [
        [f"`{record['model']}`, step {step}: parameters", *(str(found[way]) for way in ways)]
        for step, found in record["steps"].items()
    ]
    about = f"Measured on: {measured_on(record['runs'][-1])}, cuDNN {record['cudnn']}."
    return f"{about}\n\n{markdown(['gradients that are not finite', *ways], lines)}"


# --- bars ----------------------------------------------------------------------------------------------

NOT_RUN = "not run"
ANOTHER_WAY = "met another way"
WORDS = ("met", ANOTHER_WAY, "**missed**", NOT_RUN)


def _kl(score: Mapping[str, Any], _: Mapping[str, Any] | None) -> float | None:
    return score["kl"]


def _agreement(score: Mapping[str, Any], _: Mapping[str, Any] | None) -> float | None:
    return None if score["top1_agreement"] is None else 100 * score["top1_agreement"]


def _gap(score: Mapping[str, Any], original: Mapping[str, Any] | None) -> float | None:
    return None if original is None else score["loss"] - original["loss"]


def _more_errors(score: Mapping[str, Any], _: Mapping[str, Any] | None) -> float | None:
    return score["wer_difference"]["difference"]


def _most_errors(score: Mapping[str, Any], _: Mapping[str, Any] | None) -> float | None:
    return score["wer_difference"]["high"]


Measure = Callable[[Mapping[str, Any], Mapping[str, Any] | None], float | None]
# By the name of a measure: what it is, and how a figure of it is written.
MEASURES: dict[str, tuple[Measure, str]] = {
    "KL to the original": (_kl, "{:.0e}"),
    "same next token, %": (_agreement, "{:.2f}"),
    "loss above the original's": (_gap, "{:+.3f}"),
    "word errors above the original's, points": (_more_errors, "{:+.1f}"),
    "word errors above the original's, points, upper 95 % bound": (_most_errors, "{:+.1f}"),
}
LAYERS = "layers whose copies were found"


def verdict(bar: Mapping[str, Any]) -> tuple[str, str, str]:
    """What a bar asks for, what was measured, and `met`, `met another way`, `missed` or `not run`.

    `another_way` of a bar names the scores of the same recordings where texts that loop were written again: their
    figure stands beside that of the bar as it was set, and a bar that it alone meets is not called met.
    """
    path = RESULTS / f"{bar['file']}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    row = next((r for r in record["rows"] if (r["name"], r["groups"]) == (bar["row"], bar["groups"])), {})
    if bar["measure"] == LAYERS:
        wanted, found = "all", row.get("grouping_found")
        measured = NOT_RUN if found is None else f"{found} of {row['layers']}"
        return wanted, measured, _word(None if found is None else found == row["layers"])
    at_most, limit = "at_most" in bar, bar.get("at_most", bar.get("at_least"))
    wanted, form = f"{'≤' if at_most else '≥'} {limit:g}", MEASURES[bar["measure"]][1]
    value = _value(bar, record, row, bar["data"])
    again = _value(bar, record, row, bar["another_way"]) if "another_way" in bar else None
    measured = NOT_RUN if value is None else form.format(value)
    if again is not None:
        measured += f"; loops written again: {form.format(again)}"
    met, met_again = (
        None if found is None else found <= limit if at_most else found >= limit for found in (value, again)
    )
    return wanted, measured, ANOTHER_WAY if met_again and not met else _word(met)


def _value(
    bar: Mapping[str, Any], record: Mapping[str, Any], row: Mapping[str, Any], data: str
) -> float | None:
    """What a row measured of a bar on one kind of data; None where it was not run."""
    score = row.get("scores", {}).get(data)
    return (
        MEASURES[bar["measure"]][0](score, original_scores(record, data, score["tokens"])) if score else None
    )


def _word(met: bool | None) -> str:
    return NOT_RUN if met is None else "met" if met else "**missed**"


def real_bars(record: Mapping[str, Any]) -> str:
    """What was to be reached, with what was measured."""
    lines = [[bar["name"], bar["measure"], *verdict(bar)] for bar in record["bars"]]
    count = {word: sum(line[-1] == word for line in lines) for word in WORDS}
    other = f" {count[ANOTHER_WAY]} {ANOTHER_WAY} only," if count[ANOTHER_WAY] else ""
    said = f"{count['met']} met,{other} {count['**missed**']} missed, {count[NOT_RUN]} not run."
    return f"{said}\n\n{markdown(['what was to be reached', '', 'bar', 'measured', ''], lines)}"

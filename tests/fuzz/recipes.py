"""Recipes, their overrides, and numbers as people write them."""

from __future__ import annotations

import dataclasses
import decimal
import json
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

from .mutations import changed_bytes
from .trial import Room, Trial
from .weights import make_model

SCALARS = (
    "&a [*a]", "*nope", "!!python/object/apply:os.system ['true']", "!!binary x", "!!timestamp x", "2001-13-45", "2001-01-01",
    "1" * 5000, "0x1F", "1:30", "1e400", ".inf", "-.inf", ".nan", "~", "yes", "''", "'x", '"\\0"', '"\\ud800"', "[", "{",
    "[[[[[]]]]]", "{a: {b: 1}}", "|\n  a\n  b", "- a", "? a", "a: b: c", "\t", "@x", "%x", "&x", "!!int x", "!!int ''",
    "!!float x", "!!bool maybe", "<<: {a: 1}", "-1", "0", "1.5", "1e-5", "1_000", "100B", "5GB", "[1, 2]", "{}", "null",
    "true", "é", "a" * 3000, "../../x", "=", "!!set {a}", "!!omap [a: 1]", "&a {b: *a}", "12345678901234567890123", "08",
)  # fmt: skip
BOMBS = (
    "[&a [x,x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b], &d [*c,*c,*c,*c,*c,*c,*c,*c],"
    " &e [*d,*d,*d,*d,*d,*d,*d,*d], &f [*e,*e,*e,*e,*e,*e,*e,*e], [*f,*f,*f,*f,*f,*f,*f,*f]]",
    "[" * 5000 + "]" * 5000,
    "{a: " * 3000 + "1" + "}" * 3000,
)
NUMBERS = (
    "0", "1", "2", "3", "4", "-1", "-0", "1e3", "1e400", "1e-3", "nan", "inf", "-inf", "0x10", "1_000", "1,000", "100B",
    "1.4T", "5GB", "5GiB", "512MiB", "9" * 30, "9" * 400, "9" * 5000, "", " ", "x", "1.5", "2.0", "+2", "٣", "²", "½", "1e",
    "1e1000000", "0.0000001k", "2**3", "None", "1 2", "2\n", "1e+2", "0.5k", "--", "𝟚", "4294967296", "18446744073709551616",
)  # fmt: skip
OPTIONS = {
    "plan": ("--groups", "--tp", "--batch", "--context", "--gpu-memory", "--bandwidth"),
    "convert": ("--groups", "--seed", "--max-shard-size", "--calibration-tokens", "--calibration-window", "--fit"),
    "evaluate": ("--window", "--stride", "--batch-size", "--max-tokens", "--max-ppl-ratio", "--min-agreement"),
    "uptrain": ("--alpha", "--original-tokens", "--tokens", "--window", "--batch-tokens", "--learning-rate", "--holdout"),
}  # fmt: skip
SUFFIXES = {"k": 3, "m": 6, "b": 9, "t": 12}


def _make(folder: Path) -> None:
    make_model(folder / "model")
    (folder / "text.jsonl").write_text(json.dumps({"text": "hello world " * 20}) + "\n")


def recipe(rng: Random, room: Room) -> Trial:
    """A recipe with changed lines; sometimes overridden, sometimes tried dry."""
    import mha2gqa
    from mha2gqa.config import SECTIONS

    folder = room.made("recipe", _make)
    lines = [
        f"source: {folder}/model", f"output: {folder}/results/o", "convert:", "  groups: 2", "  method: mean",
        "evaluate:", f"  data: {folder}/text.jsonl", "  window: 32", "uptrain:", f"  data: {folder}/text.jsonl",
        "  tokens: 4096",
    ]  # fmt: skip
    said = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        kind, at = (
            rng.choice(("value", "value", "key", "key", "top", "line", "twice", "indent", "less")),
            rng.randrange(len(lines)),
        )
        value = rng.choice(SCALARS) if rng.random() < 0.97 else rng.choice(BOMBS)
        said.append(f"{kind} {value[:20]!r}")
        if kind == "value":
            lines[at] = f"{lines[at].partition(':')[0]}: {value}"
        elif kind == "key":
            section = rng.choice(sorted(SECTIONS))
            names = [field.name.rstrip("_") for field in dataclasses.fields(SECTIONS[section])]
            start = next((i for i, line in enumerate(lines) if line.startswith(f"{section}:")), None)
            entry = f"  {rng.choice((*names, 'x', 'weight_decay', '~', '? a'))}: {value}"
            lines[len(lines) if start is None else start + 1 :][:0] = []
            lines = (
                [*lines, f"{section}:", entry]
                if start is None
                else [*lines[: start + 1], entry, *lines[start + 1 :]]
            )
        elif kind == "top":
            lines.append(f"{rng.choice(('report', 'sweep', 'description', 'x', '1', '<<'))}: {value}")
        elif kind == "line":
            lines.insert(at, value)
        elif kind == "twice":
            lines.append(lines[at])
        elif kind == "less":
            del lines[at]
        else:
            lines[at] = rng.choice((" ", "\t", "   ")) + lines[at]
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    if rng.random() < 0.08:
        data, how = changed_bytes(rng, data)
        said.append(how)
    file = folder / "recipe.yaml"
    file.write_bytes(data)
    keys = (
        "convert.groups",
        "uptrain.tokens",
        "evaluate.window",
        "output",
        "x",
        "convert.fit.steps",
        "a.b.c",
    )
    over = [f"{rng.choice(keys)}={rng.choice(SCALARS)}"] if rng.random() < 0.25 else []

    def run() -> str:
        if rng_dry:
            return str(mha2gqa.run(str(file), overrides=over, dry_run=True))[:0]
        found = mha2gqa.load_recipe(file, over)
        again = folder / "again.yaml"
        again.write_text(found.to_yaml(), encoding="utf-8")
        return "" if mha2gqa.load_recipe(again) == found else "written and read again it is another"

    rng_dry = rng.random() < 0.2
    return Trial("recipe, dry run" if rng_dry else "recipe", "; ".join(said + over), run, {file.name: data})


def number(rng: Random, room: Room) -> Trial:
    """Options of the command line with numbers of every form."""
    import click

    from mha2gqa.cli.commands import cli

    folder = room.made("recipe", _make)
    command = rng.choice(("plan", "plan", "plan", "convert", "evaluate", "uptrain"))
    given = {rng.choice(OPTIONS[command]): rng.choice(NUMBERS) for _ in range(rng.choice((1, 1, 2)))}
    argv = [command, str(folder / "model")]
    if command in ("convert", "uptrain"):
        argv.append(str(room.fresh("out")))
    if command == "convert" and "--groups" not in given:
        given["--groups"] = "2"
    if command in ("evaluate", "uptrain"):
        argv += ["--data", str(folder / "text.jsonl")]
    if command == "uptrain":
        argv += ["--teacher", "none"]
    for name, value in given.items():
        key = rng.choice(("steps=", "learning_rate=", "batch_size=", "x=")) if name == "--fit" else ""
        argv += [name, key + value]

    def run() -> str:
        try:
            cli.main([*argv, "--json"], prog_name="mha2gqa", standalone_mode=False, obj={})
        except SystemExit as error:
            return "" if error.code in (0, 1, 2, 3, 130, None) else f"exit code {error.code}"
        return ""

    said = " ".join(part[:30] for part in argv[2:])
    return Trial(
        f"number, {command}",
        said,
        run,
        {"argv.txt": "\n".join(argv).encode()},
        (click.ClickException, click.Abort),
    )


def count(rng: Random, room: Room) -> Trial:
    """A count such as `1.4T`, held against decimal arithmetic."""
    from mha2gqa.config import parse_count
    from mha2gqa.config.coerce import Invalid

    del room
    shown = rng.choice(NUMBERS) if rng.random() < 0.4 else _count(rng)

    def run() -> str:
        found: Any = parse_count(shown)
        right = exact(shown)
        return "" if right is None or right == found else f"{found} where it is {right}"

    return Trial("count", shown[:40], run, {}, (Invalid,))


def _count(rng: Random) -> str:
    digits = f"{rng.randrange(1000)}{rng.choice(('', '.5', '.25'))}"
    return digits + rng.choice(("", "k", "K", "M", "B", "T", "e3", "e9", " ", "kk", "x"))


def exact(shown: str) -> int | None:
    """A count by decimal arithmetic; None where it is none, or not a whole number."""
    plain = shown.strip().replace("_", "")
    power = SUFFIXES.get(plain[-1:].lower(), 0)
    try:
        value = Decimal(plain[:-1] if power else plain).scaleb(power)
    except (decimal.InvalidOperation, decimal.Overflow):
        return None
    whole = value.is_finite() and abs(value.adjusted()) < 40 and value == value.to_integral_value()
    return int(value) if whole else None

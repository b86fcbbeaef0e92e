"""Writes what is derived from the declarations into files: `docs/options.md` and `config/keywords.py`.

`make docs-reference` runs it; a test asks that both files are current.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from .commands import BenchConfig, DemoConfig, ExportConfig, PlanConfig, PushConfig, VerifyConfig
from .convert import ConvertConfig
from .evaluate import EvaluateConfig, GateConfig
from .option import CLI, RECIPE, Config, Declared, declared, plain
from .recipe import Recipe
from .reconstruct import ReconstructConfig
from .report import ReportConfig, SweepConfig
from .training_arguments import TrainerOptions
from .uptrain import UptrainConfig

HERE = Path(__file__).parent
REFERENCE = HERE.parents[1] / "docs" / "options.md"
KEYWORDS = HERE / "keywords.py"
# TypedDict -> the options it holds, without those that the function names itself.
TYPED: dict[str, tuple[tuple[type[Config], ...], tuple[str, ...]]] = {
    "PlanKeywords": ((PlanConfig,), ("source",)),
    "BenchKeywords": ((BenchConfig,), ("models",)),
    "ConvertKeywords": ((ConvertConfig,), ("source", "out", "groups")),
    "EvaluateKeywords": ((EvaluateConfig,), ("models", "data", "agreement")),
    "UptrainKeywords": ((UptrainConfig, TrainerOptions), ("model", "out", "data")),
    "TrainModelKeywords": ((UptrainConfig, TrainerOptions), ("model", "out", "data", "teacher")),
}


def keywords() -> str:
    """The module of keyword types, as text."""
    out = [
        '"""Types of keyword arguments, for editors and type checkers. Written by `make docs-reference`."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "from typing import Any, TypedDict",
        "",
        "from .coerce import Bytes, Steps",
        "from .commands import CacheType, Decoder",
        "from .convert import Attention, Method",
        "from .evaluate import Bos, Metric, Protocol",
        "from .pair_options import Targets, Task",
        "from .reconstruct import Effort, ReconstructConfig",
        "from .uptrain import Objective, Residual, Schedule, TeacherDtype, Train",
    ]
    for name, (kinds, without) in TYPED.items():
        out += ["", "", f"class {name}(TypedDict, total=False):"]
        titles = " and ".join(f"`{kind.__name__}`" for kind in kinds)
        out += [f'    """Options of {titles}."""', ""]
        for kind in kinds:
            out += [
                f"    {field.name}: {field.type}"
                for field in dataclasses.fields(kind)
                if field.name not in without
            ]
    return "\n".join(out) + "\n"


def reference() -> str:
    """The page of all options, as Markdown."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Options"
    yield ""
    yield "Every option of every command, from the declarations in `mha2gqa/config/` (`make docs-reference` writes this"
    yield "page). On the command line an option is `--name`, in a recipe a key of the command's section, in Python a"
    yield "keyword argument with underscores. Counts may have a unit (`64k`, `100B`, `1.4T`), sizes too (`5GB`, `512MiB`)."
    yield "The JSON schema of recipes, for editors: `mha2gqa recipes schema`."
    sections: tuple[tuple[str, str, type[Config]], ...] = (
        ("convert", "Section `convert` of a recipe.", ConvertConfig),
        (
            "convert: fit",
            "`--fit KEY=VALUE`, or keys under `convert.fit` of a recipe; `fit=ReconstructConfig(…)` or a dict in Python.",
            ReconstructConfig,
        ),
        ("evaluate", "Section `evaluate` of a recipe.", EvaluateConfig),
        ("evaluate: gates", "An evaluation that does not pass ends with exit code 3.", GateConfig),
        ("uptrain", "Section `uptrain` of a recipe.", UptrainConfig),
        (
            "uptrain: TrainingArguments",
            "These keys of `transformers.TrainingArguments` are passed on: further keys of `uptrain` in a recipe, "
            "`--set KEY=VALUE` on the command line, keyword arguments in Python. Every other one is refused.",
            TrainerOptions,
        ),
        ("run: recipe", "Top-level keys of a recipe, beside its sections.", Recipe),
        ("run: report", "Section `report` of a recipe.", ReportConfig),
        ("sweep", "Section `sweep` of a recipe.", SweepConfig),
        ("plan", "", PlanConfig),
        ("verify", "", VerifyConfig),
        ("bench", "", BenchConfig),
        ("export", "", ExportConfig),
        ("push", "", PushConfig),
        ("demo", "", DemoConfig),
    )
    for title, text, kind in sections:
        yield from ["", f"## {title}", ""]
        if text:
            yield from [text, ""]
        yield from ["| option | value | default | |", "|---|---|---|---|"]
        for item in declared(kind).values():
            if item.option.where or item.option.argument:
                yield f"| {_name(item, kind)} | {_value(item)} | {item.default_words()} | {_text(item)} |"


def _name(item: Declared, kind: type[Config]) -> str:
    if item.option.argument:
        return f"`{item.name.upper()}`"
    if CLI in item.option.where and RECIPE in item.option.where:
        return f"`{item.key}`"
    if CLI in item.option.where:
        return f"`{item.flags[0]}`"
    return f"`{item.key}`"


def _value(item: Declared) -> str:
    return " ".join(part for part in (type_words(item.hint), item.range.words) if part)


def _text(item: Declared) -> str:
    where = item.option.where
    only = ""
    if where == (CLI,) and not item.option.argument:
        only = " Not in recipes."
    elif where == (RECIPE,) and item.option.panel == "What" and item.name == "agreement":
        only = " In recipes; `--against` on the command line."
    return item.option.help.replace("|", "\\|") + only


def type_words(hint: Any) -> str:
    """A type in words: `number`, `one of a, b`."""
    hint = plain(hint)
    origin, args = get_origin(hint), get_args(hint)
    marks = {"bytes": "size", "steps": "steps or fraction"}
    if hasattr(hint, "__metadata__"):
        return marks.get(hint.__metadata__[0], "number")
    if origin is not None and str(origin).endswith("Literal"):
        return ", ".join(f"`{choice}`" for choice in args)
    if origin is tuple:
        return f"{type_words(args[0])}, several" if args[-1] is Ellipsis else f"{len(args)} numbers"
    if isinstance(hint, type) and issubclass(hint, Config):
        return "keys, see below"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "keys"}
    return names.get(origin or hint, "text")


def main() -> None:
    """Write both files."""
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    REFERENCE.write_text(reference(), encoding="utf-8")
    print(
        f"{re.sub(r'.*/mha2gqa/', 'mha2gqa/', KEYWORDS.as_posix())} and docs/{REFERENCE.name}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()

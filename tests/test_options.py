"""One declaration per option: recipes, command line, Python signatures, reference page and schema agree with it."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import subprocess
import sys
import typing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest

import mha2gqa
from mha2gqa.assets import recipe_paths, tiny_model_path
from mha2gqa.cli import commands
from mha2gqa.config import (
    SECTIONS,
    BenchConfig,
    Config,
    ConvertConfig,
    DemoConfig,
    EvaluateConfig,
    ExportConfig,
    GateConfig,
    OptionError,
    PlanConfig,
    PushConfig,
    Recipe,
    ReconstructConfig,
    TrainerOptions,
    UptrainConfig,
    VerifyConfig,
    declared,
    generate,
    keywords,
    recipe_from_dict,
)
from mha2gqa.config.convert import Method
from mha2gqa.config.evaluate import Protocol
from mha2gqa.config.key_values import fit_help, read_fit
from mha2gqa.config.option import CLI, RECIPE
from mha2gqa.config.recipe import keys
from mha2gqa.config.schema import recipe_schema
from mha2gqa.config.yaml_text import parse
from mha2gqa.errors import UsageError

ALL = [
    ConvertConfig,
    EvaluateConfig,
    GateConfig,
    UptrainConfig,
    ReconstructConfig,
    TrainerOptions,
    PlanConfig,
]
ALL += [
    BenchConfig,
    VerifyConfig,
    PushConfig,
    DemoConfig,
    ExportConfig,
    Recipe,
    SECTIONS["report"],
    SECTIONS["sweep"],
]
COMMON = {"help", "json", "verbose", "quiet"}
# Options that stand in one place only, and why.
ONLY_TYPED = {"force", "trust_remote_code"}  # of a recipe: `run --force`, and consent at its top
AGREEMENT = {"against", "agreement"}  # a recipe knows the original: it says whether, not with what


def typed(command: str) -> set[str]:
    """Options of a command, less those of every command."""
    found = {param.name for param in commands.cli.commands[command].params if isinstance(param, click.Option)}
    return {str(name) for name in found} - COMMON


def names(kind: type[Config], **where: str) -> set[str]:
    return {
        item.name
        for item in declared(kind).values()
        if not item.option.argument and all(place in item.option.where for place in where.values())
    }


@pytest.mark.parametrize(
    ("command", "kind", "more", "one_sided"),
    [
        ("convert", ConvertConfig, set(), ONLY_TYPED),
        ("evaluate", EvaluateConfig, names(GateConfig) | {"output"}, ONLY_TYPED | AGREEMENT),
        ("uptrain", UptrainConfig, {"overrides"}, ONLY_TYPED),
    ],
)
def test_recipe_keys_click_options_and_fields_are_the_same_set(
    command: str, kind: type[Config], more: set[str], one_sided: set[str]
) -> None:
    fields = names(kind)
    assert typed(command) - more - one_sided == fields - one_sided
    assert {item.name for item in keys(kind).values()} - one_sided == fields - one_sided
    assert typed(command) - more == names(kind, where=CLI)
    assert {item.name for item in keys(kind).values()} == names(kind, where=RECIPE)
    undeclared = {field.name for field in dataclasses.fields(kind)} - set(declared(kind))
    assert undeclared == ({"training_args"} if kind is UptrainConfig else set())


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("plan", PlanConfig),
        ("bench", BenchConfig),
        ("verify", VerifyConfig),
        ("export", ExportConfig),
        ("push", PushConfig),
        ("demo", DemoConfig),
    ],
)
def test_smaller_commands_have_the_options_and_defaults_of_their_functions(
    command: str, kind: type[Config]
) -> None:
    import mha2gqa
    from mha2gqa.commands import bench, demo, export, push

    function = {"bench": bench.bench, "export": export.export, "push": push.push, "demo": demo.demo}.get(
        command
    ) or getattr(mha2gqa, command)
    own = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation != "Progress | None"
    }
    assert set(own) == set(declared(kind))
    assert typed(command) == names(kind)
    for name, item in declared(kind).items():
        assert item.default == own[name] or (item.required and own[name] is inspect.Parameter.empty), name


@pytest.mark.parametrize(
    ("function", "kinds", "typed_as", "positional"),
    [
        ("convert", (ConvertConfig,), "ConvertKeywords", ["source", "out", "groups"]),
        ("evaluate", (EvaluateConfig,), "EvaluateKeywords", ["models", "data"]),
        ("uptrain", (UptrainConfig, TrainerOptions), "UptrainKeywords", ["model", "out", "data"]),
        ("train_model", (UptrainConfig, TrainerOptions), "TrainModelKeywords", ["model", "blocks"]),
    ],
)
def test_python_signatures_name_every_option(
    function: str, kinds: tuple[type[Config], ...], typed_as: str, positional: list[str]
) -> None:
    import mha2gqa

    call = getattr(mha2gqa, function)
    parameters = inspect.signature(call).parameters
    assert list(parameters)[: len(positional)] == positional
    options = {name: item for kind in kinds for name, item in declared(kind).items() if name != "agreement"}
    if function == "train_model":
        options = {name: item for name, item in options.items() if name not in ("out", "data")}
    assert set(options) <= set(parameters)
    hints = getattr(keywords, typed_as).__annotations__
    for name, item in options.items():
        if name in positional or name in ("model", "teacher"):
            continue
        assert (
            parameters[name].default == item.default
            and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        )
        assert name in hints, name
        assert f"        {name}: {item.option.help}" in (call.__doc__ or "")
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    assert "**options" not in (call.__doc__ or "")


def test_convert_in_memory_takes_options_of_convert() -> None:
    from mha2gqa import convert_model

    own = {"model", "groups", "groupings", "progress", "stage"}
    parameters = inspect.signature(convert_model).parameters
    for name in set(parameters) - own - {"calibration"}:
        assert parameters[name].default == declared(ConvertConfig)[name].default, name


def test_choices_are_those_of_the_code() -> None:
    from mha2gqa.evaluation import PROTOCOLS
    from mha2gqa.merging import MERGERS

    assert set(typing.get_args(Method)) <= set(MERGERS)
    assert set(typing.get_args(Protocol)) == set(PROTOCOLS)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_declaration_is_whole(kind: type[Config]) -> None:
    for name, item in declared(kind).items():
        assert item.option.help[0].isupper() and item.option.help.endswith((".", "…", "!")), name
        if not item.required and kind is not TrainerOptions:
            assert item.default_words() or item.default == "", f"{name}: what happens without it?"
        if not item.required and item.default not in (None, ()):
            assert item.read(item.default) == item.default, name


def test_generated_files_are_current() -> None:
    assert generate.KEYWORDS.read_text(encoding="utf-8") == generate.keywords(), "make docs-reference"
    assert generate.REFERENCE.read_text(encoding="utf-8") == generate.reference(), "make docs-reference"


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "foo"}, "schedule: must be one of cosine, linear, constant, not 'foo'"),
        ({"unit": "foo"}, "unit: must be one of attention, layer, not 'foo'"),
        ({"holdout": 1.5}, "holdout: must be > 0 and < 1, not 1.5"),
        ({"steps": 2.5}, "steps: must be a whole number, not 2.5"),
        ({"betas": (0.9,)}, r"betas: must be 2 values, not \(0.9,\)"),
        ({"betas": (0.9, 1.0)}, "betas: must be >= 0 and < 1"),
    ],
)
def test_choices_and_ranges_hold_in_python(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ReconstructConfig(**values)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"groups": 2, "metod": "mean"}, r"convert\(\): metod: unknown key; did you mean method\?"),
        ({"groups": 2, "method": "joins"}, "method: must be one of mean, .*did you mean joint"),
        ({"groups": 2, "calibration_tokens": 0}, "calibration_tokens: must be >= 1, not 0"),
        ({"groups": 2, "fit": {"setps": 5}}, "setps"),
        ({"groups": 2, "fit": {"holdout": 2}}, "holdout: must be > 0 and < 1"),
        ({"groups": 2, "refit": True}, "refit: needs text; give calibration"),
        ({"groups": 2, "attention": ()}, "attention: must name a kind"),
    ],
)
def test_errors_of_convert_name_the_python_argument(words: dict[str, Any], message: str) -> None:
    from mha2gqa import convert

    with pytest.raises(UsageError, match=message):
        convert("a", "b", **words)


def test_one_text_is_a_list_of_one() -> None:
    assert EvaluateConfig("a", "text.jsonl").models == ("a",)
    assert UptrainConfig("a", "b", "text.jsonl", tokens=1).data == ("text.jsonl",)
    texts = ["one two", ""]  # data in memory, left as it is
    assert EvaluateConfig("a", texts).data is texts
    assert ConvertConfig("a", "b", 2, calibration=texts).calibration is texts
    assert ConvertConfig("a", "b", 2, max_shard_size="5GB").max_shard_size == 5_000_000_000
    fit = ConvertConfig("a", "b", 2, fit={"steps": "2k"}).fit
    assert fit == ReconstructConfig(steps=2000)


@pytest.mark.parametrize(
    "texts",
    [
        ["steps=2000 patience=12"],
        ["steps=2000,patience=12"],
        ["steps=2k", "patience=12"],
        ["steps=2000, patience=12"],
    ],
)
def test_several_pairs_of_fit_may_stand_in_one_argument(texts: list[str]) -> None:
    assert read_fit(texts) == ReconstructConfig(steps=2000, patience=12)


def test_pairs_of_fit_with_lists() -> None:
    assert read_fit(["betas=[0.9, 0.95] steps=5"]) == ReconstructConfig(betas=(0.9, 0.95), steps=5)
    assert read_fit([]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("holdout=1.5", "--fit holdout=1.5: must be > 0 and < 1"),
        ("hold=1", "--fit: hold: unknown key; did you mean holdout?"),
        ("steps", "--fit steps: is not KEY=VALUE"),
        ("steps=[", "--fit steps=[: is not YAML"),
        ("learning_rate=" + "1" * 400, "must be at most 1e18"),
        ("steps=" + "1" * 5000, "is not YAML"),
        ("steps=.inf", "--fit steps=.inf: must be a whole number"),
        ("average=0.5", "--fit average=0.5: was removed"),
    ],
)
def test_errors_of_fit_name_what_was_typed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_fit([text])
    assert message in str(caught.value) and len(str(caught.value)) <= 400


def test_options_of_earlier_versions_are_accepted_where_they_say_what_is_done_now() -> None:
    assert read_fit(["average=0 steps=5 weighting=plain"]) == ReconstructConfig(steps=5)
    old = {"convert": {"groups": 2, "fit": {"refit_inputs": False, "steps": 5}}}
    assert dict(recipe_from_dict(old).convert.fit) == {"steps": 5}
    old["convert"]["fit"]["refit_inputs"] = True  # type: ignore[index]
    with pytest.raises(UsageError, match=r"recipe: convert.fit.refit_inputs: was removed"):
        recipe_from_dict(old)


def test_fit_help_lists_every_key_with_default_and_range() -> None:
    lines = fit_help().splitlines()
    assert [line.split()[0] for line in lines] == list(keys(ReconstructConfig))
    assert "number > 0 and < 1; default: 0.05" in next(line for line in lines if line.startswith("holdout"))


@pytest.mark.parametrize(
    "name", ["plan", "convert", "evaluate", "uptrain", "bench", "verify", "export", "push"]
)
def test_help_names_no_option_that_a_command_has_not(name: str) -> None:
    """A name in backquotes becomes an option in help: `plan` in one became --plan, which there is not."""
    command = commands.cli.commands[name]
    flags = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    for param in command.params:
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", getattr(param, "help", None) or "")
        assert set(named) <= flags, (param.name, named)


def test_importing_the_declarations_imports_nothing_heavy() -> None:
    code = (
        "import sys, mha2gqa.config, mha2gqa.config.generate, mha2gqa.config.key_values\n"
        "assert not {'torch', 'transformers', 'numpy', 'yaml', 'pydantic', 'click'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- JSON schema ---------------------------------------------------------------------------------------


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON schema that ours uses."""
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    allowed = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and ("number" in allowed or ("integer" in allowed and value == int(value))):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        inside = schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
        return low <= value <= high and inside
    if not any(isinstance(value, kinds[kind]) for kind in allowed if kind in kinds):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        closed = schema.get("additionalProperties", True) is False
        return all(fits(item, known[key]) if key in known else not closed for key, item in value.items())
    return not isinstance(value, list) or all(fits(item, schema["items"]) for item in value)


@pytest.mark.parametrize("name", recipe_paths())
def test_shipped_recipes_fit_the_schema(name: str) -> None:
    data, _ = parse(recipe_paths()[name].read_text(encoding="utf-8"))
    assert fits(data, recipe_schema())


@pytest.mark.parametrize(
    "wrong",
    [
        {"convert": {"gruops": 2}},
        {"convert": {"method": "joins"}},
        {"convert": {"fit": {"holdout": 1.5}}},
        {"uptrain": {"max_steps": 3}},
        {"uptrain": {"adam_beta1": 2}},
        {"report": {"batch": 0}},
        {"sweep": {"groups": [True]}},
        {"evalute": {}},
    ],
    ids=str,
)
def test_the_schema_and_the_reader_refuse_the_same(wrong: dict[str, Any]) -> None:
    assert not fits(wrong, recipe_schema())
    with pytest.raises(UsageError):
        recipe_from_dict(wrong)


def test_the_schema_knows_every_key() -> None:
    properties = recipe_schema()["properties"]
    assert set(properties) == {*keys(Recipe), *SECTIONS}
    for name, kind in SECTIONS.items():
        further = {*declared(TrainerOptions), "training_args"} if name == "uptrain" else set()
        assert set(properties[name]["properties"]) == {*keys(kind), *further}


def test_a_recipe_may_hold_every_key() -> None:
    data = {
        "convert": {
            "groups": 2,
            "fit": {name: item.default for name, item in keys(ReconstructConfig).items()},
        },
        "report": {
            name: item.default for name, item in keys(SECTIONS["report"]).items() if item.default is not None
        },
    }
    assert recipe_from_dict(recipe_from_dict(data).to_dict()) == recipe_from_dict(data)


# --- what the Python API is given -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mha2gqa.convert(None, "out", 4), "source: must be a path or a Hub id, not None"),  # type: ignore[arg-type]
        (lambda: mha2gqa.convert("m", None, 4), "out: must be a path or a Hub id, not None"),  # type: ignore[arg-type]
        (lambda: mha2gqa.plan(5), "source: must be a path or a Hub id, not 5"),  # type: ignore[arg-type]
        (lambda: mha2gqa.run(None), "recipe: must be a Recipe, a recipe file or a mapping of its sections"),  # type: ignore[arg-type]
        (lambda: mha2gqa.sweep(3), "recipe: must be a Recipe, a recipe file or a mapping of its sections"),  # type: ignore[arg-type]
        (lambda: mha2gqa.convert_model("folder", 4), "model: must be a model of transformers, not 'folder'"),
        (lambda: mha2gqa.train_model("folder", None), "model: must be a model of transformers"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_model_and_no_path_is_refused_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(mha2gqa.UsageError) as refused:
        call()
    assert message in str(refused.value)


def test_errors_configs_and_helpers_are_at_the_top_level() -> None:
    names = (
        "Mha2gqaError",
        "UsageError",
        "ConvertConfig",
        "EvaluateConfig",
        "UptrainConfig",
        "ReconstructConfig",
    )
    assert all(name in mha2gqa.__all__ for name in (*names, "check_gates", "load_model", "LoadedModel"))
    assert all(getattr(mha2gqa, name) is not None for name in mha2gqa.__all__)
    assert issubclass(mha2gqa.GateError, mha2gqa.Mha2gqaError)


def test_errors_name_options_as_they_were_given(tmp_path: Path) -> None:
    """Arguments in Python, flags on the command line; the same error object, whatever else it names stays."""
    from mha2gqa.config.signature import command_line, python_names

    flags = {"--force": "force=True", "--refit": "refit", "--as": "as_", "--eval-data": "eval_data"}
    assert python_names("use --eval-data or --no-refit, or --force", flags) == (
        "use eval_data or refit=False, or force=True"
    )
    assert python_names("start with --nproc_per_node 2, --as phi", flags) == (
        "start with --nproc_per_node 2, as_ phi"
    )
    out = tmp_path / "out"
    for typed, named in ((False, "statistics "), (True, "--statistics ")):
        with command_line() if typed else nullcontext(), pytest.raises(UsageError) as caught:
            mha2gqa.convert(tiny_model_path(), out, 2, statistics=str(tmp_path / "absent"))
        assert str(caught.value).startswith(named) and str(caught.value.where).startswith(named)
    assert not out.exists()

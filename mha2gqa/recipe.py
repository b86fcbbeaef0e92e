"""A whole job as one YAML file: frozen dataclasses, strict keys, dotted overrides. Imports no torch.

Every mistake is answered with the file (and line), the key, and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from .errors import UsageError

Method = Literal["mean", "first", "random", "align", "joint"]
Protocol = Literal["blocks", "window", "wikitext2", "rolling"]


@dataclass(frozen=True)
class ConvertRecipe:
    """Section `convert`: the words of `mha2gqa convert`.

    Args:
        groups: KV heads G of the result (not the group size).
        method: How the heads of a group become one; None is `joint` with calibration text, else `mean`.
        calibration: Files, folders, globs or hub names of the text to calibrate on.
        calibration_tokens: How many tokens of it to use.
        text_column: Column of the text in JSONL and Parquet.
        statistics: A saved statistics file to use instead of (or to write from) calibration.
        grouping: `neighbours`, `search`, or a file with one partition per layer.
        refit, reconstruct: Stages after merging; None chooses by method and calibration.
        as_: `auto`, or the model_type to re-express the source as (`as` in YAML).
        attention: Which attention to convert, where a model has more than one kind (`self,cross`).
        device, seed, max_shard_size, revision: As on the command line.
    """

    groups: int | None = None
    method: Method | None = None
    calibration: tuple[str, ...] = ()
    calibration_tokens: int = 524288
    text_column: str = "text"
    statistics: str | None = None
    grouping: str | None = None
    refit: bool | None = None
    reconstruct: bool | None = None
    as_: str = "auto"
    attention: str | None = None
    device: str = "auto"
    seed: int = 0
    max_shard_size: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class EvaluateRecipe:
    """Section `evaluate`: the words of `mha2gqa evaluate`; the models are those of the run.

    Args:
        data: Held-out text.
        text_column: Column of the text.
        protocol: How text becomes scored tokens; the name stands beside every figure.
        window, stride: Tokens; None takes the protocol's default.
        batch_size: Windows per forward pass.
        max_tokens: Stop after so many scored tokens.
        dtype, device: Of the models while they are scored.
    """

    data: tuple[str, ...] = ()
    text_column: str = "text"
    protocol: Protocol = "window"
    window: int | None = None
    stride: int | None = None
    batch_size: int = 8
    max_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class UptrainRecipe:
    """Section `uptrain`: the budget, the data and the parameter set; further keys are TrainingArguments.

    Args:
        data: Training text.
        text_column: Column of the text.
        eval_data: Held-out text scored during training.
        holdout: Fraction of `data` held out by document hash where there is no `eval_data`.
        window: Tokens per block.
        alpha: Fraction of the original pretraining tokens, in (0, 1].
        original_tokens: What the model was pretrained on.
        original_steps, original_batch_tokens: The same, as steps and tokens per step.
        tokens: The budget itself, instead of `alpha`.
        teacher: Model to distil from; `none` trains on cross-entropy.
        train: Parameter set.
        objective: `clm` or `span-corruption`; None follows the model type.
        training: Every other key of the section, handed to `transformers.TrainingArguments`.
    """

    data: tuple[str, ...] = ()
    text_column: str = "text"
    eval_data: tuple[str, ...] = ()
    holdout: float | None = None
    window: int | None = None
    alpha: float | None = None
    original_tokens: int | None = None
    original_steps: int | None = None
    original_batch_tokens: int | None = None
    tokens: int | None = None
    teacher: str | None = None
    train: Literal["all", "attention", "lora"] = "all"
    objective: str | None = None
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportRecipe:
    """Section `report`: what is written beside the checkpoints.

    Args:
        title: Headline; None is made from source and G.
        formats: Any of `json`, `markdown`, `html`, `card`.
        batch, context: The decoding situation that KV-cache sizes are quoted for.
        max_ppl_ratio: Quality gate: largest perplexity over the original's that still passes.
        license: Of the source, for the model card, where its own card does not say.
    """

    title: str | None = None
    formats: tuple[str, ...] = ("json", "markdown", "html", "card")
    batch: int = 1
    context: int = 4096
    max_ppl_ratio: float | None = None
    license: str | None = None


@dataclass(frozen=True)
class SweepRecipe:
    """Section `sweep`: the grid; every other section holds what all its cells share.

    Args:
        groups: Values of G.
        methods: Values of `convert.method`.
        alphas: Uptraining fractions; 0 is the conversion alone.
        groupings: Values of `convert.grouping`; empty leaves the section's own.
    """

    groups: tuple[int, ...] = ()
    methods: tuple[Method, ...] = ()
    alphas: tuple[float, ...] = (0.0,)
    groupings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A whole job: convert → evaluate → uptrain → evaluate → report.

    Args:
        source: Folder or hub id of the MHA model.
        output: Folder that receives checkpoints, results and report.
        description: One line for people.
        trust_remote_code: Consent to run code that comes with the model.
        convert, evaluate, uptrain, report, sweep: Sections; an absent `uptrain` ends after evaluation.
    """

    source: str = ""
    output: str = ""
    description: str = ""
    trust_remote_code: bool = False
    convert: ConvertRecipe = field(default_factory=ConvertRecipe)
    evaluate: EvaluateRecipe = field(default_factory=EvaluateRecipe)
    uptrain: UptrainRecipe | None = None
    report: ReportRecipe = field(default_factory=ReportRecipe)
    sweep: SweepRecipe | None = None

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain YAML data: every value that is not None, defaults included."""
        return _plain(self)

    def to_yaml(self) -> str:
        """The effective recipe; reading it back gives an equal `Recipe`."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


SECTIONS: dict[str, type] = {
    "convert": ConvertRecipe,
    "evaluate": EvaluateRecipe,
    "uptrain": UptrainRecipe,
    "report": ReportRecipe,
    "sweep": SweepRecipe,
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides.

    Args:
        path: YAML file.
        overrides: `--set` arguments, later ones win.

    Returns:
        The recipe; sections that need a value check it when they run.

    Raises:
        UsageError: Unreadable file, bad YAML, unknown key, value of the wrong kind.

    Example:
        >>> load_recipe("recipes/tiny.yaml", ["uptrain.alpha=0.02"]).uptrain.alpha  # doctest: +SKIP
        0.02
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror})", where=path, fix="give a recipe file, as in recipes/"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 (byte {error.start})", where=path) from error
    data, lines = _parse(text, path)
    where = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        _override(data, where, override)
    return recipe_from_dict(data, str(path), where)


def recipe_from_dict(
    data: Mapping[str, Any], where: str = "recipe", places: Mapping[str, str] | None = None
) -> Recipe:
    """A recipe from plain data, checked key by key.

    Args:
        data: As in the YAML file.
        where: Name of the recipe in error messages.
        places: Dotted key -> better place (file:line) for error messages.

    Returns:
        The recipe.

    Raises:
        UsageError: Unknown key or value of the wrong kind.
    """
    places = places or {}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS:
            values[key] = None if value is None else _section(SECTIONS[key], key, value, where, places)
        else:
            values[key] = value
    for name in ("convert", "evaluate", "report"):
        if values.get(name) is None:
            values.pop(name, None)
    return _build(Recipe, "", values, where, places)


def check_training_words(words: Iterable[str], where: str = "uptrain") -> None:
    """Check words of the `uptrain` section against `transformers.TrainingArguments` (imports torch).

    Raises:
        UsageError: A word that is neither ours nor one of TrainingArguments.
    """
    words = list(words)
    if not words:
        return
    from transformers import TrainingArguments

    known = {f.name for f in dataclasses.fields(TrainingArguments) if f.init}
    ours = {_yaml_name(f.name) for f in dataclasses.fields(UptrainRecipe)} - {"training"}
    for word in words:
        if word not in known:
            _unknown(f"uptrain.{word}", word, sorted(known | ours), where)


# --- reading -------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-5 as a number, as YAML 1.2 does (YAML 1.1 wants 1.0e-5)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _parse(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """YAML text as data and the line of every dotted key."""
    try:
        node = yaml.compose(text, _Loader)
        lines: dict[str, int] = {}
        if node is not None:
            _collect_lines(node, "", lines, path)
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"is not YAML ({getattr(error, 'problem', error)})", where=place) from error
    if not isinstance(data, dict):
        raise UsageError(
            "holds no keys", where=path, fix=f"start with `source:` ({', '.join(SECTIONS)} follow)"
        )
    return data, lines


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], path: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if name in lines:  # YAML would silently keep the last one
            raise UsageError(f"key given twice (first at line {lines[name]})", where=f"{path}:{line}: {name}")
        lines[name] = line
        _collect_lines(value, f"{name}.", lines, path)


def _override(data: dict[str, Any], where: dict[str, str], override: str) -> None:
    key, equals, text = override.partition("=")
    place = f"--set {override}"
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > 2:
        raise UsageError("is not section.key=value", where=place, fix="for example --set uptrain.alpha=0.02")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UsageError("the value is not YAML", where=place) from error
    holder = data
    if len(parts) == 2:
        if parts[0] not in SECTIONS:
            _unknown(parts[0], parts[0], list(SECTIONS), place)
        holder = data[parts[0]] = dict(data.get(parts[0]) or {})
    holder[parts[-1]] = value
    where[key] = place


def _section(kind: type, name: str, value: Any, where: str, places: Mapping[str, str]) -> Any:
    if dataclasses.is_dataclass(value):
        return value
    if not isinstance(value, Mapping):
        raise UsageError("must hold keys", where=f"{places.get(name, where)}: {name}")
    return _build(kind, f"{name}.", dict(value), where, places)


T = TypeVar("T")


def _build(kind: type[T], prefix: str, values: Mapping[str, Any], where: str, places: Mapping[str, str]) -> T:
    """An instance of a recipe dataclass from raw values."""
    hints = typing.get_type_hints(kind)
    names = {_yaml_name(f.name): f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    extra = names.pop("training", None)
    built: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in values.items():
        if key in names:
            place = f"{places.get(prefix + key, where)}: {prefix}{key}"
            built[names[key]] = coerce(hints[names[key]], value, place)
        elif extra and key == "training" and isinstance(value, Mapping):
            rest |= value
        elif extra and isinstance(key, str):
            near = difflib.get_close_matches(key, names, 1, 0.8)
            if near:  # `alhpa` is a slip of ours, not a word of TrainingArguments
                _unknown(prefix + key, key, list(names), places.get(prefix + key, where))
            rest[key] = value
        else:
            _unknown(f"{prefix}{key}", str(key), list(names), places.get(f"{prefix}{key}", where))
    if extra:
        built[extra] = rest
    return kind(**built)


def _unknown(key: str, word: str, valid: Sequence[str], where: str) -> typing.NoReturn:
    near = difflib.get_close_matches(word, valid, 1, 0.5)
    fix = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(valid)}"
    raise UsageError("unknown key", where=f"{where}: {key}", fix=fix)


def _yaml_name(name: str) -> str:
    return name.rstrip("_")


# --- values --------------------------------------------------------------------------------------------

_COUNT = re.compile(r"^(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kKMGBT]?)$")
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def parse_count(text: str | float) -> int:
    """A count such as `65536`, `1e9`, `100B` or `1.4T` as an int.

    Raises:
        ValueError: No whole number.

    Example:
        >>> parse_count("1.4T")
        1400000000000
    """
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number")
    match = _COUNT.match(str(text).strip().replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (65536, 1e9 and 100B are)")
    value = float(match[1]) * _SCALE[match[2]] if not match[1].isdigit() else int(match[1]) * _SCALE[match[2]]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def coerce(hint: Any, value: Any, place: str) -> Any:
    """`value` as the annotated type `hint` of a recipe field.

    Raises:
        UsageError: It cannot be meant as one.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return coerce(next(a for a in args if a is not type(None)), value, place)
    if value is None:
        raise UsageError("needs a value", where=place)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(a) for a in args], 1, 0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(map(str, args))}"
            raise UsageError(f"{value!r} is not possible", where=place, fix=fix)
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(coerce(args[0], item, f"{place}[{i}]") for i, item in enumerate(items))
    if dataclasses.is_dataclass(hint) or origin is dict:
        return value
    return _scalar(hint, value, place)


def _scalar(hint: Any, value: Any, place: str) -> Any:
    wrong = UsageError(f"{value!r} is not {_WORDS.get(hint, hint)}", where=place)
    if hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
        raise wrong
    if hint is str:
        if isinstance(value, (str, int, float)):
            return str(value)
        raise wrong
    if not isinstance(value, (str, int, float)):
        raise wrong
    try:
        return parse_count(value) if hint is int and not isinstance(value, int) else hint(value)
    except ValueError as error:
        raise wrong from error


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        out = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if f.name == "training":
                out |= {key: _plain(x) for key, x in item.items()}
            elif item is not None and item != ():
                out[_yaml_name(f.name)] = _plain(item)
        return out
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return value

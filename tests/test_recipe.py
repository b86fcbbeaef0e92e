"""Recipes: strict keys, typed values, overrides, and errors that name file, line, key and nearest key."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mha2gqa.config import (
    Recipe,
    ReportConfig,
    UptrainConfig,
    load_recipe,
    parse_count,
    parse_size,
    recipe_from_dict,
)
from mha2gqa.config.coerce import Bytes, coerce
from mha2gqa.errors import UsageError

TEXT = """\
source: some/model
output: out
convert:
  groups: 8
  calibration: text.jsonl
evaluate:
  data: [a.jsonl, b.txt]
uptrain:
  data: train.jsonl
  alpha: 0.05
  original_tokens: 2T
  learning_rate: 1e-5
  adam_beta2: 0.95
"""


def write(path: Path, text: str = TEXT) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_values_as_their_types(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path / "r.yaml"))
    assert recipe.convert.groups == 8 and recipe.convert.calibration == ("text.jsonl",)
    assert recipe.evaluate.data == ("a.jsonl", "b.txt")
    assert recipe.uptrain is not None and recipe.uptrain.original_tokens == 2_000_000_000_000
    assert recipe.uptrain.learning_rate == 1e-5  # YAML 1.1 alone would give the text '1e-5'
    assert recipe.uptrain.training_args == {"adam_beta2": 0.95}
    assert recipe.uptrain.options().keys() == {
        "data", "alpha", "original_tokens", "learning_rate", "training_args"
    }  # fmt: skip


def test_the_effective_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path / "r.yaml"), ["convert.as=phi", "sweep.groups=[8, 4]"])
    assert recipe.convert.as_ == "phi" and recipe.sweep is not None and recipe.sweep.groups == (8, 4)
    assert load_recipe(write(tmp_path / "again.yaml", recipe.to_yaml())) == recipe
    assert recipe_from_dict(recipe.to_dict()) == recipe


def test_nested_keys(tmp_path: Path) -> None:
    text = TEXT.replace("groups: 8", "groups: 8\n  fit:\n    steps: 1e2\n    unit: layer")
    recipe = load_recipe(write(tmp_path / "r.yaml", text), ["convert.fit.batch_size=4"])
    assert recipe.convert.fit is not None
    assert dict(recipe.convert.fit) == {"steps": 100, "batch_size": 4, "unit": "layer"}
    assert recipe_from_dict(recipe.to_dict()) == recipe
    with pytest.raises(UsageError, match=r"r.yaml:6: convert.fit.setps: unknown key; did you mean steps"):
        load_recipe(write(tmp_path / "r.yaml", text.replace("steps:", "setps:")))


def test_overrides_win_and_later_ones_win_over_earlier(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml")
    recipe = load_recipe(
        path, ["uptrain.alpha=0.02", "convert.groups=4", "convert.groups=2", "output=elsewhere"]
    )
    assert recipe.uptrain is not None
    assert (recipe.uptrain.alpha, recipe.convert.groups, recipe.output) == (0.02, 2, "elsewhere")
    recipe = load_recipe(path, ["uptrain.max_grad_norm=0.5"])
    assert recipe.uptrain is not None and recipe.uptrain.training_args["max_grad_norm"] == 0.5
    assert load_recipe(path, ["uptrain=null"]).uptrain is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("groups: 8", "gruops: 8"), "r.yaml:4: convert.gruops: unknown key; did you mean groups?"),
        (("evaluate:", "evalaute:"), "r.yaml:6: evalaute: unknown key; did you mean evaluate?"),
        (
            ("groups: 8", "groups: 2.5"),
            "r.yaml:4: convert.groups: must be a whole number, not 2.5",
        ),
        (("groups: 8", "groups: eight"), "r.yaml:4: convert.groups: must be a whole number"),
        (("groups: 8", "groups: true"), "r.yaml:4: convert.groups: must be a whole number, not True"),
        (
            ("groups: 8", "method: joins"),
            "r.yaml:4: convert.method: must be one of mean, first, random, align, joint (did you mean joint?), not 'joins'",
        ),
        (("alpha: 0.05", "alhpa: 0.05"), "r.yaml:10: uptrain.alhpa: unknown key; did you mean alpha?"),
        (("alpha: 0.05", "data: x"), "r.yaml:10: uptrain.data: key given twice (first at line 9)"),
        (("  groups: 8", "  - groups"), "r.yaml"),
        (
            ("convert:\n  groups: 8\n  calibration: text.jsonl", "convert: 8"),
            "r.yaml:3: convert: must hold keys",
        ),
        (("groups: 8", "groups: [8"), "is not YAML"),
        (
            ("data: [a.jsonl, b.txt]", "data: [1, {}]"),
            "r.yaml:7: evaluate.data: must be text (item 2), not [1, {}]",
        ),
    ],
)
def test_errors_name_file_line_key_and_nearest_key(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = write(tmp_path / "r.yaml", TEXT.replace(*change))
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("alpha", "--set alpha: is not section.key=value"),
        ("uptrian.alpha=1", "unknown key; did you mean uptrain?"),
        ("convert.gruops=1", "--set convert.gruops=1: convert.gruops: unknown key; did you mean groups?"),
        ("convert.groups=x", "--set convert.groups=x: convert.groups: must be a whole number"),
        ("a.b.c.d=1", "is not section.key=value"),
        ("convert.fit.step=1", "convert.fit.step: unknown key; did you mean steps?"),
        ("convert.groups.x=1", "groups: holds no keys"),
        ("convert={groups: x}", "--set convert={groups: x}: convert.groups: must be a whole number"),
    ],
)
def test_override_errors_name_the_override(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path / "r.yaml"), [override])
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "just text"])
def test_files_without_keys(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="holds no keys"):
        load_recipe(write(tmp_path / "r.yaml", content))


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "b.yaml").write_bytes(b"source: \xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_recipe(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("65536", 65536),
        ("1e9", 10**9),
        ("100B", 10**11),
        ("1.4T", 1_400_000_000_000),
        ("512k", 512_000),
        ("6_000", 6000),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "-5", "1.5", "2X", "many", "1e-3", True, "1e400", "9" * 400, "1e19", 10**5000, "nan"],
    ids=lambda value: value[:9] if isinstance(value, str) else type(value).__name__,
)
def test_bad_counts(text: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        parse_count(text)
    assert len(str(caught.value)) < 100


def test_a_bare_number_of_few_bytes_is_asked_for_its_unit() -> None:
    """`--gpu-memory 24` is meant as 24GB."""
    for few in ("24", "5.5", 24):
        with pytest.raises(ValueError, match=r"must name its unit, as in (24|5.5)GB"):
            coerce(Bytes, few)
    assert coerce(Bytes, "24B") == 24 and coerce(Bytes, 20_000) == 20_000 and coerce(Bytes, 0) == 0


@pytest.mark.parametrize("text", ["", "big", "-5GB", "9" * 400, "1e400", True, "5ZB", "1" + "0" * 19])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)


# --- whatever comes from outside ends as one short error, in bounded time -------------------------------


def nested(open_: str, close: str, levels: int) -> str:
    """Aliases that expand to ten to the power of `levels` values, in a few hundred bytes."""
    text, names = f"{open_}{'x' if open_ == '[' else 'k: x'}{close}", [f"a{n}" for n in range(levels + 1)]
    parts = [f"&{names[0]} {text}"]
    for inner, outer in itertools.pairwise(names):
        items = [f"*{inner}" if open_ == "[" else f"k{n}: *{inner}" for n in range(10)]
        parts.append(f"&{outer} {open_}{', '.join(items)}{close}")
    return f"[{', '.join(parts)}]"


HOSTILE = {
    "aliases of lists": f"source: {nested('[', ']', 8)}",
    "aliases of mappings": f"source: {nested('{', '}', 8)}",
    "short aliases": f"source: {nested('[', ']', 3)}",
    "merged aliases": "a: &a {x: 1}\nconvert: {<<: [" + ", ".join(["*a"] * 3) + "], groups: {<<: *a}}",
    "an alias to itself": "convert: &a {b: *a}",
    "an alias to itself in a list": "source: &a [*a]",
    "deep lists": "source: " + "[" * 20_000 + "]" * 20_000,
    "deep mappings": "source: " + "{a: " * 500 + "}" * 500,
    "deep blocks": "\n".join(" " * n + "a:" for n in range(200)),
    "no date": "source: a\nconvert: {seed: 2001-13-45}",
    "no time": "convert: {seed: 2001-01-01T25:00:00Z}",
    "an empty int": "convert: {seed: !!int ''}",
    "no float": "convert: {seed: !!float x}",
    "no bool": "convert: {refit: !!bool maybe}",
    "no timestamp": "convert: {seed: !!timestamp x}",
    "bytes": "source: !!binary gg==",
    "a set": "source: !!set {a, b}",
    "an object": "source: !!python/object/apply:os.system [ls]",
    "a key that is a list": "convert: {[a]: 1}",
    "a merge of text": "convert: {<<: x}",
    "5,000 digits": "convert: {groups: " + "1" * 5000 + "}",
    "5,000 digits for a rate": "uptrain: {learning_rate: " + "1" * 400 + "}",
    "long text for a number": "convert: {groups: " + "x" * 50_000 + "}",
    "a long unknown key": "x" * 900 + ": 1",
    "a long list": "convert: {groups: [" + "1, " * 9_000 + "1]}",
    "a huge file": "source: a\n#" + "x" * 1_100_000,
    "a NaN": "uptrain: {temperature: .nan}",
    "an infinity": "uptrain: {temperature: .inf}",
    "control characters": "source: \x00",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_short_error(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "r.yaml", HOSTILE[name])
    with pytest.raises(UsageError, match=r"r\.yaml") as caught:
        load_recipe(path)
    assert len(str(caught.value).replace(str(path), "r.yaml")) <= 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\n" not in HOSTILE[name]])
def test_hostile_overrides_end_in_one_short_error(tmp_path: Path, name: str) -> None:
    section, _, value = HOSTILE[name].partition(": ")
    with pytest.raises(UsageError, match="--set") as caught:
        load_recipe(write(tmp_path / "r.yaml"), [f"{section}={value}"])
    assert len(str(caught.value)) <= 400 and "\n" not in str(caught.value)


def test_anchors_and_merges_are_read(tmp_path: Path) -> None:
    text = "source: a\nevaluate: &e {data: b, window: 64}\nuptrain:\n  <<: {tokens: 1M, window: 8}\n  data: c\n  window: 16\n"
    recipe = load_recipe(write(tmp_path / "r.yaml", text))
    assert recipe.uptrain is not None
    assert dict(recipe.uptrain) == {"tokens": 1_000_000, "window": 16, "data": ("c",)}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("uptrain: {hub_token: hf_ABCDEFGHIJKLMNOPQRSTUVWX}", "uptrain.hub_token"),
        ("source: hf_ABCDEFGHIJKLMNOPQRSTUVWX", "source"),
        ("evaluate: {data: [a, 'https://user:pa55word@host/x']}", "evaluate.data"),
        ("uptrain: {training_args: {hub_token: secret-value-9}}", "uptrain.training_args.hub_token"),
    ],
)
def test_tokens_are_refused_at_reading_and_never_repeated(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(
        UsageError, match=f"r.yaml:1: {key}: a recipe must hold no password or access token"
    ) as caught:
        load_recipe(write(tmp_path / "r.yaml", text))
    assert not re.search("ABCDEF|pa55word|secret-value", str(caught.value))


def test_a_token_in_an_override_is_not_repeated(tmp_path: Path) -> None:
    for override in ("uptrain.hub_token=hf_ABCDEFGHIJKLMNOPQRSTUVWX", "source=hf_ABCDEFGHIJKLMNOPQRSTUVWX"):
        with pytest.raises(UsageError, match="no password or access token") as caught:
            load_recipe(write(tmp_path / "r.yaml"), [override])
        assert "ABCDEF" not in str(caught.value)


# --- ranges and contradictions, at the key's own line ---------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("alpha: 0.05", "alpha: 5"),
            "r.yaml:10: uptrain.alpha: must be > 0 and <= 1, not 5; it is a fraction: did you mean 0.05 (5 %)?",
        ),
        (("alpha: 0.05", "alpha: 0.05\n  tokens: 1M"), "r.yaml:10: uptrain.alpha: excludes tokens"),
        (("alpha: 0.05", "teacher_cache: x"), "r.yaml:10: uptrain.teacher_cache: requires teacher_top_k"),
        (("alpha: 0.05", "temperature: 0"), "r.yaml:10: uptrain.temperature: must be > 0, not 0"),
        (("adam_beta2: 0.95", "adam_beta2: 2"), "r.yaml:13: uptrain.adam_beta2: must be >= 0 and < 1, not 2"),
        (
            ("adam_beta2: 0.95", "max_steps: 2"),
            "r.yaml:13: uptrain.max_steps: is decided elsewhere; use alpha or tokens",
        ),
        (
            ("adam_beta2: 0.95", "push_to_hub: true"),
            "r.yaml:13: uptrain.push_to_hub: is decided elsewhere; use mha2gqa push OUT",
        ),
        (
            ("adam_beta2: 0.95", "fsdp_config: {a: 1}"),
            "r.yaml:13: uptrain.fsdp_config: has no effect without fsdp",
        ),
        (
            ("adam_beta2: 0.95", "seed: 1\n  training_args: {seed: 5}"),
            "r.yaml:14: uptrain.training_args: is an option of uptrain itself; give seed outside of training_args",
        ),
        (
            ("groups: 8", "groups: 8\n  fit: {holdout: 1.5}"),
            "r.yaml:5: convert.fit.holdout: must be > 0 and < 1, not 1.5",
        ),
        (
            ("groups: 8\n  calibration: text.jsonl", "groups: 8\n  refit: true"),
            "r.yaml:5: convert.refit: needs text; give calibration",
        ),
    ],
)
def test_values_that_cannot_be_used_are_refused_at_reading(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in TEXT
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path / "r.yaml", TEXT.replace(*change)))
    assert message in str(caught.value)


def test_sections_of_reports_and_sweeps_have_their_defaults() -> None:
    recipe = recipe_from_dict({"report": {"batch": 4}, "sweep": {"groups": [4, 2]}})
    assert recipe.report == ReportConfig(batch=4) and recipe.report.context == 4096
    assert recipe.sweep is not None and recipe.sweep.alphas == (0.0,)


def test_defaults_are_a_recipe() -> None:
    assert recipe_from_dict({}) == Recipe()


def test_reading_a_recipe_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from mha2gqa.config import load_recipe; load_recipe(sys.argv[1]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(write(tmp_path / "r.yaml"))], check=True)


def test_null_leaves_an_option_of_the_trainer_unset(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "source: m\noutput: o\nconvert: {groups: 2}\nevaluate: {data: t}\n"
        "uptrain: {data: t, tokens: 4096, weight_decay: null, training_args: {adam_beta2: null}}\n"
    )
    found = load_recipe(file)
    again = tmp_path / "again.yaml"
    again.write_text(found.to_yaml())
    assert load_recipe(again) == found and "weight_decay" not in found.to_yaml()
    assert not UptrainConfig("m", "o", "t", tokens=4096, training_args={"weight_decay": None}).training_args

"""Recipes: strict keys, typed values, overrides, and errors that name file, line, key and nearest key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mha2gqa.config import Recipe, check_training_words, load_recipe, parse_count, recipe_from_dict
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
    assert recipe.convert.fit.options() == {"steps": 100, "batch_size": 4, "unit": "layer"}
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
        (("groups: 8", "groups: 2.5"), "r.yaml:4: convert.groups: 2.5 is not a whole number"),
        (("groups: 8", "groups: eight"), "r.yaml:4: convert.groups: 'eight' is not a whole number"),
        (("groups: 8", "groups: true"), "r.yaml:4: convert.groups: True is not a whole number"),
        (
            ("groups: 8", "method: joins"),
            "r.yaml:4: convert.method: 'joins' is not possible; did you mean joint?",
        ),
        (("alpha: 0.05", "alhpa: 0.05"), "r.yaml:10: uptrain.alhpa: unknown key; did you mean alpha?"),
        (("alpha: 0.05", "data: x"), "r.yaml:10: uptrain.data: key given twice (first at line 9)"),
        (("  groups: 8", "  - groups"), "r.yaml"),
        (
            ("convert:\n  groups: 8\n  calibration: text.jsonl", "convert: 8"),
            "r.yaml:3: convert: must hold keys",
        ),
        (("groups: 8", "groups: [8"), "is not YAML"),
        (("data: [a.jsonl, b.txt]", "data: [1, {}]"), "r.yaml:7: evaluate.data[1]: {} is not text"),
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
        ("convert.groups=x", "--set convert.groups=x: convert.groups: 'x' is not a whole number"),
        ("a.b.c.d=1", "is not section.key=value"),
        ("convert.fit.step=1", "convert.fit.step: unknown key; did you mean steps?"),
        ("convert.groups.x=1", "groups: holds no keys"),
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


def test_training_words_are_those_of_transformers() -> None:
    check_training_words(["learning_rate", "warmup_steps", "per_device_train_batch_size"])
    with pytest.raises(UsageError, match=r"uptrain.max_gradnorm: unknown key; did you mean max_grad_norm"):
        check_training_words(["max_gradnorm"])


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


@pytest.mark.parametrize("text", ["", "-5", "1.5", "2X", "many", "1e-3", True])
def test_bad_counts(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_count(text)


def test_defaults_are_a_recipe() -> None:
    assert recipe_from_dict({}) == Recipe()


def test_reading_a_recipe_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from mha2gqa.config import load_recipe; load_recipe(sys.argv[1]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(write(tmp_path / "r.yaml"))], check=True)

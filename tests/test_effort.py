"""`--effort`: a word for how hard the fits try, beside the settings that it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama
from test_calibrated_fits import write_text
from test_cli import Run, run
from test_walk import blocks, llama, same, save
from walk_worker import FIT

import mha2gqa
from mha2gqa.commands.estimate import plan
from mha2gqa.config import OptionError
from mha2gqa.config import reconstruct as settings
from mha2gqa.config.convert import ConvertConfig
from mha2gqa.config.key_values import read_fit
from mha2gqa.conversion import convert_model
from mha2gqa.errors import UsageError

__all__ = ["run"]
SMALL: dict[str, Any] = {
    name: getattr(FIT, name) for name in ("batch_size", "check_every", "holdout", "learning_rate")
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("text") / "text.jsonl"))


def test_a_word_gives_the_bytes_of_the_settings_it_stands_for(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {word: {**words, "steps": 6} for word, words in settings.EFFORTS.items()}
    monkeypatch.setattr(settings, "EFFORTS", few)
    source = save(llama(), tmp_path / "source")
    options = {"calibration": [text], "calibration_window": 16, "device": "cpu"}
    mha2gqa.convert(source, tmp_path / "word", 2, effort="thorough", fit=SMALL, **options)
    mha2gqa.convert(source, tmp_path / "keys", 2, fit=SMALL | few["thorough"], **options)
    assert same(tmp_path / "keys", tmp_path / "word")
    manifest = json.loads((tmp_path / "word" / "mha2gqa.json").read_text())
    assert (manifest["calibration"]["fit"]["train"], manifest["calibration"]["fit"]["steps"]) == ("layer", 6)


def test_words_set_what_they_say() -> None:
    made = {word: ConvertConfig("a", "b", 2, effort=word).fitting for word in settings.EFFORTS}
    default = settings.ReconstructConfig()
    assert made["normal"] == default and ConvertConfig("a", "b", 2).fitting is None
    assert made["quick"].steps == 300 < default.steps and made["quick"].train == "attention"
    assert made["thorough"].train == "layer" and made["thorough"].steps >= default.steps


@pytest.mark.parametrize("fit", [["steps=5"], ["train=attention"], ["batch_size=4", "train=layer"]])
def test_settings_that_the_word_decides_are_refused_before_the_work(
    fit: list[str], run: Run, tmp_path: Path
) -> None:
    pico_llama().save_pretrained(tmp_path / "mha")
    words = ["--groups", 2, "--effort", "thorough", "--fit", *fit]
    for command in (["convert", tmp_path / "mha", tmp_path / "out"], ["plan", tmp_path / "mha"]):
        _, out, err = run(*command, *words, code=2)
        assert not out and err.count("\n") == 1 and "--effort: decides what --fit gives, too" in err
    assert not (tmp_path / "out").exists()


def test_settings_that_do_not_go_with_a_word_are_refused() -> None:
    with pytest.raises(OptionError, match=r"^effort: thorough sets train: .*; leave out unit=attention$"):
        ConvertConfig("a", "b", 2, effort="thorough", fit=read_fit(["unit=attention"]))
    config = ConvertConfig("a", "b", 2, effort="quick", fit=read_fit(["unit=attention"]))
    assert config.fitting is not None and config.fitting.unit == "attention"


def test_other_settings_stand_beside_a_word() -> None:
    config = ConvertConfig("a", "b", 2, effort="thorough", fit=read_fit(["batch_size=4 rest_rate=0.3"]))
    assert config.fitting is not None
    assert (config.fitting.batch_size, config.fitting.rest_rate, config.fitting.train) == (4, 0.3, "layer")


def test_recipes_refuse_both_in_a_dry_run(text: str, run: Run, tmp_path: Path) -> None:
    pico_llama().save_pretrained(tmp_path / "mha")
    recipe = {
        "source": str(tmp_path / "mha"),
        "convert": {"groups": 2, "calibration": [text], "effort": "quick", "fit": {"steps": 1000}},
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    _, _, err = run("run", tmp_path / "recipe.yaml", "--dry-run", code=2)
    assert err.count("\n") == 1 and "effort" in err and "decides what" in err
    recipe["convert"] |= {"effort": "thorough", "fit": {"batch_size": 4}}  # type: ignore[operator]
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"evaluate": {"data": [text]}}))
    run("run", tmp_path / "recipe.yaml", "--dry-run", code=0)


def test_a_model_in_memory_takes_the_word_too(text: str, tmp_path: Path) -> None:
    source = save(pico_llama(), tmp_path / "source")
    rows = blocks(source, text)
    with pytest.raises(OptionError, match="quick, normal, thorough"):
        convert_model(pico_llama(), 2, calibration=rows, effort="huge")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="steps="):
        convert_model(
            pico_llama(), 2, calibration=rows, effort="quick", fit=settings.ReconstructConfig(steps=3)
        )


def test_plan_prices_each_word(tmp_path: Path) -> None:
    pico_llama().save_pretrained(tmp_path / "mha")
    price = {word: plan(tmp_path / "mha", groups=2, effort=word).calibration for word in settings.EFFORTS}
    assert price["normal"] == plan(tmp_path / "mha", groups=2).calibration
    seconds = {word: p["regression"]["seconds"] for word, p in price.items()}
    memory = {word: p["regression"]["device_bytes"] for word, p in price.items()}
    assert seconds["quick"] <= seconds["normal"] <= seconds["thorough"]
    assert memory["quick"] == memory["normal"] < memory["thorough"]
    assert price["thorough"]["disk_bytes"] > price["normal"]["disk_bytes"]
    assert (price["quick"]["steps"], price["thorough"]["trained"]) == (300, "layer")


def test_settings_in_memory_may_be_a_mapping(text: str, tmp_path: Path) -> None:
    model = pico_llama()
    rows = blocks(save(model, tmp_path / "source"), text)
    few = {**SMALL, "steps": 2}
    forms = (few, settings.ReconstructConfig(**few))
    found, wanted = (convert_model(model, 2, calibration=rows, fit=form).state_dict() for form in forms)
    assert all(torch.equal(x, found[name]) for name, x in wanted.items())
    for bad, words in (
        ({"stepps": 3}, "stepps"),
        ({"steps": "many"}, "steps"),
        (3, "must hold keys"),
        ("none", "must hold keys"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            convert_model(model, 2, calibration=rows, fit=bad)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 200

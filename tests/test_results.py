"""Results as tables of pandas and as output cells of a notebook."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from mha2gqa.errors import UsageError
from mha2gqa.evaluation.evaluate_result import EvaluateResult, ModelResult
from mha2gqa.results import Result
from mha2gqa.uptraining.uptrain_result import UptrainResult


def model_result(path: str, loss: float, **further: Any) -> ModelResult:
    figures = {"bits_per_byte": 1.2, "tokens": 10, "kv_bytes_per_token": 512, "byte_perplexity": 2.0}
    figures |= {"word_perplexity": 9.0, "bytes": 40, "words": 8, "parameters": 7, "seconds": 1.0}
    return ModelResult(path, loss, math.exp(loss), sha256="0", tokens_per_second=10.0, **figures, **further)


def evaluated(*models: ModelResult) -> EvaluateResult:
    return EvaluateResult("blocks", {"window": 512}, {"tokens": 10}, list(models))


def test_a_result_is_a_table_of_pandas() -> None:
    found = evaluated(model_result("a", 3.0), model_result("b", math.nan)).to_dataframe()
    assert list(found["path"]) == ["a", "b"] and found["loss"][0] == 3.0
    assert math.isnan(found["loss"][1]), "a number, not its name as in JSON"


def test_nested_figures_are_columns() -> None:
    @dataclass
    class Layers(Result):
        table: ClassVar[str] = "layers"
        layers: list[dict[str, Any]] = field(default_factory=list)

    found = Layers([{"layer": 0, "norm_ratio": {"k": 0.5, "v": 0.6}}]).to_dataframe()
    assert list(found.columns) == ["layer", "norm_ratio.k", "norm_ratio.v"]
    assert Layers().to_dataframe().empty


def test_an_uptraining_is_the_table_of_its_log() -> None:
    losses = {
        "train": [{"step": 5, "loss": 2.0}],
        "held_out": [{"step": 0, "eval_loss": 3.0}],
        "held_out_end": 3.0,
    }
    result = UptrainResult("a", "b", None, "all", {}, losses, {})
    assert list(result.to_dataframe()["step"]) == [0, 5]


def test_a_result_without_a_table_and_a_machine_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Plain(Result):
        value: int = 1

    with pytest.raises(UsageError, match="Plain: this result holds no table; use to_dict"):
        Plain().to_dataframe()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pandas is not installed; pip install pandas"):
        evaluated().to_dataframe()


def test_a_notebook_shows_the_table_of_the_terminal() -> None:
    result = evaluated(model_result("<b>a</b>", 3.0), model_result("b", 3.1))
    html = result._repr_html_()
    assert "<td" in html and ">3.1000</td>" in html and "+10.5 %" in html
    assert "&lt;b&gt;a" in html and "<b>a" not in html
    plain = UptrainResult("a", "b", None, "all", {"tokens": 4096, "steps": 2}, {}, {})._repr_html_()
    assert "4.1k tokens in 2 steps" in plain

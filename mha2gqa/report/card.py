"""The report as Markdown, and as a model card with the front matter that the Hub reads."""

from __future__ import annotations

from typing import Any

from .content import Report, differences, models_table, scoring
from .generation_scores import METRICS
from .headline import headline, limits
from .names import display_name, hub_name, public
from .numbers import finite
from .templating import Markdown, escape_markdown, markdown_table, markdown_templates

TAGS = ("mha2gqa", "gqa", "grouped-query-attention")
SOUND = ("Speech", "Waveform")  # in the name of an auto class: its models take more than text, or give it
FIGURES = ("perplexity", "loss", "bits_per_byte")


def markdown(report: Report) -> str:
    """The report as a Markdown document."""
    return _fill("report.md", public(report))


def model_card(report: Report) -> str:
    """A Hugging Face model card: front matter (base model, license, datasets, results) and the report."""
    report = public(report)
    base: str = escape_markdown(report.source)
    if hub_name(report.source):
        base = f"[{base}](https://huggingface.co/{report.source})"
    return _fill(
        "card.md",
        report,
        front_matter=Markdown(_card_data(report).to_yaml().strip()),
        base=Markdown(base),
        usage=_usage(report),
    )


def _fill(template: str, report: Report, **further: Any) -> str:
    """A Markdown template with everything that a report shows."""
    table = models_table(report.models)
    return (
        markdown_templates()
        .get_template(template)
        .render(
            report=report,
            headline=headline(report),
            models=markdown_table(table.columns, table.rows),
            scoring=scoring(report),
            differences=differences(report.models),
            limits=limits(report),
            **further,
        )
    )


def _usage(report: Report) -> str:
    """How the result is loaded."""
    consent = ", trust_remote_code=True" if report.own_code else ""
    sound = any(word in report.auto_class for word in SOUND)
    reader, name = ("AutoProcessor", "processor") if sound else ("AutoTokenizer", "tokenizer")
    return (
        f"from transformers import {report.auto_class}, {reader}\n\n"
        f'model = {report.auto_class}.from_pretrained("PATH_OR_NAME", dtype="auto"{consent})\n'
        # It is found through the config, whose class comes with the code.
        f'{name} = {reader}.from_pretrained("PATH_OR_NAME"{consent})'
    )


def _card_data(report: Report) -> Any:
    """The front matter as `huggingface_hub` holds it."""
    from huggingface_hub import ModelCardData

    results, details = _results(report), report.license_details
    return ModelCardData(
        library_name="transformers",
        tags=list(TAGS),
        license=report.license,
        license_name=details.get("license_name"),
        license_link=details.get("license_link"),
        base_model=report.source if hub_name(report.source) else None,
        datasets=list(report.datasets) or None,
        model_name=report.title if results else None,
        eval_results=results or None,
    )


def _results(report: Report) -> list[Any]:
    """The figures of the final model."""
    from huggingface_hub import EvalResult

    if (final := report.final) is None:
        return []
    data = _dataset_name(report)
    generated = final.get("generation") or {}
    figures = [(key, final.get(key)) for key in FIGURES] + [(key, generated.get(key)) for key in METRICS]
    return [
        EvalResult(
            task_type=_task(report.auto_class),
            dataset_type=data,
            dataset_name=data,
            metric_type=key,
            metric_value=round(value, 6),
            metric_name=f"{key.replace('_', ' ')} ({report.protocol})",
        )
        for key, figure in figures
        if (value := finite(figure)) is not None
    ]


def _task(auto_class: str) -> str:
    """What the Hub calls the task of models of an auto class."""
    if "Speech" in auto_class:
        return "automatic-speech-recognition"
    return "text2text-generation" if "Seq2Seq" in auto_class else "text-generation"


def _dataset_name(report: Report) -> str:
    files = report.data.get("paths") or ["held-out text"]
    first = files if isinstance(files, str) else str(files[0])
    bare = first.split(":", 1)[0]  # of NAME:CONFIG:SPLIT
    return bare if hub_name(bare) else display_name(first)

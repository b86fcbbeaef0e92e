"""The report as Markdown, and as a model card with the front matter that the Hub reads."""

from __future__ import annotations

from typing import Any

import yaml

from .content import COLUMNS, Report, differences, headline, limits, model_rows, scoring
from .names import display_name, hub_name, public
from .tables import finite, markdown_table


def markdown(report: Report) -> str:
    """The report as a Markdown document."""
    report = public(report)
    parts = [f"# {report.title}", headline(report), _body(report)]
    if report.recipe:
        parts.append(f"## Effective recipe\n\n```yaml\n{report.recipe.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def model_card(report: Report) -> str:
    """A Hugging Face model card: front matter (base model, license, datasets, results) and the report."""
    report = public(report)
    front = yaml.safe_dump(front_matter(report), sort_keys=False, allow_unicode=True)
    consent = ", trust_remote_code=True" if report.own_code else ""
    usage = (
        f"## Use\n\n```python\nfrom transformers import {report.auto_class}, AutoTokenizer\n\n"
        f'model = {report.auto_class}.from_pretrained("PATH_OR_NAME", dtype="auto"{consent})\n'
        # The tokenizer is found through the config, whose class comes with the code.
        f'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME"{consent})\n```'
    )
    base = (
        f"[{report.source}](https://huggingface.co/{report.source})"
        if hub_name(report.source)
        else report.source
    )
    made = (
        f"This is {base} with grouped-query attention: "
        + (
            f"{report.num_kv_heads[0]} KV heads became {report.num_kv_heads[1]}. "
            if report.num_kv_heads
            else ""
        )
        + "Made with `mha2gqa`."
    )
    return f"---\n{front}---\n\n# {report.title}\n\n{made} {headline(report)}\n\n{usage}\n\n{_body(report)}\n"


def front_matter(report: Report) -> dict[str, Any]:
    """YAML front matter; a key whose value is unknown is left out rather than guessed."""
    front: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["mha2gqa", "gqa", "grouped-query-attention"],
    }
    if report.license:
        front["license"] = report.license
    if hub_name(report.source):
        front["base_model"] = report.source
    if report.datasets:
        front["datasets"] = list(report.datasets)
    metrics = _metrics(report)
    task = "text2text-generation" if "Seq2Seq" in report.auto_class else "text-generation"
    if metrics:
        front["model-index"] = [
            {
                "name": report.title,
                "results": [
                    {
                        "task": {"type": task},
                        "dataset": {"name": _dataset_name(report), "type": _dataset_name(report)},
                        "metrics": metrics,
                    }
                ],
            }
        ]
    return front


def _metrics(report: Report) -> list[dict[str, Any]]:
    final = report.final
    wanted = (("perplexity", "perplexity"), ("loss", "loss"), ("bits_per_byte", "bits_per_byte"))
    return [
        {"type": kind, "value": round(value, 6), "name": f"{kind.replace('_', ' ')} ({report.protocol})"}
        for key, kind in wanted
        if final and (value := finite(final.get(key))) is not None
    ]


def _dataset_name(report: Report) -> str:
    files = report.data.get("paths") or ["held-out text"]
    first = files if isinstance(files, str) else str(files[0])
    bare = first.split(":", 1)[0]  # of NAME:CONFIG:SPLIT
    return bare if hub_name(bare) else display_name(first)


def _body(report: Report) -> str:
    lines = [f"{line}." for line in differences(report.models)]
    parts = [
        f"## Evaluation\n\n{markdown_table(COLUMNS, model_rows(report.models))}\n\n"
        f"Loss in nats per token; {scoring(report)}.",
        *lines,
        "## Limits\n\n" + "\n".join(f"- {line}" for line in limits(report)),
    ]
    if report.provenance:
        items = "\n".join(f"- {key}: {value}" for key, value in report.provenance.items())
        parts.append(f"## Provenance\n\n{items}")
    if report.command:
        parts.append(f"```sh\n{report.command}\n```")
    return "\n\n".join(parts)

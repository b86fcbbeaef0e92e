"""The model card of a checkpoint that we wrote: from its manifest and config, with figures where there are any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.json_files import read_json
from .card import TAGS, model_card
from .content import Report, wide_heads
from .names import display_name, hub_name

CARD, BASE_CARD = "README.md", "README.base.md"
LICENSE_KEYS = ("license", "license_name", "license_link")


def write_card(folder: Path, report: Report | None = None) -> Path:
    """Write the model card of a checkpoint folder; a card that came with the source is kept as `README.base.md`.

    Args:
        folder: With `config.json` and the manifest `mha2gqa.json`.
        report: What the card says; from the manifest where absent.

    Returns:
        The file.

    Raises:
        CheckpointError: Config or manifest cannot be read.
    """
    readme = folder / CARD
    if readme.is_file() and not is_ours(readme):
        readme.replace(folder / BASE_CARD)
    readme.write_text(model_card(report or report_of(folder)), encoding="utf-8")
    return readme


def is_ours(readme: Path) -> bool:
    """Whether a card was written by this package, as its tags say."""
    tags = card_metadata(readme).get("tags")
    return isinstance(tags, list) and TAGS[0] in tags


def card_metadata(readme: Path) -> dict[str, Any]:
    """The front matter of a card; empty where there is none that can be read."""
    import yaml
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        text = readme.read_text(encoding="utf-8-sig")
        if not REGEX_YAML_BLOCK.search(text):
            return {}  # of which the library would warn
        card = ModelCard(text, ignore_metadata_errors=True)
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}
    found: dict[str, Any] = card.data.to_dict()
    return found


def license_of(readmes: Sequence[Path]) -> dict[str, str]:
    """`license`, and where it is none of the Hub's `license_name` and `license_link`, from the first card that has it."""
    for readme in readmes:
        data = card_metadata(readme) if readme.is_file() else {}
        if isinstance(data.get("license"), str):
            return {key: data[key] for key in LICENSE_KEYS if isinstance(data.get(key), str)}
    return {}


def source_license(source: str) -> dict[str, str]:
    """The licence that the source's own card states: in its folder, or in the Hub's cache."""
    folder = Path(source)
    if folder.is_dir():
        return license_of([folder / BASE_CARD, folder / CARD])
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, CARD) if hub_name(source) else None
    return license_of([Path(cached)] if isinstance(cached, str) else [])


def how_to_load(folder: Path) -> dict[str, Any]:
    """The arguments of `Report` that say what loading a checkpoint takes."""
    config = read_json(folder / "config.json")
    return {"auto_class": _auto_class(config), "own_code": "auto_map" in config}


def _auto_class(config: Mapping[str, Any]) -> str:
    """The class of transformers that loads a model; a plain decoder says so itself, without seconds of imports."""
    classes = [str(name) for name in config.get("architectures") or ()]
    decoder = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes)
    if decoder and not config.get("is_encoder_decoder") and "text_config" not in config:
        return "AutoModelForCausalLM"
    from ..checkpoints.loading import loading_class

    return str(loading_class(config).__name__)


def report_of(folder: Path) -> Report:
    """A report of what a folder's manifest says; without the figures of an evaluation, which it does not hold.

    Args:
        folder: A converted or uptrained checkpoint.
    """
    from ..architectures.registry import unread
    from ..checkpoints.reader import MANIFEST  # which reads tensors, and so imports torch

    manifest, config = read_json(folder / MANIFEST), read_json(folder / "config.json")
    heads, trained = manifest.get("num_kv_heads") or {}, manifest.get("uptrain") or {}
    source = display_name(str(manifest.get("source") or "an unknown model"))
    found = license_of([folder / BASE_CARD, folder / CARD])
    return Report(
        title=_title(source, manifest.get("groups") or heads.get("after"), manifest.get("wide") or 1),
        source=source,
        models=(),
        num_kv_heads=(heads["before"], heads["after"]) if heads else None,
        wide=wide_heads(manifest),
        method=str(manifest.get("method") or ""),
        layers=manifest.get("layers") or (),
        calibration=manifest.get("calibration") or {},
        budget=trained.get("budget") or {},
        training=trained.get("losses") or {},
        license=found.pop("license", None),
        license_details=found,
        datasets=[name for name in _texts(manifest) if hub_name(name)],
        provenance=_provenance(manifest, trained),
        warnings=[
            *(manifest.get("warnings") or ()),
            *(trained.get("warnings") or trained.get("notices") or ()),
        ],
        unread=bool(unread(config)),
        **how_to_load(folder),
    )


def _title(source: str, groups: int | None, wide: int) -> str:
    name = source.removeprefix("builtin:").rsplit("/", 1)[-1]
    return f"{name}-gqa{groups}{f'-wide{wide}' if wide > 1 else ''}" if groups else name


def _texts(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the texts that shaped the weights, without config and split."""
    calibration, trained = manifest.get("calibration") or {}, manifest.get("uptrain") or {}
    names = [*(calibration.get("texts") or ()), *((trained.get("recipe") or {}).get("data") or ())]
    return list(dict.fromkeys(str(name).split(":", 1)[0] for name in names))


def _provenance(manifest: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, str]:
    """Where everything came from, label -> text."""
    calibration = manifest.get("calibration") or {}
    rows = {
        "source": display_name(str(manifest.get("source"))),
        "revision": manifest.get("source_revision"),
        "calibration text": _named(calibration.get("texts")),
        "calibration tokens": calibration.get("unique_tokens"),
    }
    if trained:
        rows["uptraining text"] = _named((trained.get("recipe") or {}).get("data"))
        teacher = trained.get("teacher")
        rows["teacher"] = display_name(str(teacher)) if teacher else "none (next-token loss)"
        rows["trained"] = trained.get("train")
    versions = (trained or manifest).get("versions") or {}
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {
        key: f"{value:,}" if isinstance(value, int) else str(value) for key, value in rows.items() if value
    }


def _named(texts: Sequence[Any] | None) -> str:
    return ", ".join(display_name(str(text)) for text in texts or ())

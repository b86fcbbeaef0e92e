"""Everything that is read from a raw `config.json`, in one place. No torch is imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, hub_refusals, quoted, reason
from ..modeling import PREFIX
from .dtypes import COMPUTED, Dtype, named_dtype, torch_dtype
from .hub import check_hub_name, local_path
from .json_files import RESTORE, read_json

if TYPE_CHECKING:
    import torch

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
DECODER_CONTEXT_KEYS = ("max_target_positions", "max_position_embeddings", "n_positions")
FLOAT32_BYTES = 4
MOST_PARTS = 100_000  # layers, experts, labels: for each of them a class builds something
_COUNTED = re.compile(r"layers?$|experts?$|labels$|blocks?$|^n_layer|^depth|_codebooks$|stages?$")


def load_config_json(path: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """The raw `config.json` of a folder or Hub id, unknown keys and order kept.

    Raises:
        CheckpointError: There is none, or it is not a JSON object.
    """
    folder = local_path(path)
    if not folder.exists():
        return read_config_json(_hub_file(str(path), "config.json", revision))
    if not (folder / "config.json").exists() and not (folder / "config.json").is_symlink():
        raise CheckpointError("no config.json", where=path, fix="give a folder in the Hugging Face format")
    return read_config_json(folder / "config.json")


def read_config_json(file: Path) -> dict[str, Any]:
    """A raw config from its file, the shapes checked that everything else relies on.

    Raises:
        CheckpointError: It is missing or broken, or a class would be built from absurd numbers.
    """
    config = read_json(file)
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise CheckpointError(
            f"architectures is {quoted(names)}", where=file, fix="it must be a list of names of classes"
        )
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        unnamed = value is None or isinstance(value, Mapping) or value == ""
        if not unnamed and named_dtype(value) is None:
            raise CheckpointError(
                f"{key} is {quoted(value)}", where=file, fix="it must name a format, such as bfloat16"
            )
    if (count := _absurd(config)) is not None:
        raise CheckpointError(f"{count} is larger than any model's", where=file, fix=RESTORE)
    return config


def _absurd(node: Any, depth: int = 0) -> str | None:
    """A key that counts parts of a model and would keep its class busy building them, or None."""
    if not isinstance(node, Mapping) or depth > 8:
        return None
    for key, value in node.items():
        if isinstance(value, int | float) and value > MOST_PARTS and _COUNTED.search(key):
            return quoted(key)
        if (found := _absurd(value, depth + 1)) is not None:
            return found
    return None


def _hub_file(repo: str, name: str, revision: str | None) -> Path:
    check_hub_name(repo)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except hub_refusals() as error:  # no such repository or file, offline, malformed id
        raise CheckpointError(
            f"neither a local folder nor a Hub model with {name} ({reason(error)})",
            where=repo,
            fix="check the path, or that the model is in the cache when offline",
        ) from error


# --- one value -----------------------------------------------------------------------------------------


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key in raw JSON, or None."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def first_value(values: Any, *names: str) -> Any:
    """The first of these attributes that is set, or None."""
    return next((x for name in names if (x := getattr(values, name, None)) is not None), None)


def positive(value: Any, name: str) -> int:
    """`value` if it is a whole number above 0.

    Raises:
        CheckpointError: It is not; `name` says which key of the config is meant.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"no usable {name} ({quoted(value)})", where="config.json", fix="restore the config of the model"
        )
    return value


def optional(value: Any, name: str) -> int | None:
    """`positive` of a value that may be left out."""
    return None if value is None else positive(value, name)


def class_default(model_type: str, key: str) -> Any:
    """What the config class of `model_type` takes for a key that config.json leaves out, or None."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    return lookup(CONFIG_MAPPING[model_type]().to_dict(), key)


# --- the text model ------------------------------------------------------------------------------------


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a raw config that describes the text model (`text_config` where there is one)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def known_config(config: Mapping[str, Any]) -> Any:
    """A raw config (of its text model) as an object: transformers' class for its type, or its bare keys.

    A saved config leaves out what equals the defaults of its class; this fills them in.

    Raises:
        CheckpointError: transformers refuses it.
    """
    from transformers import CONFIG_MAPPING

    text = dict(text_config(config))
    model_type = str(text.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return SimpleNamespace(**text)
    try:
        return CONFIG_MAPPING[model_type].from_dict(as_numbers(text))
    except Exception as error:  # whatever its checks raise, it is this config that they refuse
        raise CheckpointError(
            f"transformers refuses it ({reason(error)})",
            where="config.json",
            fix="restore the model's config",
        ) from error


def as_numbers(value: Any) -> Any:
    """A part of a raw config with `{"__float__": "Infinity"}`, transformers' way of writing it, as numbers.

    Its classes read this from files only, not from a dict.
    """
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: as_numbers(part) for key, part in value.items()}
    return [as_numbers(part) for part in value] if isinstance(value, list) else value


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether the model has an encoder beside its decoder, by its config or the defaults of its class."""
    from transformers import CONFIG_MAPPING

    text = text_config(config)
    stated = text.get("is_encoder_decoder")
    if stated is not None:
        return bool(stated)
    model_type = str(text.get("model_type")).removeprefix(PREFIX)  # exported code stands for that class
    if model_type not in CONFIG_MAPPING:
        return False
    return bool(getattr(CONFIG_MAPPING[model_type](), "is_encoder_decoder", False))


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Most tokens the decoder was built for; None where nothing limits it."""
    known = known_config(config)
    keys = DECODER_CONTEXT_KEYS if is_encoder_decoder(config) else CONTEXT_KEYS
    found = (getattr(known, key, None) for key in keys)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


# --- numbers' format -----------------------------------------------------------------------------------


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Number of tokens a model knows, None where the config does not say."""
    found = getattr(known_config(config), "vocab_size", None)
    return found if isinstance(found, int) and found > 0 else None


def config_dtype(config: Mapping[str, Any]) -> Dtype | None:
    """The format a raw config names (`dtype`, or `torch_dtype` in older files), its own or its text model's.

    None where it names none that attention is computed in.
    """
    for holder in (config, text_config(config)):
        name = holder.get("dtype") or holder.get("torch_dtype")
        if isinstance(name, str):
            found = named_dtype(name)
            return found if found is not None and found.stored in COMPUTED else None
    return None


def dtype_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a number in the format the config names; those of float32 where it names none."""
    found = config_dtype(config)
    return FLOAT32_BYTES if found is None else found.bits // 8


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype a raw config names; float32 where it names none that attention is computed in."""
    found = config_dtype(config)
    return torch_dtype("F32" if found is None else found.stored)
